#include "device/nccl_comm.h"

#include <chrono>
#include <thread>
#include <utility>

#include "device/nccl_operation.h"

namespace pycomm::cuda {
namespace {

// A non-blocking communicator puts a group's kernels onto the stream from a thread of NCCL's own. That should take less than the
// shortest sleep does, so the first looks only offer the core to others. Making a communicator takes longer.
constexpr std::chrono::microseconds kAwakeFor{200};
constexpr std::chrono::microseconds kLookEvery{50};

/// The error that is being handled, of a call that `about` names.
ErrorRecord thrownIn(const ErrorRecord& about) noexcept {
  ErrorRecord record;
  record.code = ErrorCode::OutOfMemory;
  record.rank = about.rank;
  try {
    try {
      throw;
    } catch (const Error& error) {
      return error.record();
    } catch (const std::bad_alloc&) {
      ErrorRecord full = about;
      full.code = ErrorCode::OutOfMemory;
      full.summary = about.op + ": this rank had no memory left to start it.";
      full.hint = "see what takes the memory of this host";
      return full;
    } catch (const std::exception& error) {
      ErrorRecord full = about;
      full.code = ErrorCode::Internal;
      full.summary = about.op + " could not be started.";
      full.cause = error.what();
      full.hint = "report this as a bug";
      return full;
    }
  } catch (...) { // no memory for the words
  }
  return record;
}

} // namespace

NcclComm::NcclComm(NcclApi& api, DeviceRuntime& runtime, Config config)
    : api_(api),
      runtime_(runtime),
      config_(std::move(config)),
      rank_{api_, runtime_, config_.rank, config_.job_rank, config_.size, config_.group, config_.stream},
      collectives_(rank_) {}

std::unique_ptr<NcclComm> NcclComm::create(NcclApi& api, DeviceRuntime& runtime, Config config) {
  std::unique_ptr<NcclComm> comm(new NcclComm(api, runtime, std::move(config)));
  comm->connect();
  return comm;
}

void NcclComm::connect() {
  entry_ = runtime_.createEvent();
  exit_ = runtime_.createEvent();
  watched_ = runtime_.createStream();
  ErrorRecord making;
  making.rank = config_.job_rank;
  making.group = config_.group;
  making.phase = ErrorPhase::NcclInit;
  NcclUniqueId id;
  if (config_.rank == 0) {
    rank_.check(api_.uniqueId(&id), "ncclGetUniqueId", comm_);
  }
  id = config_.exchange(config_.rank == 0 ? &id : nullptr, config_.deadline);
  try {
    {
      const std::lock_guard<std::mutex> lock(api_mutex_);
      rank_.check(api_.init(&comm_, config_.size, id, config_.rank), "ncclCommInitRankConfig", comm_);
    }
    waitUntilReady(config_.deadline, making);
  } catch (const Error& error) {
    throw Error(fail(error.record()));
  }
}

NcclComm::~NcclComm() {
  bool idle = false;
  try {
    poll();
    const std::lock_guard<std::mutex> lock(state_->mutex);
    idle = state_->pending.empty() && !state_->failure;
  } catch (const std::exception&) { // no memory to find out
  }
  {
    const std::lock_guard<std::mutex> lock(api_mutex_);
    if (comm_ != nullptr) {
      // Only an idle communicator is destroyed in good order: with work under way ncclCommDestroy waits for other ranks.
      static_cast<void>(idle ? api_.destroy(comm_) : api_.abort(comm_));
    }
  }
  for (Event event : {entry_, exit_}) {
    if (event != nullptr) {
      runtime_.destroyEvent(event);
    }
  }
  if (watched_ != nullptr) {
    runtime_.destroyStream(watched_);
  }
}

void NcclComm::waitUntilReady(Deadline deadline, const ErrorRecord& about) {
  const TimePoint begin = Clock::now();
  for (;;) {
    if (const auto failure = config_.group_failure ? config_.group_failure() : std::nullopt) {
      throw Error(*failure);
    }
    {
      const std::lock_guard<std::mutex> lock(api_mutex_);
      throwIfFailed();
      NcclResult state = NcclResult::Success;
      rank_.check(api_.asyncError(comm_, &state), "ncclCommGetAsyncError", comm_);
      rank_.check(state, about.phase == ErrorPhase::NcclInit ? "making the communicator" : "the group's launch", comm_);
      if (state == NcclResult::Success) {
        return;
      }
    }
    if (deadline.expired()) {
      ErrorRecord record = about;
      record.code = ErrorCode::Timeout;
      record.elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
      record.summary = about.op.empty() ? "NCCL timed out while it connected the ranks."
                                        : about.op + " timed out before it started: NCCL still waits for other ranks.";
      record.hint = "see which rank is missing; NCCL_DEBUG=INFO shows what NCCL tries";
      throw Error(record);
    }
    if (Clock::now() - begin < kAwakeFor) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kLookEvery);
    }
  }
}

std::shared_ptr<NcclOperation> NcclComm::start(const std::vector<NcclCall>& calls, Stream caller, Deadline deadline) {
  for (const NcclCall& call : calls) {
    collectives_.validate(call);
  }
  throwIfFailed();
  if (runtime_.isCapturing(caller)) {
    throw Error(
        ErrorCode::Unsupported,
        std::string(calls.front().name) + " while a CUDA graph is captured is not supported.",
        "keep collectives of pycomm outside of torch.cuda.graph()");
  }
  const std::lock_guard<std::mutex> issue(issue_mutex_);
  auto operation = std::make_shared<NcclOperation>();
  operation->deadline = deadline;
  operation->issued_at = Clock::now();
  operation->about = rank_.about(calls.front());
  // Now: once the call is on the stream, its end must be noticed.
  auto notice = std::make_unique<Notice>(Notice{state_, operation, {operation}});
  try {
    runtime_.record(entry_, caller);
    runtime_.streamWait(config_.stream, entry_);
    collectives_.enqueue(
        calls, [&](const std::function<void(NcclHandle)>& body) { inGroup(body, deadline, operation->about); });
    notifyOfEnd(std::move(notice));
  } catch (...) {
    // Part of it may be on the stream, and other ranks wait for the rest.
    throw Error(fail(thrownIn(operation->about)));
  }
  return operation;
}

void NcclComm::inGroup(const std::function<void(NcclHandle)>& body, Deadline deadline, const ErrorRecord& about) {
  {
    // NCCL's groups are the calling thread's, but an abort in the middle would free what the calls use.
    const std::lock_guard<std::mutex> lock(api_mutex_);
    throwIfFailed();
    rank_.check(api_.groupStart(), "ncclGroupStart", comm_);
    try {
      body(comm_);
    } catch (...) {
      static_cast<void>(api_.groupEnd());
      throw;
    }
    rank_.check(api_.groupEnd(), "ncclGroupEnd", comm_);
  }
  // Only when NCCL has put its kernels onto the stream is what follows behind them.
  waitUntilReady(deadline, about);
}

void NcclComm::notifyOfEnd(std::unique_ptr<Notice> notice) {
  runtime_.record(exit_, config_.stream);
  runtime_.streamWait(watched_, exit_);
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->pending.splice(state_->pending.end(), notice->pending);
  }
  runtime_.whenReached(watched_, &onReached, notice.get());
  static_cast<void>(notice.release()); // onReached's now
}

// On CUDA's thread, which an exception would end together with the process. Only a record of a failure takes memory.
void NcclComm::onReached(void* context, const char* failure) {
  const std::unique_ptr<Notice> notice(static_cast<Notice*>(context));
  State& state = *notice->state;
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (failure != nullptr) {
    state.broken.emplace();
    state.broken->code = ErrorCode::SystemError;
    try {
      ErrorRecord record = notice->operation->about;
      record.code = ErrorCode::SystemError;
      record.summary = "CUDA: the device broke under " + record.op + ".";
      record.cause = failure;
      record.hint = "CUDA_LAUNCH_BLOCKING=1 shows which call broke the device; nvidia-smi shows whether it is there";
      state.broken = std::move(record);
    } catch (...) { // no memory for the words: the code is there
    }
    return;
  }
  notice->operation->done = true;
  while (!state.pending.empty() && state.pending.front()->done) {
    state.pending.pop_front();
  }
}

bool NcclComm::done(const NcclOperation& operation) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return operation.done;
}

void NcclComm::poll() {
  // First: whatever else here takes its time, a dead peer's kernels are ended.
  std::optional<ErrorRecord> cause = config_.group_failure ? config_.group_failure() : std::nullopt;
  if (!cause) {
    cause = findFailure();
  }
  if (cause) {
    abort(*cause);
  }
}

std::optional<ErrorRecord> NcclComm::findFailure() {
  try {
    NcclResult state = NcclResult::Success;
    const std::lock_guard<std::mutex> lock(api_mutex_);
    if (comm_ == nullptr) {
      return std::nullopt;
    }
    rank_.check(api_.asyncError(comm_, &state), "ncclCommGetAsyncError", comm_);
    rank_.check(state, "an operation under way", comm_);
  } catch (const Error& error) {
    ErrorRecord cause = error.record();
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->pending.empty() && cause.op.empty()) {
      const ErrorRecord& oldest = state_->pending.front()->about;
      cause.op = oldest.op;
      cause.sequence = oldest.sequence;
      cause.dtype = oldest.dtype;
      cause.numel = oldest.numel;
    }
    return cause;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->broken) {
    return state_->broken;
  }
  for (const auto& operation : state_->pending) {
    if (operation->deadline.expired()) {
      ErrorRecord cause = operation->about;
      cause.code = ErrorCode::Timeout;
      cause.phase = ErrorPhase::Transfer;
      cause.elapsed_ms =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - operation->issued_at).count();
      cause.summary = cause.op + " timed out on the device.";
      cause.hint = "see which rank did not call it, or is still busy with what comes before it";
      return cause;
    }
  }
  return std::nullopt;
}

void NcclComm::abort(const ErrorRecord& reason) noexcept {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->failure) {
      state_->failure.emplace().code = reason.code;
      try {
        state_->failure = reason;
      } catch (const std::exception&) { // no memory for the words
      }
    }
  }
  const std::lock_guard<std::mutex> lock(api_mutex_);
  if (comm_ != nullptr) {
    static_cast<void>(api_.abort(comm_)); // its kernels end, and with them what the stream holds
    comm_ = nullptr;
  }
}

ErrorRecord NcclComm::fail(const ErrorRecord& cause) {
  abort(cause);
  return failure().value();
}

bool NcclComm::hasFailed() const noexcept {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->failure.has_value();
}

std::optional<ErrorRecord> NcclComm::failure() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->failure;
}

void NcclComm::throwIfFailed() const {
  if (const auto record = failure()) {
    throw Error(*record);
  }
}

} // namespace pycomm::cuda
