// One backward pass of a reducer: from the first gradient to the last average, or to the failure.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/wait_point.h"
#include "c10d/call_tag.h"
#include "c10d/future_wait.h"
#include "c10d/python_errors.h"
#include "c10d/raising.h"
#include "ddp/reducer.h"

namespace pycomm {
namespace {

void checkLayout(const at::Tensor& grad, const ReducedParam& param) {
  const bool sparse = grad.layout() == at::kSparse;
  TORCH_CHECK(
      sparse == param.sparse,
      "parameter '",
      param.name,
      "' got a ",
      sparse ? "sparse" : "dense",
      " gradient; every rank expects it to be ",
      sparse ? "dense: only those of embeddings with sparse=True may be sparse"
             : "sparse, as those of an embedding with sparse=True are");
  TORCH_CHECK_NOT_IMPLEMENTED(
      grad.scalar_type() == param.dtype,
      "parameter '",
      param.name,
      "' of ",
      param.dtype,
      " has a gradient of ",
      grad.scalar_type(),
      ": pycomm.DistributedDataParallel reduces gradients in their parameter's dtype only. Leave Tensor.grad_dtype as it is");
}

// Ranks learn of a mismatch within a second or two of each other.
constexpr std::chrono::seconds kReportsTimeout{3};

constexpr const char* kSharedGroup =
    "another DistributedDataParallel wrapper of this process has the same process group: if a backward pass goes through both, or two threads "
    "train them, gradients have to come in the same order on all ranks. Try: a group of its own for each, process_group=dist.new_group()";

constexpr const char* kWithoutBatch =
    "a call of model.no_batch() stands for one forward pass: where other ranks call forward() of several wrappers, or several times, before "
    "backward(), a rank without a batch calls pycomm.no_batch(first, second, ...) with the wrapper of each of these calls";

std::vector<std::string> namesOf(const std::vector<ReducedParam>& params, const std::vector<size_t>& indices) {
  std::vector<std::string> names;
  for (const size_t index : indices) {
    names.push_back(params[index].name);
  }
  return names;
}

bool same(const std::weak_ptr<const Reducer>& one, const std::weak_ptr<const Reducer>& other) noexcept {
  return !one.owner_before(other) && !other.owner_before(one);
}

/// This thread has run a forward pass outside any call of backward(). One of autograd's own has not, and works for all that do.
thread_local bool runs_forward = false;

/// Whose calls this thread works in: its own, or none, which stands for any.
std::thread::id caller() {
  return runs_forward ? std::this_thread::get_id() : std::thread::id();
}

bool isOfCaller(std::thread::id thread) {
  return thread == std::thread::id() || !runs_forward || thread == std::this_thread::get_id();
}

/// A reducer that a forward pass has asked for a pass, or that has begun one, which is not over: backward may go through it beside others.
struct Due {
  std::thread::id thread; ///< the last one that did: see caller()
  std::weak_ptr<Reducer> reducer;
  bool marked; ///< its pass has not begun, and only a call that goes through its marks begins it
};

/// A reducer whose pass has ended in a call of backward().
struct Ended {
  int call; ///< autograd's number: the later a call begins, the larger
  bool nested; ///< another call is around it
  std::thread::id thread; ///< see caller()
  std::weak_ptr<Reducer> reducer;
  bool finite; ///< its averages were, and those of the others in the same outermost call
};

LeafMutex due_mutex; ///< guards the next two
std::vector<Due> due;
std::vector<Ended> ended; ///< the last of each reducer, since its thread's last forward pass outside any call

std::vector<Due> allDue() {
  const std::lock_guard lock(due_mutex);
  return due;
}

/// Those that may have ended in the outermost call of this one. A call around two nested ones need not be known.
std::vector<Ended> endedBeside(int call, bool nested) {
  const std::lock_guard lock(due_mutex);
  std::vector<Ended> found = ended;
  std::erase_if(found, [=](const Ended& each) {
    const bool may_be = each.call == call || (each.nested && (nested || each.call > call));
    return !may_be || !isOfCaller(each.thread);
  });
  return found;
}

void keepEnded(const std::vector<Ended>& all) {
  const std::lock_guard lock(due_mutex);
  for (const Ended& now : all) {
    std::erase_if(
        ended, [&now](const Ended& each) { return each.reducer.expired() || same(each.reducer, now.reducer); });
    ended.push_back(now);
  }
}

/// A reducer that ends with the call of backward() that has this number.
struct Ending {
  int call;
  std::weak_ptr<Reducer> reducer;
};

/// Of the calls whose callbacks this thread runs. One that an exception has cut off may leave its own behind.
thread_local std::vector<Ending> endings;

} // namespace

void Reducer::onEntry(ForwardMark& mark) {
  raising([&] {
    const Turn turn(*this);
    enter(mark);
  });
}

void Reducer::ranForward() {
  if (torch::autograd::get_current_graph_task_id() != BackwardCall::kNone) {
    return;
  }
  runs_forward = true;
  const std::lock_guard lock(due_mutex);
  std::erase_if(ended, [](const Ended& each) { return isOfCaller(each.thread); });
}

void Reducer::becomeDue(bool marked) {
  endDue();
  const std::lock_guard lock(due_mutex);
  due.push_back({caller(), weak_from_this(), marked});
}

void Reducer::endDue() noexcept {
  const std::lock_guard lock(due_mutex);
  std::erase_if(
      due, [mine = weak_from_this()](const Due& each) { return each.reducer.expired() || same(each.reducer, mine); });
}

std::vector<std::shared_ptr<Reducer>> Reducer::besides() const {
  std::vector<std::shared_ptr<Reducer>> others;
  const auto add = [&](std::shared_ptr<Reducer> other) {
    if (other.get() != this && std::find(others.begin(), others.end(), other) == others.end() && other->isAwaited()) {
      others.push_back(std::move(other));
    }
  };
  for (const auto& mark : marksOfCall()) {
    if (auto other = mark->reduces ? mark->reducer.lock() : nullptr) {
      add(std::move(other));
    }
  }
  // Nothing is known of the graph of a call around this one, nor, without marks, of which calls a pass goes through: it may be in a nested one.
  const int call = torch::autograd::get_current_graph_task_id();
  const bool in_any = asked_in_ != BackwardCall::kNone || marks_.call() != call || !armed_by_mark_;
  for (const Due& each : allDue()) {
    auto other = each.reducer.lock();
    const bool may_be = call != BackwardCall::kNone && isOfCaller(each.thread) && (in_any || !each.marked);
    if (other != nullptr && (may_be || callReaches(other->params_))) {
      add(std::move(other));
    }
  }
  return others;
}

std::shared_ptr<const ForwardMark> Reducer::forwardOfCall() const {
  std::shared_ptr<const ForwardMark> last;
  for (const auto& mark : marksOfCall()) {
    if (same(mark->reducer, weak_from_this()) && (last == nullptr || mark->number > last->number)) {
      last = mark;
    }
  }
  return last;
}

PassWeights::Ends Reducer::ends() const {
  if (!weights_.has_value() || asked_in_ == BackwardCall::kNone ||
      asked_in_ == torch::autograd::get_current_graph_task_id()) {
    return PassWeights::Ends::InTurn;
  }
  const std::vector<Due> all = allDue();
  const bool before = std::any_of(all.begin(), all.end(), [this](const Due& each) {
    const auto other = each.reducer.lock();
    return other != nullptr && other->number_ < number_ && isOfCaller(each.thread) && other->isAwaited();
  });
  return before ? PassWeights::Ends::Before : PassWeights::Ends::InTurn;
}

bool Reducer::isAwaited() {
  const int call = torch::autograd::get_current_graph_task_id();
  return mutex_.reducing() || (over_in_ < call && stats().accumulated + 1 >= options_.accumulate);
}

void Reducer::followCall() {
  if (!marks_.follow()) {
    return;
  }
  dropRepeated();
  if (weights_.has_value()) {
    weights_->dropEarly();
  }
  pass_.forgetCounts(); // of a call past the wrapper, or that an exception ended
}

void Reducer::dropRepeated() {
  const int call = torch::autograd::get_current_graph_task_id();
  const bool goes_on = call != BackwardCall::kNone && (armed_in_.present() || call < armed_in_.number());
  if (!goes_on) {
    endRepeated();
  }
}

void Reducer::endRepeated() {
  if (armed_in_.number() == BackwardCall::kNone) {
    return;
  }
  armed_in_.forget();
  const bool of_earlier = asked_before_ && marks_.beganWithMark();
  const std::vector<size_t> missing = pass_.reducing() && !of_earlier ? pass_.missing() : std::vector<size_t>{};
  if (!missing.empty()) {
    orFail("a forward pass that backward had repeated was being reduced", [&] {
      pass_.counting() ? raiseRepeatedStatic() : raiseRepeated(namesOf(params_, missing));
    });
  }
  if (pass_.phase() != BackwardPass::Phase::Armed) {
    return;
  }
  pass_.disarm();
  if (!asked_before_) {
    marks_.disarm();
    endDue();
  }
}

void Reducer::enter(ForwardMark& mark) {
  followCall();
  if (!mark.reduces) {
    const bool first = marks_.enterLocal() && !marks_.reduces();
    if (first && weights_.has_value() && !pass_.reducing() && !marks_.beganHere()) {
      weights_->enter(mark);
      if (weights_->hasEarly()) {
        weights_->begin(/*reduces=*/false);
      }
    } else if (weights_.has_value()) {
      weights_->alsoEnters(mark);
    }
    return;
  }
  if (marks_.reduces()) {
    if (weights_.has_value()) {
      weights_->alsoEnters(mark);
    }
    return;
  }
  const bool begun = marks_.beganHere(); // also if it only accumulates: it has been counted
  if (!begun) {
    throwIfUnfinished(); // the last pass was cut off, and the program goes on with a graph from before it
  }
  marks_.enterReducing(begun);
  queueFinish(); // not with the last gradient: that may come in a call nested in this one, as of a reentrant checkpoint, which ends before it
  if (begun) {
    return;
  }
  pass_.endAccumulating();
  const std::vector<size_t> before = marks_.takeNoted();
  if (weights_.has_value() && !marks_.isLocal()) { // else the last forward pass of the loss, one of no_sync(), counts
    weights_->enter(mark);
  } else if (weights_.has_value()) {
    weights_->alsoEnters(mark);
  }
  if (!pass_.hasStaticGraph()) {
    pass_.setUnreachable(mark.unreachable);
  }
  if (before.empty()) {
    return;
  }
  orFail(
      "gradients that came before those behind forward's outputs were being reduced", [&] { beginPassWith(before); });
}

void Reducer::beginPassWith(const std::vector<size_t>& before) {
  for (const size_t index : before) {
    if (marks_.isReducedByAnother(params_[index].tensor)) { // by now .grad may hold the average on some ranks only
      raiseReducedTwice(params_[index].name);
    }
  }
  if (!pass_.hasStaticGraph()) {
    // From forward's outputs, but the loss may use them beside these.
    std::vector<size_t> unreachable = pass_.unreachable();
    std::erase_if(
        unreachable, [&](size_t param) { return std::find(before.begin(), before.end(), param) != before.end(); });
    pass_.setUnreachable(std::move(unreachable));
  }
  beginPass(ends());
  for (const size_t index : before) {
    if (!pass_.counting()) { // it has been counted
      completeGradient(index);
    }
  }
}

void Reducer::onComing(size_t index, const at::Tensor& grad) {
  raising([&] {
    const std::unique_lock turn(mutex_); // nothing that readers see changes
    followCall();
    if (!pass_.reducing() && !marks_.inPass()) {
      weights_->coming(index, grad, callOf(index));
    }
  });
}

void Reducer::onGradient(size_t index, bool defined) {
  raising([&] {
    const Turn turn(*this);
    const auto doing = [&] { return "the gradient of parameter '" + params_[index].name + "' was being reduced"; };
    orFail(doing, [&] { takeGradient(index, defined); });
  });
}

void Reducer::takeGradient(size_t index, bool defined) {
  followCall();
  const at::Tensor& grad = params_[index].tensor.grad();
  if (grad.defined()) {
    checkLayout(grad, params_[index]);
    if (defined && used_.has_value()) {
      used_->mark(index); // also inside no_sync(): the reduction after it covers it
    }
  }
  if (pass_.reducing() && marks_.cutOff(params_[index].tensor)) {
    return;
  }
  if (pass_.reducing()) {
    failure_.raise(group_.jobRank()); // a second loss after a pass that failed: its buckets cannot be finished
  }
  if (marks_.reducesTwice(params_[index].tensor)) {
    raiseReducedTwice(params_[index].name);
  }
  if (weights_.has_value() && !marks_.reduces() && !marks_.isLocal()) {
    weights_->endEntered();
  }
  if (defined && weights_.has_value() && !pass_.reducing() && !marks_.inPass()) {
    weights_->added(index);
  }
  if (beginsPass(index)) {
    beginPassWith(
        marks_.pending() ? std::vector<size_t>{} : marks_.takeNoted(/*armed=*/true)); // enter() has taken its own
  } else if (!pass_.reducing()) {
    const GradientCall call = callOf(index);
    const bool stays = pass_.phase() == BackwardPass::Phase::Idle && !call.in_another && !marks_.isLocal();
    if (defined && stays && marks_.endedNested()) {
      raiseAroundNested(params_[index].name);
    }
    if (defined && marks_.isLocal() && !state_.now().has_local) {
      state_.change([](SharedValues& values) { values.has_local = true; });
    }
    marks_.note(index, call);
    if (call.may_begin) {
      queueUnmarked();
    } else if (weights_.has_value() && weights_->entered()) {
      weights_->begin(/*reduces=*/false);
    } else if (weights_.has_value() && !marks_.beganHere() && !marks_.isLocal()) {
      weights_->stray(index);
    }
  }
  if (defined && weights_.has_value() && (pass_.reducing() || marks_.inPass())) {
    weights_->came(index);
  }
  if (pass_.counting()) {
    pass_.count(index);
    order_.came(index);
    return; // delayAllReduce() goes on
  }
  completeGradient(index);
}

GradientCall Reducer::callOf(size_t index) const {
  const bool armed = !buckets_.all().empty() && pass_.phase() == BackwardPass::Phase::Armed;
  return marks_.callOf(params_[index].tensor, armed);
}

bool Reducer::beginsPass(size_t index) const {
  if (buckets_.all().empty()) {
    return false;
  }
  if (marks_.pending()) {
    return true;
  }
  // A mark may still come, of this forward pass, of an earlier one, of one in no_sync(), or of another wrapper's: it says whether the pass
  // reduces, whose it is, and its weight.
  const auto awaits_mark = [&] { return armed_by_mark_ || marks_.isContested(params_[index].tensor); };
  return callOf(index).may_begin && (marks_.expectsAnyGraph() || !awaits_mark());
}

void Reducer::queueUnmarked() {
  const int call = marks_.call();
  const bool outermost = call == torch::autograd::get_current_graph_task_id();
  if (outermost && std::exchange(queued_unmarked_, call) != call) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this()] { self->beginUnmarked(); });
    queueFinish(); // now, so that it ends among the others of the call
  }
}

// The call is over, and went through no marked graph. If it was nested, the one around it still may.
void Reducer::beginUnmarked() {
  raising([&] {
    const Turn turn(*this);
    if (pass_.phase() != BackwardPass::Phase::Armed || marks_.inPass() || marks_.endedWithin()) {
      return;
    }
    const std::vector<size_t> before = marks_.takeNoted();
    if (std::none_of(before.begin(), before.end(), [this](size_t param) {
          return marks_.mayBeginUnmarked(params_[param].tensor);
        })) {
      return;
    }
    orFail("gradients of a backward pass beside forward's outputs were being reduced", [&] { beginPassWith(before); });
  });
}

void Reducer::completeGradient(size_t index) {
  if (!pass_.completes(index)) {
    return;
  }
  if (agreement_ == nullptr && (!used_.has_value() || used_->kept())) {
    pipeline_->finishEnded([this](size_t param) { return isUsed(param); });
  }
  // Weights come at another moment on each rank. So buckets wait for the end of the pass if another reducer, or the module, may launch something
  // meanwhile that has to come in the same order on all ranks.
  if (weights_.has_value() && weights_->ended() && !use_.isShared() && !options_.has_sync_batch_norm) {
    (void)packWeighed();
  }
  markReady(index);
  if (!state_.now().ordered) {
    order_.came(index);
  }
  launchFull();
  if (allCame()) {
    show();
    if (!marks_.reduces()) { // else enter() has
      queueFinish();
    }
  }
}

// All gradients of the pass.
bool Reducer::allCame() const {
  return pipeline_->allLaunched() || pipeline_->allAhead() || (lost_ != nullptr && pass_.missing().empty());
}

// `ends`: looked at with weights only.
void Reducer::beginPass(PassWeights::Ends ends) {
  marks_.begin();
  ++stats_.passes;
  for (const size_t nbytes : buckets_.gradientNbytes()) {
    stats_.gradient_nbytes += static_cast<int64_t>(nbytes);
  }
  pass_.begin();
  if (weights_.has_value()) {
    weights_->begin(pass_.reducing());
  }
  show();
  if (!pass_.reducing()) {
    marks_.disarm();
    endDue();
    over_in_ = torch::autograd::get_current_graph_task_id();
    return;
  }
  becomeDue(/*marked=*/false);
  if (weights_.has_value()) {
    weights_->setEnds(ends);
  }
  if (used_.has_value()) {
    used_->forgetGone(params_, weights_);
  }
  if (agreement_ != nullptr) {
    beginStep();
  }
  launchFirst();
  if (join_work_ != nullptr) { // join(): it has summed how many ranks have data
    const auto future = std::exchange(join_work_, nullptr)->getFuture();
    static_cast<void>(awaitCompletion(*future, Deadline::never())); // the operation has a timeout of its own
    future->waitAndThrow();
    pipeline_->begin(future->value().toTensorVector().at(0).item<int>());
  }
  if (pass_.counting()) {
    return;
  }
  for (const size_t unreachable : pass_.unreachable()) {
    // A static graph's first pass, if it is in no_sync(), does not see what was frozen before it.
    if (trained()[unreachable]) {
      markReady(unreachable);
    }
  }
}

// When the pass begins: a bucket that is packed again changes its exponent before it is reduced again.
void Reducer::shareState() {
  parts_ = state_.now().parts();
  // The number: of two wrappers of like modules, one's buckets are not the other's.
  uint32_t checksum = CallTag::of(std::to_string(options_.wrapper_number));
  for (const uint32_t part : parts_) {
    checksum = CallTag::of(std::to_string(part), checksum);
  }
  pipeline_->shareState(checksum);
}

void Reducer::delayAllReduce() {
  raising([&] {
    const Turn turn(*this);
    if (pass_.counting()) {
      endCounting();
    }
  });
  if (torch::autograd::get_current_graph_task_id() == -1) {
    (void)finish(/*residuals_elsewhere=*/false);
  } else {
    queueFinish();
  }
}

void Reducer::endCounting() {
  pass_.endCounting();
  if (!pass_.reducing()) {
    return; // accumulating, or inside no_sync()
  }
  orFail("the first gradients of a static graph were being reduced", [&] {
    for (const Bucket& bucket : buckets_.all()) {
      for (const Slot& slot : bucket.slots()) {
        markReady(slot.index);
      }
    }
    launchFull();
  });
}

void Reducer::markReady(size_t index) {
  if (!pass_.markReady(index)) {
    raiseSecondGradient(params_[index].name, pass_.hasStaticGraph());
  }
  pack(index);
}

void Reducer::pack(size_t index) {
  const bool unused = used_.has_value() && used_->mayBeUnused(index);
  if (weights_.has_value() && weights_->awaited()) {
    pipeline_->packAhead(index, unused, weights_->counts());
  } else {
    pipeline_->pack(index, unused);
  }
}

// The weights have come, or are waited for now. False if no rank has any: then nothing was packed in this pass.
bool Reducer::packWeighed() {
  const std::optional<double> ratio = weights_->await(group_.job());
  if (!ratio.has_value()) {
    return false;
  }
  pipeline_->setRatio(*ratio);
  return true;
}

// No rank has packed anything, so all of them go on as if the pass had not been.
void Reducer::giveUpWeightless() {
  state_.giveUp();
  state_.change([](SharedValues& values) {
    values.accumulated = 0;
    values.has_local = false;
    ++values.passes;
  });
  const bool left_stray = weights_->leavesStray();
  weights_->commit(members_); // a sampler has dealt a batch for it
  if (used_.has_value()) {
    used_->clear();
  }
  recorder_.drop();
  over_in_ = torch::autograd::get_current_graph_task_id();
  marks_.end();
  armed_in_.forget();
  resetStep();
  stats_.steps += options_.may_be_weightless || agreement_ != nullptr ? 1 : 0; // an agreement has counted it
  show();
  const char* const about_stray = left_stray
      ? ". A gradient of a backward pass within forward() has no weight, and it stays in .grad: with weight=\"samples\", backward() comes after "
        "forward()"
      : "";
  TORCH_CHECK_VALUE(
      (options_.may_be_weightless || ever_changed_) && !left_stray, // those who are gone may have had all samples
      "no rank has any samples in this step: model.samples is 0, or the batches are empty, on all of them. No gradient was averaged; the "
      "wrapper can go on with the next step",
      about_stray);
}

void Reducer::launchFull() {
  if (lost_ != nullptr) {
    return; // the other ranks would take what follows for what has failed
  }
  try {
    if (pipeline_->launchFull() && used_.has_value()) {
      used_->launch(group_);
    }
  } catch (const std::exception& error) {
    lose(error);
  }
}

// Reducers that end in one call do so in the order in which they were made, which ranks share. If each ended by its last gradient, and these
// came in another order on another rank, two that exchange something at their end would wait for each other: with a StepAgreement, with
// weights, and if an fp16 bucket is reduced twice.
void Reducer::queueFinish() {
  // Callbacks run when the whole graph has. Queued from within a callback, so that it comes after those that were
  // queued before, which may still produce gradients.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([self = shared_from_this(), &engine] {
    std::erase_if(endings, [&self](const Ending& each) {
      const auto reducer = each.reducer.lock();
      return reducer == nullptr || reducer == self;
    });
    endings.push_back({torch::autograd::get_current_graph_task_id(), self});
    engine.queue_callback([self] { finishCall(); });
  });
}

// All that end with the present call.
void Reducer::finishCall() {
  const int call = torch::autograd::get_current_graph_task_id();
  std::vector<std::shared_ptr<Reducer>> reducers;
  std::erase_if(endings, [&](const Ending& each) {
    if (auto reducer = each.call == call ? each.reducer.lock() : nullptr) {
      reducers.push_back(std::move(reducer));
    }
    return each.call == call;
  });
  finishAll(std::move(reducers), call);
}

// `call`: autograd's number. Once one has failed, those behind it are cut off.
void Reducer::finishAll(std::vector<std::shared_ptr<Reducer>> reducers, int call) {
  if (reducers.empty()) {
    return;
  }
  std::sort(reducers.begin(), reducers.end(), [](const auto& one, const auto& other) {
    return one->number_ < other->number_;
  });
  const bool nested = torch::autograd::get_current_node() != nullptr; // which has made the call
  std::vector<Ended> all = call == BackwardCall::kNone ? std::vector<Ended>{} : endedBeside(call, nested);
  const bool beside = nested || reducers.size() + all.size() > 1; // those to come, or before
  const bool residuals_elsewhere = beside && keepers().use_count() > 1;
  std::exception_ptr first;
  for (auto each = reducers.begin(); each != reducers.end(); ++each) {
    try {
      if (const std::optional<bool> finite = (*each)->finish(residuals_elsewhere)) {
        all.push_back({call, nested, caller(), *each, *finite});
      }
    } catch (const std::exception& error) {
      first = first == nullptr ? std::current_exception() : first;
      if ((*each)->mutex_.reducing()) {
        const std::string what = "failed in the backward pass of another wrapper: " + firstLine(error);
        std::for_each(each + 1, reducers.end(), [&what](const auto& behind) {
          if (behind->mutex_.reducing()) {
            behind->cut(what)();
          }
        });
        break; // else the reducer goes on, as after a step without samples
      }
    }
  }
  if (std::any_of(all.begin(), all.end(), [](const Ended& each) { return !each.finite; })) {
    for (Ended& each : all) {
      const auto reducer = std::exchange(each.finite, false) ? each.reducer.lock() : nullptr;
      if (reducer != nullptr) {
        reducer->forgetResiduals();
      }
    }
  }
  if (call != BackwardCall::kNone) {
    keepEnded(all);
  }
  if (first != nullptr) {
    std::rethrow_exception(first);
  }
}

// Another reducer of the same call has averages that are not finite, and the program drops the steps of both, as one GradScaler does.
void Reducer::forgetResiduals() {
  const Turn turn(*this);
  if (options_.drops_nonfinite_steps && buckets_.forgetResiduals()) {
    ++stats_.forgotten_residuals;
  }
}

std::optional<bool> Reducer::finish(bool residuals_elsewhere) {
  return raising([&]() -> std::optional<bool> {
    const Turn turn(*this);
    const bool outermost = torch::autograd::get_current_node() == nullptr;
    if (!pass_.reducing()) { // it only accumulates, or is of a static graph whose first pass was local
      orFail("what a buffer hook has begun was awaited", [this] { awaitFutures(); });
      if (outermost && !marks_.endedWithin()) { // else the next forward pass says what was left
        endRepeated();
      }
      return std::nullopt;
    }
    if (!allCame()) {
      checkNested();
      if (outermost) {
        endRepeated();
      }
      return std::nullopt; // the call around this one may go on
    }
    return endStep(residuals_elsewhere);
  });
}

// A gradient that came first, in the call around this one, has gone to .grad, and no other one completes the parameter.
void Reducer::checkNested() {
  for (const size_t index : pass_.missing()) {
    if (marks_.notedAround(index)) {
      orFail("a nested backward call ended", [&] { raiseAroundNested(params_[index].name); });
    }
  }
}

// Whether the averages are finite; nothing if no rank has any weight, so that there are none. `residuals_elsewhere`: it is looked at
// also if none is kept here.
std::optional<bool> Reducer::endStep(bool residuals_elsewhere) {
  recorder_.backwardEnded();
  const bool any = agreement_ != nullptr ? agree() : !pipeline_->allAhead() || launchWeighed();
  if (!any) {
    giveUpWeightless();
    return std::nullopt;
  }
  agreement_ != nullptr ? writeAverages() : finishBuckets();
  if (residuals_elsewhere && options_.drops_nonfinite_steps) {
    pipeline_->lookAtAll();
  }
  recorder_.end();
  ++stats_.steps;
  const bool reordered = state_.next().agreed && !state_.now().agreed; // else rebuildBuckets() does it
  const bool finite = commit();
  if (reordered) {
    order_.clear();
    cutBuckets();
  }
  return finite;
}

// All gradients have come, and none is packed. False if no rank has any weight.
bool Reducer::launchWeighed() {
  return orFail("the weights of ranks were awaited", [&] {
    const bool any = packWeighed();
    if (any) {
      launchFull();
    }
    return any;
  });
}

void Reducer::passWithoutBatch(const std::vector<std::pair<std::shared_ptr<Reducer>, bool>>& passes) {
  std::vector<std::shared_ptr<Reducer>> begun;
  try {
    for (const auto& [reducer, reduces] : passes) {
      if (reducer->beginWithoutBatch(reduces, /*alone=*/passes.size() == 1)) {
        begun.push_back(reducer);
      }
    }
  } catch (const std::exception& error) {
    for (const std::shared_ptr<Reducer>& each : begun) {
      each->cut("failed in no_batch(): " + firstLine(error))();
    }
    throw;
  }
  finishAll(std::move(begun), BackwardCall::kNone);
}

// False if it only accumulates.
bool Reducer::beginWithoutBatch(bool reduces, bool alone) {
  return raising([&] {
    const Turn turn(*this);
    throwIfUnfinished();
    followTrained();
    resetStep();
    if (buckets_.all().empty()) {
      return false; // nor is a pass of the others counted
    }
    weights().enterWithoutBatch();
    if (!reduces) {
      weights_->begin(/*reduces=*/false);
      return false;
    }
    recorder_.begin(buckets_.all().size());
    asked_in_ = BackwardCall::kNone;
    return orFail("a rank without a batch took part in a reduction", [&] {
      beginPass(alone ? PassWeights::Ends::InTurn : PassWeights::Ends::WithoutBatch);
      if (!pass_.reducing()) {
        return false;
      }
      for (const size_t index : pass_.missing()) {
        markReady(index);
      }
      return true;
    });
  });
}

void Reducer::finishBuckets() {
  const at::NoGradGuard no_grad;
  orFail(
      [&] { return pipeline_->awaited(); },
      [&] {
        pipeline_->finishAll([this](size_t param) { return isUsed(param); });
        if (used_.has_value()) {
          used_->await(); // every rank takes part, also if all parameters were used here
        }
        awaitFutures();
      });
}

void Reducer::awaitFutures() {
  for (const auto& future : std::exchange(post_backward_, {})) {
    static_cast<void>(awaitCompletion(*future, Deadline::never()));
    future->waitAndThrow();
  }
}

// Whether rank 0's order is to be agreed on. With unused parameters it may be another one in every pass.
bool Reducer::ordersBuckets() const {
  return !state_.now().agreed && (!options_.find_unused_parameters || pass_.hasStaticGraph());
}

bool Reducer::isUsed(size_t index) {
  return !used_.has_value() || used_->anywhere(index);
}

// A step is over, and what it leaves becomes what the next one reads: scales, order, counts, weights. Averages and residuals are there already,
// bucket by bucket; with an agreement since writeAverages(), just before. After this an average of another wrapper that is not finite may void the
// residuals: see forgetResiduals(). A step without any weight ends in giveUpWeightless() instead. Returns whether averages are finite.
bool Reducer::commit() {
  if (weights_.has_value()) {
    stats_.exposed_ns += weights_->takeWaitedNs();
    weights_->commit(members_);
  }
  if (used_.has_value()) {
    if (pass_.hasStaticGraph()) {
      state_.next().knows_used = true;
    } else {
      used_->clear();
    }
  }
  const bool finite = pipeline_->averagesAreFinite();
  // A step that a program will drop, as GradScaler does: what its encoding lost is of the same size as its gradients, which do not
  // count. The residuals from before it are overwritten; with an agreement the other buffer has them, and they go as well.
  if (!finite && buckets_.forgetResiduals()) {
    ++stats_.forgotten_residuals;
  }
  over_in_ = torch::autograd::get_current_graph_task_id();
  buckets_.commit(state_.next().exponents);
  state_.next().ordered = true;
  state_.commit();
  marks_.end();
  armed_in_.forget();
  resetStep();
  show();
  return finite;
}

void Reducer::shadowBackward(bool divide_by_initial_world_size) {
  raising([&] {
    const Turn turn(*this);
    throwIfUnfinished();
    followTrained();
    resetStep();
    recorder_.drop();
    const bool accumulates = options_.accumulate > 1 && state_.now().has_local;
    pass_.beginShadow();
    show();
    if (pass_.reducing()) {
      reduceShadow(/*rest=*/accumulates && divide_by_initial_world_size);
      for (size_t index = 0; accumulates && index < params_.size(); ++index) {
        if (trained()[index]) { // else it would enter the next reduction
          params_[index].tensor.mutable_grad().reset();
        }
      }
    }
  });
}

void Reducer::reduceShadow(bool rest) {
  orFail("a rank without data took part in a reduction", [&] {
    shareState();
    if (rest) {
      if (used_.has_value()) {
        used_->forgetGone(params_, weights_);
      }
      for (const size_t index : pass_.missing()) {
        markReady(index);
      }
    } else {
      pipeline_->beginShadow(group_.size());
      if (used_.has_value()) {
        used_->clear();
      }
    }
    launchFull();
  });
  finishBuckets();
  (void)commit();
}

// Ends what the caller does: it holds nothing of the pass over this call, and only throws on.
void Reducer::fail(const std::string& doing, const std::exception& error) {
  if (!failure_.record(doing, error)) {
    return;
  }
  // The others would wait until the deadline for what this rank never begins: its next bucket, a collective of its hook, or those of another
  // reducer, which ends first or comes later. Nothing happens if the failure is that of the group, which knows it.
  const std::string what = "failed in backward, while " + doing + ": " + firstLine(error);
  // torch makes a RuntimeError of one that leaves a callback, as a hook has them; its text stays.
  const bool mismatch = standsFor(error, ErrorCode::CollectiveMismatch) ||
      (hook_.run != nullptr &&
       std::string_view(error.what()).find("[code=COLLECTIVE_MISMATCH") != std::string_view::npos);
  const bool all_know = mismatch || standsFor(error, ErrorCode::Timeout);
  std::vector<std::function<void()>> cuts;
  std::vector<std::shared_ptr<Reducer>> failed = besides();
  failed.push_back(shared_from_this());
  for (const std::shared_ptr<Reducer>& each : failed) {
    if (each->agreement_ == nullptr || !all_know) {
      cuts.push_back(each->cut(what)); // of the group of now: others may come to have the turn
    }
  }
  if (mismatch) { // so all ranks are there, and have published their sets
    if (const auto why = difference()) {
      addNote(error, *why);
    }
  }
  std::for_each(cuts.begin(), cuts.end(), [](const auto& each) { each(); });
}

std::function<void()> Reducer::cut(const std::string& what) const {
  if (agreement_ != nullptr) {
    return [self = shared_from_this()] { self->abandonMembers(); };
  }
  const bool has_hook = hook_.run != nullptr;
  return [group = group_, what, has_hook, hooks = has_hook ? hook_.group : nullptr] {
    group.abort(what, /*others=*/has_hook);
    if (hooks != nullptr && hooks != group.get()) {
      ReducerGroup::abort(*hooks, group.paramDevice(), what, /*others=*/true);
    }
  };
}

// Reads the store without the turn, for kReportsTimeout at most. Meanwhile the pass changes nothing: a gradient, a forward pass or another
// caller that gets the turn finds the failure and throws. Only calls that end a failure may change the reducer, such as _reset_state(). So
// all that is read here is copied before, and a failure that is over is not explained.
std::optional<std::string> Reducer::difference() {
  const int64_t failure = failures_++;
  const auto why = [this, failure] {
    const StateReports reports = reports_;
    const SharedValues::Parts parts = parts_;
    const std::vector<bool> trained_now = trained();
    const int world_size = group_.size();
    const PassLock::Interval others(mutex_);
    auto known = reports.trainedDifference(trained_now, params_, world_size);
    known = known ? known : reports.partsDifference(parts, failure, world_size, kReportsTimeout);
    if (!known && use_.isShared()) {
      known = kSharedGroup;
    }
    if (weights_.has_value() && (!known || known == kSharedGroup)) {
      known = (known ? *known + ". " : "") + kWithoutBatch;
    }
    return known;
  }();
  if (why.has_value() && failure_.any() && failures_ == failure + 1) {
    failure_.explain(*why);
  }
  return why;
}

std::optional<std::string> Reducer::explainForward(const std::string& error) {
  return raising([&]() -> std::optional<std::string> {
    const Turn turn(*this);
    if (!failure_.record("buffers were being copied from rank 0", std::runtime_error(error))) {
      return std::nullopt;
    }
    parts_ = state_.now().parts();
    return difference();
  });
}

void Reducer::throwIfUnfinished() const {
  failure_.raise(group_.jobRank());
  if (!pass_.reducing()) {
    return;
  }
  if (agreement_ != nullptr) {
    abandonMembers();
  }
  const std::vector<size_t> missing = pass_.missing();
  if (missing.empty()) {
    raiseCutOff(group_.jobRank());
  }
  raiseMissing(group_.jobRank(), namesOf(params_, missing));
}

} // namespace pycomm
