#include "ddp/pass_weights.h"

#include <ATen/OpMathType.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <string>
#include <utility>

#include "c10d/call_tag.h"
#include "c10d/work.h"
#include "ddp/packer.h"
#include "ddp/steps.h"

namespace pycomm {
namespace {

constexpr int64_t kWords = 6; // of a row
constexpr double kFar = 1e6; // the sum's weight by a unit: .grad in this unit is at most so many gradients large

bool batchesAlike(const PassWeights::Step& step) noexcept {
  return std::ranges::adjacent_find(step.rows, std::ranges::not_equal_to{}, &PassWeights::Row::batches) ==
      step.rows.end();
}

std::vector<PassWeights::Row> rowsIn(const at::Tensor& words) {
  const auto* word = words.const_data_ptr<int64_t>();
  std::vector<PassWeights::Row> rows;
  for (int64_t at = 0; at < words.numel(); at += kWords) {
    const auto ends = static_cast<PassWeights::Ends>(word[at + 5]);
    rows.push_back({std::bit_cast<double>(word[at]), word[at + 1], word[at + 2], word[at + 3], word[at + 4], ends});
  }
  return rows;
}

/// The number of passes that all ranks have made.
int64_t passesOf(const std::vector<PassWeights::Row>& rows, const JobRanks& job) {
  const auto fewer = [](const auto& one, const auto& other) { return one.passes < other.passes; };
  const auto [least, most] = std::minmax_element(rows.begin(), rows.end(), fewer);
  TORCH_CHECK(
      least->passes == most->passes,
      "rank ",
      job.of(static_cast<int>(most - rows.begin())),
      " has made ",
      most->passes,
      " backward passes since the last reduction, and rank ",
      job.of(static_cast<int>(least - rows.begin())),
      " has made ",
      least->passes,
      ": with weight=\"samples\" every rank makes the same number. A rank without a batch calls model.no_batch()");
  return least->passes;
}

void checkEnds(const std::vector<PassWeights::Row>& rows, const JobRanks& job) {
  const auto find = [&rows](PassWeights::Ends ends) { return std::ranges::find(rows, ends, &PassWeights::Row::ends); };
  const auto nested = find(PassWeights::Ends::Before);
  const auto without = find(PassWeights::Ends::WithoutBatch);
  TORCH_CHECK(
      nested == rows.end() || without == rows.end(),
      "on rank ",
      job.of(static_cast<int>(nested - rows.begin())),
      " this wrapper is in a checkpoint with use_reentrant=True, so its pass ends before that of a wrapper which was made earlier, and rank ",
      job.of(static_cast<int>(without - rows.begin())),
      ", which has called pycomm.no_batch(), ends that one first. Use use_reentrant=False");
}

void restore(at::Tensor& grad, const at::Tensor& before) {
  if (before.defined() && grad.defined() && !grad.is_sparse()) {
    grad.copy_(before);
  } else {
    grad = before.defined() ? before.clone() : at::Tensor();
  }
}

bool isZeros(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor._nnz() == 0 : !tensor.ne(0).any().item<bool>();
}

// Of 2 the smaller one.
int64_t medianOf(const std::deque<int64_t>& values) {
  std::vector<int64_t> sorted(values.begin(), values.end());
  const auto middle = sorted.begin() + (static_cast<std::ptrdiff_t>(sorted.size()) - 1) / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

} // namespace

PassWeights::PassWeights(const std::vector<ReducedParam>& params, const SharedState& state)
    : params_(params),
      state_(state),
      narrow_(std::any_of(params.begin(), params.end(), [](const auto& each) { return each.dtype == at::kHalf; })),
      kept_(params.size()) {}

void PassWeights::set(std::optional<double> weight) {
  set_ = weight.has_value() ? std::make_shared<SaidWeight>(SaidWeight{*weight, forwards_}) : nullptr;
}

void PassWeights::gapEnds() noexcept {
  if (pass_began_.ns != 0) { // of a pass that did not reduce
    endPass();
    gap_began_ = last_gradient_;
  }
  if (gap_began_.ns != 0) {
    sum_.gap_ns += WaitClock::busyNs(std::exchange(gap_began_, {}), WaitClock::now());
  }
}

bool PassWeights::forwardBegan(std::optional<double> weight) noexcept {
  gapEnds();
  if (weight.has_value()) {
    weight_before_ = std::exchange(forward_weight_, *weight);
    in_forward_ = true;
  }
  forward_began_ = WaitClock::now();
  const bool many = step_count_ - shown_steps_ >= static_cast<int64_t>(kStepsKept / 4);
  shown_steps_ = many ? step_count_ : shown_steps_;
  return many || (!steps_.empty() && !batchesAlike(steps_.back()));
}

void PassWeights::forwardFailed() noexcept {
  if (std::exchange(in_forward_, false)) {
    forward_weight_ = weight_before_;
    sum_.stray = sum_.stray || sum_.stray_in == forwards_ + 1; // the next one has this number
  }
}

void PassWeights::stray(size_t param) {
  sum_.stray = sum_.stray || sum_.cannot_follow;
  if (in_forward_) {
    const int64_t before = std::exchange(sum_.stray_in, forwards_ + 1);
    sum_.stray = sum_.stray || (before != 0 && before != sum_.stray_in);
    sum_.holds.resize(params_.size(), Holds::Other);
    if (params_[param].tensor.grad().defined()) {
      sum_.holds[param] = Holds::Sum; // also if its own pass does not use it
    }
  }
}

void PassWeights::marked(ForwardMark& mark) {
  in_forward_ = false;
  mark.number = ++forwards_;
  mark.began = forward_began_;
  if (set_ != nullptr) {
    mark.said = set_;
    set_->taken = true;
  }
}

double PassWeights::takeWeight(ForwardMark& mark) {
  if (set_ != nullptr && set_->after == mark.number && (mark.number == forwards_ || mark.said == nullptr)) {
    mark.said = set_;
  }
  TORCH_CHECK(
      mark.said == nullptr || mark.said->counted_for == 0 || mark.said->counted_for == mark.number,
      "weight=\"samples\" does not know the weight of this backward pass: model.samples is for one pass, and the number that was set for this "
      "forward pass has counted for another one. Set model.samples before each forward()");
  return mark.said != nullptr ? mark.said->weight : mark.weight;
}

void PassWeights::coming(size_t param, const at::Tensor& grad, GradientCall call) {
  const at::NoGradGuard no_grad;
  if (sum_.passes == 0 && (sum_.stray || sum_.stray_in != 0) &&
      forgotten()) { // it shows no longer when this one has been added
    forget();
  }
  const at::Tensor& before = params_[param].tensor.grad();
  const bool some = before.defined();
  early_.push_back(
      {param,
       some ? before.clone() : at::Tensor(),
       grad,
       call,
       before.unsafeGetTensorImpl(),
       some ? static_cast<int64_t>(before._version()) : 0});
}

void PassWeights::added(size_t param) {
  if (early_.empty() || early_.back().param != param || !early_.back().before.defined()) {
    return; // without an old .grad, the new one shows what hooks have made of it
  }
  Early& last = early_.back();
  const at::Tensor& grad = params_[param].tensor.grad();
  const bool by_autograd_alone =
      grad.unsafeGetTensorImpl() == last.into && static_cast<int64_t>(grad._version()) == last.version + 1;
  if (grad.defined() && !by_autograd_alone) {
    const at::NoGradGuard no_grad;
    last.grad = grad - last.before;
  }
}

void PassWeights::withdrawEarly() {
  std::erase_if(early_, [](const Early& each) { return !each.call.isOfPresent(); });
  std::for_each(
      early_.rbegin(), early_.rend(), [this](Early& each) { // the last one first, as one parameter may have two
        at::Tensor& grad = params_[each.param].tensor.mutable_grad();
        if (!grad.defined()) {
          each.grad.reset(); // a hook of the program's has taken it
        } else if (!each.before.defined()) {
          each.grad = grad; // as autograd has laid it out
        }
        restore(grad, each.before);
      });
}

// Of the pass that has begun.
void PassWeights::giveBackEarly() {
  for (const Early& each : std::exchange(early_, {})) {
    at::Tensor& grad = params_[each.param].tensor.mutable_grad();
    if (each.grad.defined() && !grad.defined()) {
      grad = each.grad;
    } else if (each.grad.defined() && grad.is_sparse()) {
      grad = grad + each.grad;
    } else if (each.grad.defined()) {
      grad.add_(each.grad);
    }
    came(each.param);
  }
}

void PassWeights::enter(ForwardMark& mark) {
  TORCH_CHECK(
      !mark.repeated,
      "weight=\"samples\" cannot tell what a forward pass counts that a reentrant checkpoint repeats, while the same call of backward() goes through "
      "another forward pass of this wrapper: use checkpoint(..., use_reentrant=False), or one backward() for each");
  const double now = takeWeight(mark);
  enter(Entered{now, mark.said, mark.number, /*marked=*/true, /*begun=*/false, mark.began});
}

// Not of one that lies within a pass before: that one has taken its time already, as with two forward passes and then two of backward.
void PassWeights::alsoEnters(const ForwardMark& mark) noexcept {
  if (!entered_.has_value() || (entered_->begun && pass_began_.ns == 0)) {
    return;
  }
  const int64_t passed_ns = entered_->begun ? passed_ns_ : last_gradient_.ns;
  WaitClock::Instant& began = entered_->begun ? pass_began_ : entered_->began;
  if (mark.began.ns > passed_ns && (mark.began.ns < began.ns || began.ns <= passed_ns)) {
    began = mark.began;
  }
}

void PassWeights::enter(Entered entered) {
  const at::NoGradGuard no_grad;
  const double now = entered.weight;
  withdrawEarly();
  if ((sum_.passes > 0 || sum_.cannot_follow || sum_.stray || sum_.stray_in != 0) && forgotten()) {
    forget();
  }
  TORCH_CHECK(
      entered.marked || sum_.passes == 0 || (now == sum_.unit && now != 0.0),
      "weight=\"samples\" cannot weigh accumulated passes apart whose weights differ (",
      sum_.unit,
      " and ",
      now,
      "): forward() has to return tensors, or lists, tuples, dicts or dataclasses of tensors, of which the loss is made");
  sum_.stray = sum_.stray || (sum_.stray_in != 0 && sum_.unit != 0.0 && sum_.unit != now);
  entered_ = std::move(entered);
  drops_ = now == 0.0;
  scale_ = 1.0;
  if (sum_.passes > 0 && sum_.unit != now) {
    sum_.alike = false;
  }
  if (drops_) {
    keepGradients();
  } else if (sum_.unit > now && (narrow_ || sum_.weight > kFar * now)) {
    scale_ = now / sum_.unit;
    keepGradients();
  } else if (sum_.passes > 0 && sum_.unit != now) {
    changeUnit(now);
  }
}

void PassWeights::enterWithoutBatch() {
  set_.reset();
  forward_began_ = {};
  dropEarly();
  enter(Entered{});
}

// By zero_grad(): no .grad is left.
bool PassWeights::forgotten() const {
  const ReducedParam* left = nullptr;
  const ReducedParam* gone = nullptr;
  for (size_t param = 0; param < params_.size(); ++param) {
    const bool held = !sum_.holds.empty() && sum_.holds[param] != Holds::Other;
    const bool has = params_[param].tensor.grad().defined();
    if ((held || trains(param)) && has) {
      left = &params_[param];
    }
    if (held && trains(param) && !has) {
      gone = &params_[param];
    }
  }
  TORCH_CHECK(
      gone == nullptr || left == nullptr,
      "weight=\"samples\" cannot weigh passes of which a part is gone: since the last pass, .grad of '",
      gone == nullptr ? "" : gone->name,
      "' was set to None, and that of '",
      left == nullptr ? "" : left->name,
      "' was not. Call model.zero_grad(), which forgets all of them, or none between passes that accumulate");
  return left == nullptr;
}

void PassWeights::forget() {
  Accumulated none;
  none.batches = sum_.batches; // their batches were dealt, and took their time
  none.compute_ns = sum_.compute_ns;
  none.gap_ns = sum_.gap_ns;
  sum_ = std::move(none);
}

void PassWeights::keepGradients() {
  for (size_t param = 0; param < params_.size(); ++param) {
    const at::Tensor& grad = params_[param].tensor.grad();
    kept_[param] = trains(param) && grad.defined() ? grad.clone() : at::Tensor();
  }
}

void PassWeights::changeUnit(double unit) {
  for (size_t param = 0; param < params_.size(); ++param) {
    at::Tensor& grad = params_[param].tensor.mutable_grad();
    if (sum_.unit != 0.0 && grad.defined() && sum_.holds[param] != Holds::Other) { // 0: of passes without weight only
      grad.mul_(sum_.unit / unit);
    }
  }
  sum_.unit = unit;
}

// In a pass without weight that is not reduced; came() keeps them.
void PassWeights::leaveZeros() {
  for (size_t param = 0; param < params_.size(); ++param) {
    if (trains(param) && !kept_[param].defined()) {
      const ReducedParam& each = params_[param];
      at::Tensor& grad = each.tensor.mutable_grad();
      sum_.holds[param] = Holds::Zeros;
      kept_[param] = each.sparse ? emptySparse(each.tensor) : at::zeros_like(each.tensor);
      grad = grad.defined() ? grad : kept_[param].clone();
    }
  }
}

bool PassWeights::leavesStray() const {
  for (size_t param = 0; drops_stray_ && param < params_.size(); ++param) {
    const at::Tensor& grad = params_[param].tensor.grad();
    if (sum_.holds[param] == Holds::Sum && grad.defined() && !isZeros(grad)) { // else the program has taken it back
      return true;
    }
  }
  return false;
}

// Before a reduction: a parameter that no rank uses has no .grad after it.
void PassWeights::takeZerosBack() {
  for (size_t param = 0; param < params_.size(); ++param) {
    if (sum_.holds[param] != Holds::Zeros) {
      continue;
    }
    for (at::Tensor* const each : {&params_[param].tensor.mutable_grad(), &kept_[param]}) {
      if (each->defined() && isZeros(*each)) {
        each->reset();
      }
    }
  }
}

void PassWeights::begin(bool reduces) {
  const at::NoGradGuard no_grad;
  if (!entered_.has_value()) {
    forward_weight_ = pending().value_or(forward_weight_); // also of another one in the same forward pass
    enter(Entered{forward_weight_, nullptr, 0, /*marked=*/false});
  }
  const int64_t forward = entered_->marked ? entered_->forward : forwards_ + static_cast<int64_t>(in_forward_);
  sum_.stray = sum_.stray || (sum_.stray_in != 0 && drops_ && !reduces); // it would stay in .grad
  TORCH_CHECK(
      !sum_.stray && (sum_.stray_in == 0 || sum_.stray_in == forward),
      "weight=\"samples\" cannot tell which forward pass an earlier backward pass belonged to, in no_sync() or within forward(): forward() has to "
      "return tensors, or lists, tuples, dicts or dataclasses of tensors, of which the loss is made, and backward() comes after it");
  drops_stray_ = drops_ && sum_.stray_in != 0;
  sum_.stray_in = 0;
  if (entered_->begun) { // its call goes through a graph outside no_sync(), too
    if (reduces) {
      takeZerosBack();
    }
    return;
  }
  const double now = entered_->weight;
  if (entered_->said != nullptr) {
    entered_->said->counted_for = entered_->forward;
  }
  if (set_ != nullptr && (!entered_->marked || set_->taken || set_ == entered_->said)) {
    set_.reset();
  }
  entered_->begun = true;
  sum_.weight += now;
  ++sum_.passes;
  ++sum_.batches;
  sum_.unit = now == 0.0 || scale_ != 1.0 ? sum_.unit : now;
  sum_.holds.resize(params_.size(), Holds::Other);
  if (reduces) {
    takeZerosBack();
  } else if (drops_) {
    leaveZeros();
  }
  gapEnds(); // of a pass without a forward pass
  passed_ns_ = std::exchange(last_gradient_, WaitClock::now()).ns;
  const WaitClock::Instant last = std::exchange(forward_began_, {});
  const WaitClock::Instant& began = entered_->began.ns != 0 ? entered_->began : last;
  pass_began_ = began.ns > passed_ns_ ? began : last_gradient_;
  giveBackEarly();
}

void PassWeights::endPass() noexcept {
  if (pass_began_.ns != 0) {
    sum_.compute_ns += WaitClock::busyNs(std::exchange(pass_began_, {}), last_gradient_);
  }
}

void PassWeights::came(size_t param) {
  last_gradient_ = WaitClock::now();
  if (!sum_.holds.empty() && sum_.holds[param] == Holds::Other && params_[param].tensor.grad().defined()) {
    sum_.holds[param] = Holds::Sum;
  }
  if (!drops_ && scale_ == 1.0) {
    return;
  }
  const at::NoGradGuard no_grad;
  at::Tensor& grad = params_[param].tensor.mutable_grad();
  if (!drops_) {
    takeScaled(grad, kept_[param]);
    return;
  }
  restore(grad, kept_[param]);
}

// `before` plus the share of what has come: of small floats in float32, as these may differ much in size.
void PassWeights::takeScaled(at::Tensor& grad, at::Tensor& before) const {
  if (!grad.defined()) {
    return;
  }
  if (before.defined()) {
    const at::ScalarType wide = at::toOpMathType(grad.scalar_type());
    const at::Tensor old = before.to(wide);
    grad.copy_(old + (grad.to(wide) - old).mul_(scale_));
  } else {
    grad.mul_(scale_);
  }
  before = grad.clone(); // another one may come in this pass
}

void PassWeights::launch(c10d::ProcessGroup& group, c10::Device device, int64_t wrapper) {
  weightless_ = false; // of a step that is summed again
  rows_ = at::zeros({group.getSize() * kWords}, at::kLong);
  auto* row = rows_.mutable_data_ptr<int64_t>() + group.getRank() * kWords;
  row[0] = std::bit_cast<int64_t>(sum_.weight);
  row[1] = sum_.passes;
  row[2] = last_compute_ns_;
  row[3] = sum_.batches;
  row[4] = largest_;
  row[5] = static_cast<int64_t>(ends_);
  rows_ = rows_.to(device);
  std::vector<at::Tensor> tensors{rows_};
  const CallTag about(CallTag::of("the weights of wrapper " + std::to_string(wrapper)));
  c10d::AllreduceOptions options;
  options.asyncOp = !rows_.is_cpu();
  work_ = group.allreduce(tensors, options);
  (void)ended(); // the row leaves
}

// The thread of backward runs the operation itself: another one would take its core for that.
bool PassWeights::ended() const {
  if (work_ == nullptr || !rows_.is_cpu()) { // a device's answer costs a query of an event
    return false;
  }
  auto* const ours = dynamic_cast<PycommWork*>(work_.get());
  return (ours != nullptr ? ours->poll() : work_->isCompleted()) && work_->isSuccess();
}

std::optional<double> PassWeights::await(const JobRanks& job) {
  if (weightless_) {
    return std::nullopt;
  }
  const int64_t before = nowNs();
  work_->wait();
  waited_ns_ += nowNs() - before;
  work_.reset();
  step_ = {step_count_, rowsIn(rows_.cpu())};
  const int64_t passes = passesOf(step_.rows, job);
  checkEnds(step_.rows, job);
  double total = 0;
  bool alike = true;
  for (const Row& row : step_.rows) {
    total += row.weight;
    alike = alike && row.weight == step_.rows[0].weight;
  }
  const auto ranks = static_cast<double>(step_.rows.size());
  if (total == 0.0) {
    weightless_ = true;
    return std::nullopt;
  }
  if (alike && sum_.alike) {
    return 1.0; // exactly, also where the sum of weights is rounded
  }
  return sum_.weight == 0.0 ? 0.0 : ranks * static_cast<double>(passes) * sum_.unit / total;
}

void PassWeights::commit(std::vector<int> members) {
  endPass();
  step_.members = std::move(members);
  if (sum_.gap_ns > 0) { // 0: before the first step
    gaps_ns_.push_back(sum_.gap_ns);
  }
  if (gaps_ns_.size() > kGapsKept) {
    gaps_ns_.pop_front();
  }
  last_compute_ns_ = sum_.compute_ns + (gaps_ns_.empty() ? 0 : medianOf(gaps_ns_));
  gap_began_ = WaitClock::now();
  unsynced_ += sum_.weight;
  steps_.push_back(std::move(step_));
  if (steps_.size() > kStepsKept) {
    steps_.pop_front();
  }
  ++step_count_;
  clear();
}

void PassWeights::clear() {
  endPass();
  sum_ = {};
  scale_ = 1.0;
  drops_ = drops_stray_ = weightless_ = false;
  ends_ = Ends::InTurn;
  std::fill(kept_.begin(), kept_.end(), at::Tensor());
}

void PassWeights::reset() {
  set_.reset();
  entered_.reset();
  work_.reset();
  clear();
  in_forward_ = false;
  gap_began_ = {};
  gaps_ns_.clear();
  last_compute_ns_ = kUnknown;
}

PassWeights::Saved PassWeights::saved() const {
  Accumulated sum = sum_;
  sum.stray = sum.stray || std::exchange(sum.stray_in, 0) != 0; // who loads it has no graph of that forward pass
  if (pass_began_.ns != 0) { // the last pass, whose end shows when another one begins
    sum.compute_ns += WaitClock::busyNs(pass_began_, last_gradient_);
  }
  return {std::move(sum), last_compute_ns_, unsynced_};
}

void PassWeights::load(Saved saved) noexcept {
  set_.reset();
  entered_.reset();
  pass_began_ = forward_began_ = gap_began_ = {};
  in_forward_ = false;
  sum_ = std::move(saved.sum);
  last_compute_ns_ = saved.last_compute_ns;
  unsynced_ = saved.unsynced;
}

std::vector<PassWeights::Step> PassWeights::steps(int64_t since) const {
  const auto first =
      std::find_if(steps_.begin(), steps_.end(), [since](const Step& step) { return step.index >= since; });
  return {first, steps_.end()};
}

} // namespace pycomm
