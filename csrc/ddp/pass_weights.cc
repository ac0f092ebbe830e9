#include "ddp/pass_weights.h"

#include <ATen/OpMathType.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "c10d/call_tag.h"
#include "c10d/work.h"
#include "ddp/packer.h"
#include "ddp/steps.h"

namespace pycomm {
namespace {

constexpr int64_t kWords = 3; // of a row
constexpr double kFar = 1e6; // a ratio of weights: .grad in the unit of the smaller one would be so much larger

std::vector<PassWeights::Row> rowsIn(const at::Tensor& words) {
  const auto* word = words.const_data_ptr<int64_t>();
  std::vector<PassWeights::Row> rows;
  for (int64_t at = 0; at < words.numel(); at += kWords) {
    rows.push_back({std::bit_cast<double>(word[at]), word[at + 1], word[at + 2]});
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

bool isZeros(const at::Tensor& tensor) {
  return tensor.is_sparse() ? tensor._nnz() == 0 : !tensor.ne(0).any().item<bool>();
}

} // namespace

PassWeights::PassWeights(const std::vector<ReducedParam>& params)
    : params_(params),
      narrow_(std::any_of(params.begin(), params.end(), [](const auto& each) { return each.dtype == at::kHalf; })),
      kept_(params.size()) {}

void PassWeights::forwardBegan() noexcept {
  forward_began_ns_ = nowNs();
}

void PassWeights::enter(Forward forward, const std::vector<bool>& trained) {
  const at::NoGradGuard no_grad;
  const double now = set_.has_value() && forward.last ? *set_ : forward.weight;
  entered_ = now;
  if ((sum_.passes > 0 || cannot_follow_) && forgotten(trained)) {
    stray_ = cannot_follow_ = false;
    sum_ = {};
  }
  drops_ = now == 0.0;
  share_ = 1.0;
  if (sum_.passes > 0 && sum_.unit != now) {
    sum_.alike = false;
  }
  if (drops_) {
    keepGradients(trained);
  } else if (sum_.unit > (narrow_ ? now : kFar * now)) {
    share_ = now / sum_.unit;
    keepGradients(trained);
  } else if (sum_.passes > 0 && sum_.unit != now) {
    changeUnit(now);
  }
}

void PassWeights::enterWithoutBatch(const std::vector<bool>& trained) {
  set_ = 0.0;
  forward_began_ns_ = 0;
  enter({0.0, true}, trained);
}

// By zero_grad(): no .grad is left.
bool PassWeights::forgotten(const std::vector<bool>& trained) const {
  for (size_t param = 0; param < params_.size(); ++param) {
    const bool held = !sum_.holds.empty() && sum_.holds[param] != Holds::Other;
    if ((held || trained[param]) && params_[param].tensor.grad().defined()) {
      return false;
    }
  }
  return true;
}

void PassWeights::keepGradients(const std::vector<bool>& trained) {
  for (size_t param = 0; param < params_.size(); ++param) {
    const at::Tensor& grad = params_[param].tensor.grad();
    kept_[param] = trained[param] && grad.defined() ? grad.clone() : at::Tensor();
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
void PassWeights::leaveZeros(const std::vector<bool>& trained) {
  for (size_t param = 0; param < params_.size(); ++param) {
    if (trained[param] && !kept_[param].defined()) {
      const ReducedParam& each = params_[param];
      at::Tensor& grad = each.tensor.mutable_grad();
      sum_.holds[param] = Holds::Zeros;
      kept_[param] = each.sparse ? emptySparse(each.tensor) : at::zeros_like(each.tensor);
      grad = grad.defined() ? grad : kept_[param].clone();
    }
  }
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

void PassWeights::begin(double weight, const std::vector<bool>& trained, bool reduces) {
  TORCH_CHECK(
      !stray_,
      "weight=\"samples\" cannot tell which forward pass an earlier backward pass in no_sync() belonged to: forward() has to return tensors, "
      "or lists, tuples, dicts or dataclasses of tensors, of which the loss is made");
  const at::NoGradGuard no_grad;
  const bool known = entered_.has_value();
  const double now = known ? *entered_ : set_.value_or(weight);
  TORCH_CHECK(
      known || sum_.passes == 0 || (now == sum_.unit && now != 0.0),
      "weight=\"samples\" cannot weigh accumulated passes apart whose weights differ (",
      sum_.unit,
      " and ",
      now,
      "): forward() has to return tensors, or lists, tuples, dicts or dataclasses of tensors, of which the loss is made");
  if (!known) {
    share_ = 1.0;
    std::fill(kept_.begin(), kept_.end(), at::Tensor());
  }
  entered_.reset();
  set_.reset();
  drops_ = now == 0.0;
  sum_.weight += now;
  ++sum_.passes;
  sum_.unit = drops_ || share_ != 1.0 ? sum_.unit : now;
  sum_.holds.resize(params_.size(), Holds::Other);
  if (reduces) {
    takeZerosBack();
  } else if (drops_) {
    leaveZeros(trained);
  }
  endPass();
  last_gradient_ns_ = nowNs();
  const int64_t forward_began_ns = std::exchange(forward_began_ns_, 0);
  pass_began_ns_ = forward_began_ns != 0 ? forward_began_ns : last_gradient_ns_;
}

void PassWeights::endPass() noexcept {
  if (pass_began_ns_ != 0) {
    compute_ns_ += last_gradient_ns_ - pass_began_ns_;
    pass_began_ns_ = 0;
  }
}

void PassWeights::came(size_t param) {
  last_gradient_ns_ = nowNs();
  if (!sum_.holds.empty() && sum_.holds[param] == Holds::Other) {
    sum_.holds[param] = Holds::Sum;
  }
  if (!drops_ && share_ == 1.0) {
    return;
  }
  const at::NoGradGuard no_grad;
  at::Tensor& grad = params_[param].tensor.mutable_grad();
  if (!drops_) {
    takeShare(grad, kept_[param]);
    return;
  }
  const at::Tensor& before = kept_[param];
  if (before.defined() && grad.defined() && !grad.is_sparse()) {
    grad.copy_(before);
  } else {
    grad = before.defined() ? before.clone() : at::Tensor(); // another one may come in this pass
  }
}

// `before` plus the share of what has come: of small floats in float32, as these may differ much in size.
void PassWeights::takeShare(at::Tensor& grad, at::Tensor& before) const {
  if (!grad.defined()) {
    return;
  }
  if (before.defined()) {
    const at::ScalarType wide = at::toOpMathType(grad.scalar_type());
    const at::Tensor old = before.to(wide);
    grad.copy_(old + (grad.to(wide) - old).mul_(share_));
  } else {
    grad.mul_(share_);
  }
  before = grad.clone(); // another one may come in this pass
}

void PassWeights::launch(c10d::ProcessGroup& group, c10::Device device) {
  weightless_ = false; // of a step that is summed again
  rows_ = at::zeros({group.getSize() * kWords}, at::kLong);
  auto* row = rows_.mutable_data_ptr<int64_t>() + group.getRank() * kWords;
  row[0] = std::bit_cast<int64_t>(sum_.weight);
  row[1] = sum_.passes;
  row[2] = last_compute_ns_;
  rows_ = rows_.to(device);
  std::vector<at::Tensor> tensors{rows_};
  const CallTag about(CallTag::of("the weights of ranks"));
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
  step_ = {step_count_, 0, rowsIn(rows_.cpu())};
  const int64_t passes = step_.passes = passesOf(step_.rows, job);
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
  last_compute_ns_ = compute_ns_;
  unsynced_ += sum_.weight;
  steps_.push_back(std::move(step_));
  if (steps_.size() > kStepsKept) {
    steps_.pop_front();
  }
  ++step_count_;
  giveUp();
}

void PassWeights::giveUp() {
  endPass();
  compute_ns_ = 0;
  sum_ = {};
  share_ = 1.0;
  drops_ = weightless_ = stray_ = cannot_follow_ = false;
  std::fill(kept_.begin(), kept_.end(), at::Tensor());
}

void PassWeights::reset() {
  set_.reset();
  entered_.reset();
  work_.reset();
  giveUp();
  last_compute_ns_ = kUnknown;
}

std::vector<PassWeights::Step> PassWeights::steps(int64_t since) const {
  const auto first =
      std::find_if(steps_.begin(), steps_.end(), [since](const Step& step) { return step.index >= since; });
  return {first, steps_.end()};
}

} // namespace pycomm
