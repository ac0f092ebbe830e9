#include "c10d/cuda_nccl.h"

#include <ATen/core/TensorBody.h>
#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <exception>
#include <map>
#include <utility>

#include "base/native_thread.h"
#include "base/wait_point.h"
#include "c10d/interruptible.h"
#include "c10d/nccl_calls.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

constexpr size_t kGpuIdNbytes = 256; // the text that names a rank's GPU
constexpr char kRefusal = '!';
constexpr std::chrono::milliseconds kLookEvery{1};
// NCCL's own deadline comes after the group's, whose error names the missing ranks.
constexpr int64_t kLaterMs = 5000;
constexpr int kDayMs = 24 * 3600 * 1000;

ErrorRecord interrupted(const Group& group) {
  ErrorRecord record;
  record.code = ErrorCode::Aborted;
  record.peer = group.identity().jobRank();
  record.summary =
      "Rank " + std::to_string(record.peer) + " was interrupted while it began a collective of CUDA tensors.";
  return record;
}

ErrorRecord closedInTheMiddle() {
  ErrorRecord reason;
  reason.code = ErrorCode::ShutDown;
  reason.summary = "The process group was closed while NCCL still waited for other ranks.";
  return reason;
}

/// A small collective of the group's own, on the CPU. Within an Interruptible.
void runOnCpu(Group& group, Group::Call call, Deadline deadline) {
  call.schedule.dtype = DType::UInt8;
  call.deadline = deadline;
  call.waits = true;
  const auto operation = group.start(call);
  beforeWait();
  while (!group.wait(*operation, Deadline::after(Interruptible::kEveryMs))) {
    if (Interruptible::look() && !group.failure()) {
      group.abort(interrupted(group)); // which ends it: its memory is the caller's, who goes away
    }
  }
  if (const auto error = operation->error()) {
    throw Error(*error);
  }
}

/// Names this rank's GPU. Two ranks have the same name only if they share the GPU in a way that NCCL detects. If NCCL cannot be used:
/// kRefusal and the reason.
std::string gpuIdOf(const CudaDevice& device, const std::string& host, const std::vector<std::string>& library_paths) {
  try {
    const c10::DeviceGuard guard(device.device());
    const std::string uuid = device.runtime().deviceUuid(device.device().index());
    static_cast<void>(cuda::loadNccl(library_paths));
    return uuid + " " + host;
  } catch (const std::exception&) {
    return kRefusal + caughtOnDevice().summary;
  }
}

} // namespace

std::string NcclGroup::whyNot(
    Group& group,
    const CudaDevice& device,
    const std::vector<std::string>& library_paths,
    const std::string& host_id,
    Deadline deadline) {
  const auto size = static_cast<size_t>(group.identity().size);
  const int rank = group.identity().rank;
  const std::string host = host_id.empty() ? std::to_string(group.topology().hostOf(rank)) : "id " + host_id;
  std::string gpu_id = gpuIdOf(device, host, library_paths);
  gpu_id.resize(kGpuIdNbytes - 1);
  gpu_id.push_back('\0');
  std::vector<std::byte> gpu_ids(size * kGpuIdNbytes);
  Group::Call call;
  call.schedule.kind = Collective::AllGather;
  call.schedule.numel = static_cast<int64_t>(kGpuIdNbytes);
  call.input = {reinterpret_cast<const std::byte*>(gpu_id.data()), kGpuIdNbytes};
  call.output = {gpu_ids.data(), gpu_ids.size()};
  const Interruptible interruptible(&group);
  std::exception_ptr failure;
  try {
    runOnCpu(group, call, deadline);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  interruptible.rethrow(); // also if the operation was over before the abort
  if (failure) {
    std::rethrow_exception(failure);
  }
  std::map<std::string, size_t> owners;
  for (size_t peer = 0; peer < size; ++peer) {
    const std::string theirs(reinterpret_cast<const char*>(gpu_ids.data() + peer * kGpuIdNbytes));
    if (theirs.front() == kRefusal) {
      return group.identity().job.text(static_cast<int>(peer)) + " cannot use it: " + theirs.substr(1);
    }
    const auto [owner, first] = owners.emplace(theirs, peer);
    if (!first) {
      const JobRanks& job = group.identity().job;
      return "ranks " + std::to_string(job.of(static_cast<int>(owner->second))) + " and " +
          std::to_string(job.of(static_cast<int>(peer))) + " share a GPU";
    }
  }
  return "";
}

NcclGroup::NcclGroup(std::shared_ptr<Group> group, std::shared_ptr<CudaDevice> device, const std::atomic<bool>& stopped)
    : group_(std::move(group)), device_(std::move(device)), stopped_(stopped) {}

std::shared_ptr<NcclGroup> NcclGroup::create(
    std::shared_ptr<Group> group,
    std::shared_ptr<CudaDevice> device,
    const std::vector<std::string>& library_paths,
    Deadline deadline,
    const std::atomic<bool>& stopped) {
  std::shared_ptr<NcclGroup> made(new NcclGroup(std::move(group), std::move(device), stopped));
  cuda::NcclComm::Config config;
  config.rank = made->group_->identity().rank;
  config.job_rank = made->group_->identity().jobRank();
  config.size = made->group_->identity().size;
  config.group = made->group_->identity().name;
  config.stream = made->device_->sideStream();
  config.deadline = deadline;
  config.exchange = [self = made.get()](const cuda::NcclUniqueId* own, Deadline until) {
    return self->exchange(own, until);
  };
  config.group_failure = [self = made.get()] { return self->groupFailure(); };
  const Interruptible interruptible(made.get());
  try {
    const c10::DeviceGuard guard(made->device_->device());
    made->api_ = cuda::loadNccl(library_paths);
    made->comm_ = cuda::NcclComm::create(*made->api_, made->device_->runtime(), std::move(config));
  } catch (const std::exception&) {
    ErrorRecord reason = caughtOnDevice();
    const Error error(reason);
    reason.peer = made->group_->identity().jobRank();
    made->group_->abort(reason); // the others wait in the same place
    interruptible.rethrow();
    throw error;
  }
  made->connecting_ = false;
  made->thread_ = startNativeThread("pycomm-nccl", [self = made.get()] { self->threadMain(); });
  return made;
}

NcclGroup::~NcclGroup() {
  stop(kDrainFor);
  if (comm_ != nullptr) {
    onDeviceInAnyCase(device_->device(), [this] { comm_.reset(); });
  }
}

std::string NcclGroup::origin() const {
  return api_->origin();
}

// The group's own broadcast carries the id, not the store: a broadcast fails with the group, names the rank that is missing, and leaves no
// keys to remove.
cuda::NcclUniqueId NcclGroup::exchange(const cuda::NcclUniqueId* own, Deadline deadline) {
  cuda::NcclUniqueId id = own != nullptr ? *own : cuda::NcclUniqueId{};
  Group::Call call;
  call.schedule.kind = Collective::Broadcast;
  call.schedule.root = 0;
  call.schedule.numel = static_cast<int64_t>(sizeof(id.bytes));
  call.output = {reinterpret_cast<std::byte*>(id.bytes), sizeof(id.bytes)};
  call.input = call.output;
  runOnCpu(*group_, call, deadline);
  return id;
}

std::optional<ErrorRecord> NcclGroup::groupFailure() const {
  auto failure = group_->failure();
  if (!failure && Interruptible::look()) {
    failure = interrupted(*group_);
  }
  if (!failure && connecting_ && stopped_.load(std::memory_order_acquire)) { // nobody else can end create()
    failure = closedInTheMiddle();
  }
  return failure;
}

/// Has stop() know that a launch is under way, or knows that stop() came first. A launch that stop() has not seen would never end:
/// the other ranks do not come, and nobody watches over it.
class NcclGroup::Launching {
 public:
  explicit Launching(NcclGroup& group) : group_(group) {
    const std::lock_guard lock(group_.mutex_);
    refused_ = group_.stopping_;
    group_.launching_ += refused_ ? 0 : 1;
  }
  ~Launching() {
    const std::lock_guard lock(group_.mutex_);
    group_.launching_ -= refused_ ? 0 : 1;
  }
  [[nodiscard]] bool refused() const {
    return refused_;
  }
  Launching(const Launching&) = delete;
  Launching& operator=(const Launching&) = delete;

 private:
  NcclGroup& group_;
  bool refused_ = false;
};

void NcclGroup::launch(
    NcclLaunch& launch,
    const std::vector<Group::Call>& calls,
    const std::vector<std::shared_ptr<Operation>>& operations) {
  const Interruptible interruptible(this);
  const Launching launching(*this);
  if (launching.refused()) {
    const Error closed(
        ErrorCode::ShutDown,
        "The process group is closed.",
        "destroy_process_group() was called before this operation was begun");
    abandon(launch, operations, closed.record());
    interruptible.rethrow();
    throw closed;
  }
  try {
    const c10::DeviceGuard guard(device_->device());
    NcclCalls translated(group_->identity().rank, group_->identity().size);
    for (size_t i = 0; i < calls.size(); ++i) {
      translated.add(calls[i], *operations[i]);
    }
    std::list<Pending> pending; // first: what is launched is watched
    pending.push_back({nullptr, operations});
    pending.front().work = comm_->start(
        translated.list(),
        device_->callersStream(),
        Deadline::after(calls.front().deadline.remainingMs(kDayMs) + kLaterMs));
    launch.launched_.store(true, std::memory_order_release);
    const std::lock_guard lock(mutex_);
    pending_.splice(pending_.end(), pending);
    changed_.notify_all();
  } catch (const std::exception&) {
    ErrorRecord record = recordInAnyCase(group_->identity(), caughtOnDevice);
    if (!group_->hasFailed() && (!poll() || comm_->hasFailed())) {
      record.peer = group_->identity().jobRank();
      group_->abort(record);
    }
    abandon(launch, operations, record);
    interruptible.rethrow();
    throw Error(record);
  }
}

void NcclGroup::abandon(
    NcclLaunch& launch,
    const std::vector<std::shared_ptr<Operation>>& operations,
    const ErrorRecord& why) {
  launch.abandoned_.store(true, std::memory_order_release);
  for (const auto& operation : operations) {
    group_->followedEnded(operation, why);
  }
}

void NcclGroup::threadMain() noexcept {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (pending_.empty()) {
      changed_.wait(lock);
      continue;
    }
    lock.unlock();
    look();
    lock.lock();
    changed_.wait_for(lock, kLookEvery, [&] { return stopping_; });
  }
}

bool NcclGroup::poll() noexcept {
  try {
    comm_->poll();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void NcclGroup::look() noexcept {
  const bool polled = poll();
  if (!polled || comm_->hasFailed()) {
    ErrorRecord record = recordInAnyCase(group_->identity(), [&] { return comm_->failure().value(); });
    if (record.peer < 0) {
      record.peer = group_->identity().jobRank();
    }
    if (!group_->hasFailed()) {
      group_->abort(record);
    }
    if (polled) { // else the thread goes on, until poll() has ended the kernels
      endAll(std::move(record)); // a copy would need memory
    }
    return;
  }
  std::unique_lock lock(mutex_);
  while (!pending_.empty() && comm_->done(*pending_.front().work)) {
    std::optional<Pending> ended = std::move(pending_.front());
    pending_.pop_front();
    lock.unlock();
    for (const auto& operation : ended->operations) {
      group_->followedEnded(operation, std::nullopt);
    }
    ended.reset();
    lock.lock();
  }
  if (pending_.empty()) {
    changed_.notify_all(); // stop() may wait for it
  }
}

void NcclGroup::endAll(const std::optional<ErrorRecord>& why) noexcept {
  std::list<Pending> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(pending_);
  }
  for (const Pending& pending : ended) {
    for (const auto& operation : pending.operations) {
      group_->followedEnded(operation, why);
    }
  }
  changed_.notify_all();
}

// wait() only orders streams, so a program may have finished its collectives while the device has not.
void NcclGroup::stop(std::chrono::milliseconds drain_for) {
  std::thread thread;
  bool idle = false;
  {
    std::unique_lock lock(mutex_);
    idle = changed_.wait_for(lock, drain_for, [&] { return pending_.empty() || stopping_; }) && launching_ == 0;
    stopping_ = true;
    thread = std::move(thread_);
  }
  if (!thread.joinable()) {
    return;
  }
  changed_.notify_all();
  thread.join();
  if (!idle) { // its kernels would wait for other ranks while the process ends
    ErrorRecord reason = recordInAnyCase(group_->identity(), closedInTheMiddle);
    comm_->abort(reason);
    endAll(std::move(reason));
  }
}

} // namespace pycomm
