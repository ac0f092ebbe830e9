#include "c10d/work.h"
#include "c10d/interruptible.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "base/fault_point.h"
#include "base/wait_clock.h"
#include "base/wait_point.h"
#include "c10d/named_future.h"
#include "c10d/python_errors.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

bool isMessage(c10d::OpType type) {
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
}

c10::TypePtr futureType(bool lists) {
  const c10::TypePtr tensors = c10::ListType::create(c10::TensorType::get());
  return lists ? c10::ListType::create(tensors) : tensors;
}

#ifdef PYCOMM_FAULT_POINTS
/// A use after free, committed if a test arms the point. Only tools/seam.py compiles this file with fault points: it
/// commits the defect to prove that its sanitizers and tests report one.
C10_NOINLINE void useAfterFreeIfArmed() {
  if (PYCOMM_FAULT("work.use_after_free").flip) {
    auto record = std::make_unique<ErrorRecord>();
    volatile int64_t* const freed = &record->elapsed_ms;
    record.reset();
    static_cast<void>(*freed);
  }
}
#else
void useAfterFreeIfArmed() {}
#endif

} // namespace

struct PycommWork::State {
  Content content;
  c10::intrusive_ptr<WorkOwner> owner;
  uint64_t place = 0; ///< among all Works of the strand that issued this one, and of the group; 0: a user's thread did
  std::function<void()> profiling_end;
  std::optional<ErrorRecord>
      copy_error; ///< of the copies to the device; written under `finishing` and read when `finished`, as is the next
  bool copied_in_vain = false; ///< the operation failed when parts of its output were on their way to the device
  /// Held by the first thread that needs the result, while it runs unpack and profiling_end. No LeafMutex, as those may be Python code: the
  /// others wait for it without the interpreter's lock.
  std::mutex finishing;
  std::atomic<bool> finished{false}; ///< that has been done; written under `finishing`
  LeafMutex mutex; ///< guards future and waited
  bool waited = false; ///< wait() has returned or raised
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::atomic<bool> completing{false}; ///< a thread has begun to complete it
  std::shared_ptr<State> kept_for_good; ///< itself: nobody can say any more when the operations have ended

  ~State() {
    if (future) {
      keepIfBroken(*future);
    }
  }

  Group& group() const noexcept {
    return *owner->group;
  }

  /// With `mutex`.
  void noteWaited() {
    waited = true;
    if (const auto name = future ? FutureName::of(*future) : nullptr) {
      name->noteWaited();
    }
  }

  /// NCCL's results are behind events: the host need not wait for the operations, unless they may never be launched.
  bool onlyOrders() const {
    return content.nccl != nullptr && !content.nccl->abandoned() && !group().isEnding();
  }

  /// The type of the future, with its name. If it only orders streams it has none: callbacks run where they are added, in the program's
  /// order.
  c10::TypePtr nameFuture(c10d::OpType type, bool only_orders) const {
    c10::TypePtr value = futureType(!content.output_lists.empty());
    if (only_orders) {
      return value;
    }
    const Operation* const first = content.operations.empty() ? nullptr : content.operations.front().get();
    const bool message = first == nullptr || first->request().descriptor.kind == Collective::Send;
    const auto kind = static_cast<uint8_t>(first == nullptr ? Collective::Send : first->request().descriptor.kind);
    const uint32_t hash = group().identity().hash;
    const OperationId id = message ? OperationId() : first->request().id;
    const WorkName named = message
        ? nameOfMessage(*owner->role, kind)
        : nameOfWork(*owner->role, hash, id, place != 0 ? place : id.id, static_cast<int>(type), kind);
    return std::make_shared<FutureName>(
        std::move(value), named.name, named.origin, IssueContext::currentTraits(), &group().engine(), named.ambiguous);
  }

  bool copies() const {
    return content.unpack || !content.parts.empty();
  }

  bool done() const {
    for (const auto& operation : content.operations) {
      if (!operation->done()) {
        return false;
      }
    }
    return true;
  }

  bool failed() const {
    const auto& operations = content.operations;
    return copyError() ||
        std::any_of(operations.begin(), operations.end(), [](const auto& each) { return each->error().has_value(); });
  }

  /// May read the store, so without the interpreter's lock.
  std::optional<ErrorRecord> error() const {
    for (const auto& operation : content.operations) {
      if (auto record = operation->error()) {
        if (content.call_sites != nullptr) {
          content.call_sites->explain(*record);
        }
        return record;
      }
    }
    return copyError();
  }

  /// A thread of the pool may be about to write it.
  std::optional<ErrorRecord> copyError() const {
    return finished.load(std::memory_order_acquire) ? copy_error : std::nullopt;
  }

  /// Call when done(). It copies, and a copy may be Python code. Not std::call_once: its first call wakes waiters by a system call, whether
  /// there are any or not.
  /// `refused`: why the outputs must not be copied any more.
  void finish(const std::optional<ErrorRecord>& refused = std::nullopt) {
    const WithoutGil no_gil;
    if (!finished.load(std::memory_order_acquire)) {
      beforeWait(); // another thread may be at it
    }
    const std::lock_guard<std::mutex> lock(finishing);
    finishLocked(refused);
  }

  /// As finish(), but waits for no other thread: false if one is at it.
  [[nodiscard]] bool tryToFinish() {
    if (finished.load(std::memory_order_acquire)) {
      return true;
    }
    const WithoutGil no_gil;
    const std::unique_lock<std::mutex> lock(finishing, std::try_to_lock);
    if (!lock) {
      return false;
    }
    finishLocked();
    return true;
  }

  void finishLocked(const std::optional<ErrorRecord>& refused = std::nullopt) {
    if (finished) {
      return;
    }
    useAfterFreeIfArmed();
    copy_error = refused;
    if (content.cuda != nullptr && (refused || error())) {
      copied_in_vain = content.cuda->stop();
    } else if (content.cuda != nullptr) {
      copyToDevice();
      if (content.cuda->codec() != Codec::None) {
        countOverflows(*content.operations.front(), content.cuda->codec(), content.cuda->overflows());
      }
    } else if (content.unpack && !refused && !error()) {
      content.unpack();
    }
    if (!content.parts.empty()) {
      finishParts();
    }
    if (profiling_end) {
      profiling_end();
    }
    finished.store(true, std::memory_order_release);
  }

  /// After the error of one the program may use the memory of all, so none is written any more.
  void finishParts() {
    const auto failure = error();
    for (const auto& part : content.parts) {
      part->state_->finish(failure);
      copy_error = copy_error ? copy_error : part->copyError();
      copied_in_vain = copied_in_vain || (failure && part->content().cuda != nullptr);
    }
  }

  /// What follows the copies to the device runs on their stream, so that nobody waits.
  void copyToDevice() {
    try {
      const c10::StreamGuard on_side_stream(content.cuda->device().in());
      content.cuda->toDevice();
      if (content.unpack) {
        content.unpack();
      }
    } catch (const std::exception&) {
      copy_error = recordInAnyCase(group().identity(), [&] { return errorOf(caughtOnDevice(), group().identity()); });
    }
  }

  /// Futures take note of the streams that are current when they are completed.
  void complete(c10::ivalue::Future& completed) const {
    if (const auto record = error()) {
      completed.setError(toException(*record));
    } else {
      const c10::MultiStreamGuard on_side_streams(sideStreams());
      completed.markCompleted(value());
    }
  }

  /// One a device.
  std::vector<c10::Stream> sideStreams() const {
    std::vector<c10::Stream> streams;
    for (const auto& each : content.order_after) {
      const c10::Stream stream = each->stream();
      if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
        streams.push_back(stream);
      }
    }
    return streams;
  }

  c10::IValue value() const {
    return content.output_lists.empty() ? c10::IValue(content.outputs) : c10::IValue(content.output_lists);
  }
};

PycommWork::PycommWork(
    c10::intrusive_ptr<WorkOwner> owner,
    int rank,
    c10d::OpType type,
    const char* profiling_title,
    Content content)
    : Work(rank, type, profiling_title, content.inputs), state_(std::make_shared<State>()) {
  state_->content = std::move(content);
  state_->owner = std::move(owner);
  if (const std::shared_ptr<IssueContext>& issuer = IssueContext::current(); issuer != nullptr && !isMessage(type)) {
    const uint32_t index = issuer->takeIndex(IssueContext::Counted::Works, state_->group().identity().hash);
    state_->place = mix64(issuer->name().anywhere + index);
  }
  state_->profiling_end = std::move(recordFunctionEndCallback_);
}

PycommWork::Content& PycommWork::starting() noexcept {
  return state_->content;
}

void PycommWork::started() {
  if (state_->profiling_end || state_->content.cuda != nullptr) {
    // The event ends with the operation, and the way back to the device begins, also when nobody waits for it.
    inPoolWhenAllEnd(state_, [](State& state) { state.finish(); });
  }
}

void PycommWork::cancel() {
  state_->content.unpack = nullptr;
  if (state_->profiling_end) {
    std::exchange(state_->profiling_end, nullptr)();
  }
}

void PycommWork::handOver() const {
  for (const auto& operation : state_->content.operations) {
    if (!operation->done()) {
      static_cast<void>(state_->group().wait(*operation, Deadline::after(0)));
    }
  }
}

PycommWork::~PycommWork() {
  const Content& content = state_->content;
  if (content.cuda != nullptr || content.nccl != nullptr) {
    const CudaOrder& order = content.cuda != nullptr ? static_cast<const CudaOrder&>(*content.cuda) : *content.nccl;
    try {
      // Nobody else knows of these: wait() has ordered the stream that called it, and they are of the stream that issued.
      order.keepFor(content.keep_alive);
      if (!state_->waited) {
        order.keepFor(content.inputs);
        order.keepFor(content.outputs);
        for (const auto& list : content.output_lists) {
          order.keepFor(list);
        }
      }
    } catch (const std::exception&) { // torch's: the device is broken, and nothing on it reads them
    }
  }
  const bool copies = !content.operations.empty() && state_->copies() &&
      !state_->finished.load(std::memory_order_acquire) &&
      state_->group().engine().belongsToThisProcess(); // a child of fork has none of the pool's threads
  if (!state_->done() || copies) {
    // Tensors must outlive the operations, and must not be freed on the data loop: freeing one may take Python's lock.
    try {
      handOver();
      inPoolWhenAllEnd(state_, [](State& state) {
        if (state.copies()) {
          state.finish();
        }
      });
    } catch (...) { // no memory, or a child of fork: then they are never freed
      state_->kept_for_good = state_;
    }
  }
}

void PycommWork::inPoolWhenAllEnd(const std::shared_ptr<State>& state, void (*then)(State&)) {
  struct Countdown {
    Countdown(size_t count, CallbackPool::Task then) : left(count), task(std::move(then)) {}
    std::atomic<size_t> left;
    CallbackPool::Placed task;
  };
  CallbackPool& pool = state->group().engine().callbacks();
  const size_t count = state->content.operations.size();
  const auto countdown = std::make_shared<Countdown>(std::max<size_t>(count, 1), [state, then] { then(*state); });
  const auto one_less = [countdown, &pool] {
    if (countdown->left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      // The data loop keeps no reference to the state: the last one frees tensors and perhaps the group, which is no work for a data loop.
      // It runs here if the engine is being shut down.
      pool.submitOrRun(countdown->task);
    }
  };
  if (count == 0) {
    one_less();
  }
  for (const auto& operation : state->content.operations) {
    operation->onDone(one_less);
  }
}

bool PycommWork::hasEnded() const {
  return state_->done() && state_->tryToFinish();
}

bool PycommWork::ended() const {
  if (!state_->done()) {
    raising([&] { handOver(); }); // who polls may never wait
  }
  return hasEnded();
}

bool PycommWork::poll() {
  bool ended = true;
  for (const auto& operation : state_->content.operations) {
    ended = state_->group().poll(*operation) && ended;
  }
  if (ended) {
    finish();
  }
  return ended;
}

void PycommWork::finish() {
  state_->finish();
}

std::optional<ErrorRecord> PycommWork::copyError() const {
  return state_->copyError();
}

bool PycommWork::isSuccess() const {
  return ended() && !state_->failed();
}

std::exception_ptr PycommWork::exception() const {
  const auto record = [&] {
    const WithoutGil no_gil;
    return ended() ? state_->error() : std::nullopt;
  }();
  return record ? toException(*record) : nullptr;
}

std::vector<at::Tensor> PycommWork::result() {
  const auto& lists = state_->content.output_lists;
  TORCH_CHECK(
      lists.size() <= 1, "the result of this operation is a list of lists of tensors: use get_future() and value()");
  return lists.empty() ? state_->content.outputs : lists.front();
}

void PycommWork::synchronize() {
  wait(kNoTimeout);
}

void waitFor(Group& group, const Operation& operation, std::chrono::milliseconds timeout, Deadline deadline) {
  const auto ended = [&] {
    beforeWait();
    return raising(
        [&] { return group.wait(operation, Deadline::after(deadline.remainingMs(Interruptible::kEveryMs))); });
  };
  std::optional<WaitClock::Waiting> waiting;
  if (!operation.done()) {
    waiting.emplace();
  }
  while (!ended()) {
    if (deadline.expired()) {
      ErrorRecord record;
      record.code = ErrorCode::Timeout;
      record.op = operation.name();
      record.sequence = operation.identified() ? operation.request().id.sequence : -1;
      record.dtype = dtypeName(operation.request().descriptor.dtype);
      record.numel = operation.request().descriptor.numel;
      record.phase = ErrorPhase::Wait;
      record.elapsed_ms = timeout.count();
      record.summary = "wait() timed out after " + std::to_string(timeout.count()) +
          " ms: " + operation.label(group.identity().job) + " has not ended; it goes on.";
      record.hint = "wait again, with more time";
      throwToPython(errorOf(record, group.identity()));
    }
    checkSignals();
  }
}

bool PycommWork::wait(std::chrono::milliseconds timeout) {
  const WithoutGil no_gil;
  const Deadline deadline = timeout > kNoTimeout ? Deadline::after(timeout.count()) : Deadline::never();
  const bool only_orders = state_->onlyOrders();
  for (const auto& operation : state_->content.operations) {
    if (only_orders) {
      break;
    }
    waitFor(state_->group(), *operation, timeout, deadline);
  }
  if (!only_orders) {
    state_->finish();
  }
  const auto record = state_->error();
  if (!record) {
    for (const auto& each : state_->content.order_after) {
      raising([&] {
        try {
          each->orderCaller();
        } catch (const std::exception&) {
          throw Error(errorOf(caughtOnDevice(), state_->group().identity()));
        }
      });
    }
  } else if (state_->copied_in_vain) { // what now uses the tensors' memory for something else runs behind those
    for (const auto& each : state_->content.order_after) {
      try {
        each->orderCaller();
      } catch (const std::exception&) { // a broken device: nothing is on its way any more
      }
    }
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->noteWaited();
  }
  if (record) {
    throwToPython(*record);
  }
  return true;
}

void PycommWork::noteWaited() {
  const std::lock_guard lock(state_->mutex);
  state_->noteWaited();
}

void PycommWork::blockCurrentStream() {
  throwToPython(
      Error(
          ErrorCode::Unsupported,
          "block_current_stream() is refused: before the bytes have arrived there is no event that a stream could wait for.",
          "use wait()")
          .record());
}

void PycommWork::abort() {
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  reason.peer = state_->group().identity().jobRank();
  reason.summary = "Rank " + std::to_string(reason.peer) + " aborted an operation.";
  state_->group().abort(reason);
}

uint64_t PycommWork::getSequencenumber() const {
  const auto& operations = state_->content.operations;
  return operations.empty() || !operations.front()->identified() ? 0 : operations.front()->request().id.id;
}

int PycommWork::sourceRank() const {
  const auto& operations = state_->content.operations;
  if (operations.size() != 1 || !operations.front()->request().receives || !operations.front()->identified()) {
    throwToPython(
        Error(ErrorCode::InvalidArgument, "Only a receive that has its message has a source rank.", "wait() first")
            .record());
  }
  return operations.front()->request().descriptor.root;
}

const PycommWork::Content& PycommWork::content() const noexcept {
  return state_->content;
}

c10::intrusive_ptr<c10::ivalue::Future> PycommWork::getFuture() {
  const StayWithin stay;
  const bool only_orders = state_->onlyOrders();
  if (only_orders) {
    raising([&] { state_->content.nccl->requireLaunched(); });
  }
  std::unique_lock lock(state_->mutex);
  if (state_->future) {
    const c10::intrusive_ptr<c10::ivalue::Future> future = state_->future;
    const bool waited = state_->waited;
    lock.unlock();
    if (waited && !future->completed() && state_->group().engine().belongsToThisProcess()) {
      const WithoutGil no_gil;
      const NamedCallbacksInPool on_user_thread;
      completeFuture(*state_);
      beforeWait();
      future->wait(); // a thread of the pool may be at it
    }
    return future;
  }
  std::vector<c10::Device> devices;
  for (const c10::Stream& stream : state_->sideStreams()) {
    devices.push_back(stream.device());
  }
  state_->future =
      c10::make_intrusive<c10::ivalue::Future>(state_->nameFuture(retrieveOpType(), only_orders), std::move(devices));
  if (state_->waited || only_orders) {
    // With NCCL everything is behind events. And a caller that has waited may count on it: torch's reducer takes the value at once.
    state_->noteWaited();
    state_->completing = true; // a thread that finds the future from here on waits for this one
    const c10::intrusive_ptr<c10::ivalue::Future> future = state_->future;
    lock.unlock(); // an error takes the interpreter's lock, which a thread may have that waits for this one
    const WithoutGil no_gil;
    try {
      state_->complete(*future);
    } catch (...) { // no memory, or a broken device
      future->setErrorIfNeeded(std::current_exception());
    }
    return future;
  }
  const c10::intrusive_ptr<c10::ivalue::Future> future = state_->future;
  lock.unlock(); // this thread may complete it now
  if (!state_->group().engine().belongsToThisProcess()) { // a child of fork has none of the pool's threads
    completeInChild(*state_, *future);
    return future;
  }
  try {
    handOver();
    inPoolWhenAllEnd(state_, completeFuture);
  } catch (...) {
    future->setErrorIfNeeded(std::current_exception()); // others may have the future already
  }
  return future;
}

void PycommWork::completeInChild(State& state, c10::ivalue::Future& future) {
  try {
    for (const auto& operation : state.content.operations) {
      static_cast<void>(state.group().wait(*operation, Deadline::after(0)));
    }
    state.finish();
    state.complete(future);
  } catch (const Error& error) { // it is under way, in the parent
    future.setErrorIfNeeded(toException(error.record()));
  } catch (...) {
    future.setErrorIfNeeded(std::current_exception());
  }
}

void PycommWork::completeFuture(State& state) {
  if (state.completing.exchange(true)) {
    return;
  }
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(state.mutex);
    future = state.future;
  }
  try {
    const IssueScope scope(FutureName::of(*future)->unnamedCallbacks());
    state.finish();
    state.complete(*future);
  } catch (...) { // unpack failed, or there is no memory: the threads that wait must get the error
    future->setErrorIfNeeded(std::current_exception());
  }
}

} // namespace pycomm
