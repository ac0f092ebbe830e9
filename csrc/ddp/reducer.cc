#include "ddp/reducer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <utility>

#include "c10d/raising.h"

namespace pycomm {
namespace {

std::atomic<uint64_t> made{0};

std::string textOf(at::ScalarType dtype, at::Device device) {
  return std::string(c10::toString(dtype)) + " on " + device.str();
}

void castToFp16(std::vector<ReducedParam>& params) {
  for (const ReducedParam& param : params) {
    TORCH_CHECK(
        !param.wire_dtype.has_value(),
        "FP16_COMPRESS is wire_dtype=\"fp16\", and wire_dtype has been given: leave one of them out");
  }
  for (ReducedParam& param : params) {
    param.wire_dtype = at::kHalf;
  }
}

std::vector<at::Tensor> tensorsOf(const std::vector<ReducedParam>& params) {
  std::vector<at::Tensor> tensors;
  for (const ReducedParam& param : params) {
    tensors.push_back(param.tensor);
  }
  return tensors;
}

} // namespace

Reducer::Reducer(
    std::vector<ReducedParam> params,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    ReducerOptions options,
    const c10::intrusive_ptr<c10d::Backend>& backend,
    c10::intrusive_ptr<c10d::Store> store,
    std::shared_ptr<StepAgreement> agreement)
    : number_(made++),
      params_(std::move(params)),
      group_(std::move(group), backend, params_),
      use_(*group_.get()),
      options_(std::move(options)),
      state_(readTrained(params_)),
      reports_(std::move(store), group_.rank(), group_.job(), trained()),
      buckets_(params_),
      pass_(state_, options_.accumulate),
      marks_(tensorsOf(params_)),
      agreement_(std::move(agreement)) {
  TORCH_CHECK_VALUE(!options_.caps.nbytes.empty(), "one bucket cap at least");
  TORCH_CHECK_VALUE(options_.accumulate >= 1, "accumulate is 1 or more");
  if (options_.find_unused_parameters) {
    used_.emplace(state_, stats_);
  }
  if (options_.weighs) {
    weights_.emplace(params_, state_);
  }
  if (agreement_ != nullptr) {
    members_ = agreement_->members();
    rank_ = group_.rank();
    stats_.epochs = 1;
  }
  cutBuckets();
  hookGradients(trained());
}

Reducer::~Reducer() {
  if (agreement_ != nullptr) {
    abandonMembers();
  }
}

void Reducer::hookGradients(const std::vector<bool>& trained) {
  // The new hooks are made while the old ones are still there: if one cannot be made, the old ones stay.
  GradHooks::OnComing on_coming;
  if (weights_.has_value()) {
    on_coming = [this](size_t index, const at::Tensor& grad) { onComing(index, grad); };
  }
  grad_hooks_ = std::make_unique<GradHooks>(
      params_, trained, [this](size_t index, bool defined) { onGradient(index, defined); }, on_coming);
}

void Reducer::cutBuckets() {
  try {
    recorder_.drop(); // it has room for the buckets of now
    makeBuckets();
    pass_.reset();
    show();
  } catch (const std::exception& error) {
    (void)failure_.record("its buckets were being made", error);
    throw;
  }
}

void Reducer::makeBuckets() {
  std::vector<size_t> order;
  for (const size_t index : state_.now().order) {
    if (trained()[index]) {
      order.push_back(index);
    }
  }
  buckets_.cut({options_, group_, hook_.run != nullptr}, group_.memory(), order, state_.now().exponents);
  pipeline_ =
      std::make_unique<BucketPipeline>(buckets_, group_, hook_, stats_, recorder_, options_.drops_nonfinite_steps);
  pipeline_->begin(group_.size());
  keeper_ = buckets_.keepsResiduals() ? keepers() : nullptr;
  showBuckets();
}

const std::shared_ptr<const char>& Reducer::keepers() {
  static const auto all = std::make_shared<const char>();
  return all;
}

void Reducer::resetStep() {
  endDue();
  pipeline_->begin(group_.size());
  pass_.reset();
  marks_.disarm();
}

void Reducer::prepareForForward() {
  const Turn turn(*this);
  if (marks_.repeatsForward()) {
    failure_.raise(group_.jobRank());
    return;
  }
  join_work_.reset(); // of a forward pass that no reduction has followed
  if (agreement_ == nullptr) { // else they change, and the next step adopts them
    group_.requireSameMembers();
  } else if (agreement_->hasLeft()) {
    raising([&] { (void)agreement_->begin(StepAgreement::Round::Step); }); // which says so
  }
  if (weights_.has_value()) {
    weights_->gapEnds(); // before torch waits for other ranks
  }
  throwIfUnfinished();
  followTrained();
}

void Reducer::followTrained() {
  for (const ReducedParam& param : params_) {
    if (param.tensor.scalar_type() != param.dtype || param.tensor.device() != param.device) {
      raiseConverted(
          param.name, textOf(param.dtype, param.device), textOf(param.tensor.scalar_type(), param.tensor.device()));
    }
  }
  std::vector<bool> read = readTrained(params_);
  const auto [changed, before] = std::mismatch(read.begin(), read.end(), trained().begin());
  if (changed == read.end()) {
    if (grad_hooks_ != nullptr && !grad_hooks_->reach()) {
      hookGradients(trained());
    }
    return;
  }
  if (pass_.hasStaticGraph() && stats_.passes > 0) {
    raiseFrozen(params_[static_cast<size_t>(changed - read.begin())].name, *before);
  }
  hookGradients(read); // first: if it throws, the next forward pass finds the same change again
  state_.change([&read](SharedValues& values) { values.trained = read; });
  const bool armed = pass_.phase() == BackwardPass::Phase::Armed;
  cutBuckets();
  if (armed && !buckets_.all().empty()) {
    pass_.arm();
  }
  reports_.publishTrained(read);
}

void Reducer::markForward(const std::vector<at::Tensor>& outputs, bool reduces, double weight) {
  auto mark = std::make_shared<ForwardMark>();
  mark->reduces = reduces;
  mark->weight = weight;
  mark->reducer = weak_from_this();
  const bool marked = markGraph(outputs, mark, [weak = weak_from_this(), mark] {
    if (const auto self = weak.lock()) {
      self->onEntry(*mark);
    }
  });
  const Turn turn = reduces ? Turn(*this) : Turn(*this, turnBetweenPasses());
  if (!turn.owned() || marks_.repeatsForward()) {
    return; // a pass is under way, so no forward pass asks for one
  }
  const bool left = pass_.phase() == BackwardPass::Phase::Armed && marks_.leftNested();
  if (marks_.forward() && weights_.has_value()) {
    weights_->dropEarly();
  }
  if (left) {
    raiseLeftNested();
  }
  dropRepeated();
  if (!reduces && !pass_.reducing()) {
    followTrained(); // torch has not prepared a forward pass of no_sync(), and a gradient without a hook would have no weight and no use
  }
  if (weights_.has_value()) {
    if (forwardOfCall() != nullptr) {
      mark->repeated = true;
    } else if (!marks_.isWithinBackward()) {
      weights_->marked(*mark);
    }
  }
  if (weights_.has_value() && !reduces && !marked) {
    weights_->cannotFollow();
  }
  if (reduces) {
    last_forward_ = mark;
    const bool one_left = pass_.phase() == BackwardPass::Phase::Armed && !armed_by_mark_;
    armed_by_mark_ = marked && !one_left;
  } else if (armed_by_mark_ && !marks_.expectsAnyGraph()) {
    // The mark of the forward pass that asked for a reduction begins it. Without it, gradients are of this forward pass, or beside any.
    pass_.disarm();
  }
}

void Reducer::prepareForBackward(const std::vector<at::Tensor>& outputs) {
  const Turn turn(*this);
  if (marks_.repeatsForward()) {
    return;
  }
  const bool armed = pass_.phase() == BackwardPass::Phase::Armed;
  const bool asked = marks_.asks();
  throwIfUnfinished();
  resetStep();
  if (!pass_.hasStaticGraph()) {
    const bool search = options_.find_unused_parameters && grad_hooks_ != nullptr;
    pass_.setUnreachable(search ? grad_hooks_->unreachableFrom(outputs) : std::vector<size_t>{});
    if (last_forward_ != nullptr) {
      last_forward_->unreachable = pass_.unreachable();
    }
  }
  // A trainer that runs forwards in no_sync() and calls this before the last backward, as pipelines do, means the pass and not a graph.
  // A checkpoint that repeats such a forward leaves it at that.
  const bool repeated = torch::autograd::get_current_graph_task_id() != BackwardCall::kNone;
  const bool meant = std::exchange(last_forward_, nullptr) == nullptr;
  marks_.expect(meant || (repeated && armed && marks_.expectsAnyGraph()), armed_by_mark_);
  recorder_.begin(buckets_.all().size());
  if (!buckets_.all().empty()) {
    asked_in_ = torch::autograd::get_current_graph_task_id();
    if (!repeated) {
      armed_in_.forget();
    } else if (!armed) {
      armed_in_.follow();
      asked_before_ = asked;
      queueFinish(); // which ends what it asks for
    }
    becomeDue(armed_by_mark_);
    pass_.arm();
  }
}

bool Reducer::rebuildBuckets() {
  return raising([&] {
    const Turn turn(*this);
    const bool idle = !pass_.reducing() && !failure_.any();
    const SharedValues& now = state_.now();
    if (agreement_ != nullptr || !now.ordered || !ordersBuckets() || !idle) {
      return false;
    }
    const auto doing = [&] {
      parts_ = now.parts();
      return "the order of buckets was being agreed on";
    };
    const std::vector<size_t> order = orFail(doing, [&] {
      std::vector<size_t> agreed = group_.fromRank0(order_.seen(now.order));
      checkOrder(agreed, params_.size());
      return agreed;
    });
    state_.change([&order](SharedValues& values) {
      values.order = order;
      values.agreed = true;
    });
    order_.clear();
    cutBuckets();
    return true;
  });
}

void Reducer::setStaticGraph() {
  const Turn turn(*this);
  TORCH_CHECK(
      stats_.passes == 0 && pass_.phase() == BackwardPass::Phase::Idle,
      "static_graph must be set before the first backward pass");
  pass_.setStaticGraph();
  used_.emplace(state_, stats_);
}

bool Reducer::isCounting() {
  const std::lock_guard lock(shown_mutex_);
  return shown_.values.counting;
}

void Reducer::setForwardPassWork(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial_world_size) {
  const Turn turn(*this);
  join_work_ = divide_by_initial_world_size ? nullptr : std::move(work);
}

void Reducer::checkHookMayBeSet() {
  const Turn turn(*this);
  requireNoHook();
}

void Reducer::registerCommHook(CommHook hook) {
  const Turn turn(*this);
  TORCH_CHECK(!pass_.reducing(), "a comm hook cannot change in the middle of a backward pass");
  std::swap(hook_, hook); // the old one goes after the turn: it needs the interpreter's lock
  cutBuckets();
}

void Reducer::registerBuiltinHook(c10d::BuiltinCommHookType type) {
  const Turn turn(*this);
  requireNoHook();
  if (type == c10d::BuiltinCommHookType::FP16_COMPRESS) {
    castToFp16(params_);
    cutBuckets();
  }
  has_builtin_hook_ = true;
}

void Reducer::installPostBackwardFutures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  const Turn turn(*this);
  std::erase_if(post_backward_, [](const auto& each) { // of forward passes without a backward pass, as of an evaluation
    const bool over = each->completed() && !each->hasError();
    if (over) {
      each->wait(); // on a device this stream does, and this thread does not
    }
    return over;
  });
  post_backward_.insert(
      post_backward_.end(), std::make_move_iterator(futures.begin()), std::make_move_iterator(futures.end()));
}

void Reducer::removeAutogradHooks() {
  const Turn turn(*this);
  grad_hooks_.reset();
}

void Reducer::checkFinalized() {
  const Turn turn(*this);
  throwIfUnfinished();
}

void Reducer::resetState() {
  const Turn turn(*this);
  failure_.forget();
  endDue();
  lost_ = nullptr;
  marks_.disarm();
  join_work_.reset();
  post_backward_.clear();
  order_.clear();
  state_.reset(pass_.hasStaticGraph());
  if (pass_.hasStaticGraph()) {
    pass_.setStaticGraph(); // counts gradients from 0 again
  }
  if (used_.has_value()) {
    used_.emplace(state_, stats_);
  }
  if (weights_.has_value()) {
    weights_->reset();
  }
  buckets_.clear(); // scales; and residuals, in which a failed operation may have left anything
  cutBuckets();
}

void Reducer::updateProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  const Turn turn(*this);
  TORCH_CHECK(!pass_.reducing(), "the process group cannot change in the middle of a backward pass");
  // The old one lives until nothing of it is left in the buckets.
  const ReducerGroup before = std::exchange(group_, ReducerGroup::withItsBackend(std::move(group), params_));
  use_ = GroupUse(*group_.get());
  options_.wrapper_number = 0; // a newcomer that follows cannot know another one
  reports_.changeRanks(group_.rank(), group_.job());
  cutBuckets();
}

void Reducer::shareStore(c10::intrusive_ptr<c10d::Store> store) {
  const Turn turn(*this);
  failures_ = 0;
  reports_.share(std::move(store), trained());
}

PassWeights& Reducer::weights() {
  TORCH_CHECK(weights_.has_value(), "this reducer weighs no ranks: weight=\"samples\" was not given");
  return *weights_;
}

bool Reducer::forwardBegan(std::optional<double> weight) {
  const Turn turn(*this);
  return weights().forwardBegan(weight);
}

void Reducer::forwardFailed() {
  const Turn turn(*this);
  weights().forwardFailed();
}

bool Reducer::isWithinBackward() {
  const Turn turn(*this);
  return withinBackward();
}

void Reducer::setWeight(std::optional<double> weight) {
  const Turn turn(*this);
  TORCH_CHECK(
      !pass_.reducing() || failure_.any(),
      "model.samples is set before backward(), and gradients are being reduced: the other ranks know the weight already");
  TORCH_CHECK_VALUE(
      weight.value_or(0) == 0 || (*weight >= 1e-20 && *weight <= 1e20),
      "a weight is 0 or from 1e-20 to 1e20, and this one is ",
      weight.value_or(0));
  weights().set(weight);
}

std::vector<PassWeights::Step> Reducer::stepRows(int64_t since) {
  const Turn turn(*this);
  return weights().steps(since);
}

void Reducer::setWeightUnsynced(double weight) {
  const Turn turn(*this);
  weights().setUnsynced(weight);
}

void Reducer::setLargest(int64_t largest) {
  const Turn turn(*this);
  weights().setLargest(largest);
}

Reducer::Weighed Reducer::weighed() {
  (void)weights();
  const std::lock_guard lock(shown_mutex_);
  return shown_.weighed;
}

void Reducer::recordSteps(bool on) {
  const Turn turn(*this);
  recorder_.switchOn(on);
}

std::shared_ptr<const StepTrace> Reducer::lastStep() {
  const std::lock_guard lock(shown_mutex_);
  return shown_.last_step;
}

std::vector<std::string> Reducer::usedHere() {
  const std::unique_lock turn = turnUnlessReducing();
  std::vector<std::string> names;
  if (!turn.owns_lock() || !used_.has_value() || pass_.hasStaticGraph()) {
    return names;
  }
  for (size_t index = 0; index < params_.size(); ++index) {
    if (used_->marked(index)) {
      names.push_back(params_[index].name);
    }
  }
  return names;
}

int64_t Reducer::passes() {
  const std::lock_guard lock(shown_mutex_);
  return shown_.values.passes;
}

void Reducer::followMembers(int64_t passes) {
  const Turn turn(*this);
  state_.change([passes](SharedValues& values) { values.passes = passes; });
  ever_changed_ = true;
}

std::map<std::string, int> Reducer::exponents() {
  const std::lock_guard lock(shown_mutex_);
  std::map<std::string, int> exponents;
  for (size_t index = 0; index < params_.size(); ++index) {
    const int exponent = shown_.values.exponents[index];
    if (exponent != SharedValues::kUnscaled) {
      exponents[params_[index].name] = exponent;
    }
  }
  return exponents;
}

std::pair<std::vector<std::string>, bool> Reducer::order() {
  const std::lock_guard lock(shown_mutex_);
  std::vector<std::string> names;
  if (shown_.values.ordered) {
    for (const size_t index : shown_.values.agreed ? shown_.values.order : shown_.seen) {
      names.push_back(params_[index].name);
    }
  }
  return {names, shown_.values.agreed};
}

std::vector<size_t> Reducer::placesOf(const std::vector<std::string>& names) const {
  std::map<std::string, size_t> place_of;
  for (size_t index = 0; index < params_.size(); ++index) {
    place_of[params_[index].name] = index;
  }
  std::vector<size_t> places;
  for (const std::string& name : names) {
    const auto found = place_of.extract(name);
    TORCH_CHECK_VALUE(!found.empty(), "no parameter '", name, "' is reduced here, and the order of buckets has one");
    places.push_back(found.mapped());
  }
  TORCH_CHECK_VALUE(
      names.empty() || place_of.empty(), "the order of buckets lacks parameter '", place_of.begin()->first, "'");
  return places;
}

void Reducer::load(Saved saved) {
  const Turn turn(*this);
  TORCH_CHECK(!pass_.reducing() || failure_.any(), "a state cannot be loaded in the middle of a backward pass");
  // First all that may be refused: residuals that are overwritten are gone, and no checksum shows it.
  const std::vector<size_t> order = placesOf(saved.order);
  SharedValues values(trained());
  values.counting = state_.now().counting;
  values.knows_used = state_.now().knows_used;
  values.ordered = !order.empty();
  values.agreed = saved.agreed;
  values.accumulated = values.passes = saved.accumulated;
  values.has_local = saved.accumulated > 0;
  if (saved.agreed) {
    values.order = order;
  }
  for (size_t index = 0; index < params_.size(); ++index) {
    if (const auto found = saved.exponents.extract(params_[index].name)) {
      values.exponents[index] = found.mapped();
    }
  }
  TORCH_CHECK_VALUE(
      saved.exponents.empty(), "no parameter '", saved.exponents.begin()->first, "' is reduced here: its fp16 scale");
  TORCH_CHECK_VALUE(!saved.agreed || !order.empty(), "the order of buckets has been agreed on, and is not there");
  TORCH_CHECK_VALUE(
      saved.accumulated >= 0 && saved.accumulated < options_.accumulate, "accumulated is less than accumulate");
  TORCH_CHECK_VALUE(saved.weights.has_value() == weights_.has_value(), "the weights of a wrapper that has weights");
  buckets_.checkResiduals(saved.residuals);

  order_.clear();
  if (!saved.agreed) {
    for (const size_t index : order) {
      order_.came(index);
    }
  }
  state_.change([&values](SharedValues& each) { each = values; });
  cutBuckets();
  buckets_.setResiduals(saved.residuals);
  if (weights_.has_value()) {
    weights_->load(std::move(*saved.weights));
  }
  if (used_.has_value() && !pass_.hasStaticGraph()) {
    used_->clear();
    for (size_t index = 0; index < params_.size(); ++index) {
      if (std::find(saved.used.begin(), saved.used.end(), params_[index].name) != saved.used.end()) {
        used_->mark(index);
      }
    }
  }
}

// Not owned if another thread, or this one, has it for a pass that reduces, or if this thread has it anyway.
std::unique_lock<PassLock> Reducer::turnBetweenPasses() {
  if (mutex_.try_lock(/*brief=*/true)) {
    return std::unique_lock(mutex_, std::adopt_lock);
  }
  if (mutex_.reducing() || mutex_.refuses()) {
    return std::unique_lock(mutex_, std::defer_lock);
  }
  mutex_.lock(/*brief=*/true);
  return std::unique_lock(mutex_, std::adopt_lock);
}

// Not owned if a pass that reduces is under way.
std::unique_lock<PassLock> Reducer::turnUnlessReducing() {
  std::unique_lock turn = turnBetweenPasses();
  if (turn.owns_lock() && pass_.reducing()) {
    turn.unlock();
  }
  return turn;
}

std::map<std::string, at::Tensor> Reducer::residuals() {
  const std::unique_lock turn = turnUnlessReducing();
  return turn.owns_lock() ? buckets_.copyResiduals() : std::map<std::string, at::Tensor>{};
}

void Reducer::scaleResiduals(double factor) {
  const Turn turn(*this);
  TORCH_CHECK_VALUE(std::isfinite(factor), "residuals are scaled by a finite factor, and this one is ", factor);
  TORCH_CHECK(!pass_.reducing(), "residuals cannot be scaled in the middle of a backward pass");
  buckets_.scaleResiduals(factor);
}

void Reducer::show() noexcept {
  const bool reducing = pass_.reducing();
  mutex_.setReducing(reducing);
  try {
    const SharedValues& now = state_.now();
    const bool changed = shown_version_ != state_.version(); // with thousands of parameters, copying them takes a while
    std::vector<size_t> seen = changed && now.ordered && !now.agreed ? order_.seen(now.order) : std::vector<size_t>{};
    const std::lock_guard lock(shown_mutex_);
    const int64_t shared_nbytes = shown_.stats.shared_nbytes;
    shown_.stats = stats_;
    shown_.stats.accumulated = now.accumulated;
    shown_.stats.shared_nbytes = shared_nbytes;
    shown_.last_step = recorder_.last();
    if (changed) {
      shown_.values = now;
      shown_.seen = std::move(seen);
      shown_version_ = state_.version();
    }
    shown_.rank = rank_;
    shown_.leads = group_.rank() == 0 && !follows_leaver_;
    shown_.members = members_;
    if (weights_.has_value() && !reducing) {
      shown_.weighed = {weights_->saved(), weights_->pending(), weights_->stepCount()};
    }
  } catch (const std::exception&) { // no memory: readers see what was there before
  }
}

void Reducer::showBuckets() {
  auto names = buckets_.names();
  auto nbytes = buckets_.gradientNbytes();
  const std::lock_guard lock(shown_mutex_);
  shown_.stats.shared_nbytes = static_cast<int64_t>(buckets_.sharedNbytes());
  shown_.bucket_names = std::move(names);
  shown_.bucket_nbytes = std::move(nbytes);
}

ReducerStats Reducer::stats() {
  const std::lock_guard lock(shown_mutex_);
  return shown_.stats;
}

std::vector<std::vector<std::string>> Reducer::bucketNames() {
  const std::lock_guard lock(shown_mutex_);
  return shown_.bucket_names;
}

std::vector<size_t> Reducer::bucketNbytes() {
  const std::lock_guard lock(shown_mutex_);
  return shown_.bucket_nbytes;
}

void Reducer::requireNoHook() const {
  TORCH_CHECK(hook_.run == nullptr && !has_builtin_hook_, "a comm hook has been registered already; there can be one");
  TORCH_CHECK(!pass_.reducing() && stats_.passes == 0, "a comm hook must be registered before the first backward pass");
}

} // namespace pycomm
