#include "c10d/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "c10d/call_tag.h"
#include "c10d/process_engine.h"
#include "c10d/raising.h"
#include "c10d/shared_tensors.h"
#include "c10d/torch_compat.h"
#include "c10d/without_gil.h"
#include "engine/operation/issue_context.h"
#include "engine/report/failure_text.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

/// In a catch block: the end of a sentence.
std::string whyHere() {
  try {
    throw;
  } catch (const Error& error) {
    return ": " + error.record().summary;
  } catch (...) {
    return "";
  }
}

ErrorRecord endedBy(int rank, const char* does) {
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  reason.peer = rank;
  reason.summary = "Rank " + std::to_string(rank) + " " + does + " the process group.";
  return reason;
}

Error destroyed() {
  return {
      ErrorCode::ShutDown,
      "The process group was destroyed, so reconfigure() cannot give it members.",
      "make a new one with init_process_group()"};
}

} // namespace

/// Any thread. Outlives the backend: a group that fails while that ends may be about to call them.
struct PycommBackend::AbortHooks {
  /// By pointer: to copy a function of Python's takes the interpreter's lock, which who registers one holds while it waits for `mutex`.
  using Hooks = std::map<int64_t, std::shared_ptr<const std::function<void()>>>;

  LeafMutex mutex; ///< guards the rest; not held while a hook runs
  Hooks hooks;
  uint64_t epoch = 0; ///< counts the calls of reconfigure()
  bool ran = false; ///< in this epoch

  /// From now on the next group's. Its number.
  uint64_t next() noexcept {
    const std::lock_guard lock(mutex);
    ran = false;
    return ++epoch;
  }
  /// Those to run now: none if they have run, if there is another group since `of`, or if there is no memory.
  [[nodiscard]] Hooks take(std::optional<uint64_t> of) noexcept {
    try {
      const std::lock_guard lock(mutex);
      if (!ran && (!of || *of == epoch)) {
        ran = true;
        return hooks;
      }
    } catch (const std::exception&) { // no memory
    }
    return {};
  }
  static void run(const Hooks& now) noexcept {
    for (const auto& [id, hook] : now) {
      try {
        (*hook)();
      } catch (const std::exception& error) {
        log(LogLevel::Warn, "abort hook " + std::to_string(id) + " has raised: " + error.what());
      }
    }
  }
};

PycommBackend::PycommBackend(std::shared_ptr<Store> store, std::shared_ptr<Group> group, Settings settings)
    : Backend(group->identity().rank, group->identity().size),
      settings_(std::move(settings)),
      store_(std::move(store)),
      group_(std::move(group)),
      devices_(CudaDevices::create(group_, settings_.cuda(*group_))),
      hooks_(std::make_shared<AbortHooks>()) {
  if (settings_.check_call_sites) {
    call_sites_ = std::make_shared<CallSites>(store_, settings_.skipped_folders);
  }
  watchFailure(group_, 0);
  // The role refers to this until the destructor settles it: nothing may fail behind it.
  owner_ = c10::make_intrusive<WorkOwner>(group_, *this, settings_.starts_world);
}

PycommBackend::PycommBackend(int rank, int size, std::unique_ptr<Reconfigurable> reconfigurable, Settings settings)
    : Backend(rank, size),
      reconfigurable_(std::move(reconfigurable)),
      settings_(std::move(settings)),
      hooks_(std::make_shared<AbortHooks>()) {
  if (settings_.starts_world.value_or(false)) {
    GroupRole::startWorld();
  }
}

PycommBackend::~PycommBackend() {
  // Here, on a user's thread, and not with the last reference, which the data loop may hold.
  if (group_ != nullptr) {
    const WithoutGil no_gil; // the last reference may go on a thread that has the interpreter's lock
    owner_->role->settle();
    devices_->stop();
    beforeWait();
    group_->close();
  }
}

c10::intrusive_ptr<c10d::Backend::Options> PycommBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>("pycomm", settings_.timeout);
  options->group_name = settings_.group_name;
  return options;
}

void PycommBackend::setTimeout(std::chrono::milliseconds timeout) {
  settings_.timeout = timeout;
}

c10d::ErrorType PycommBackend::getError() {
  const std::shared_ptr<Group> group = groupIfAny();
  if (group == nullptr) {
    return c10d::ErrorType::SUCCESS;
  }
  const auto failure = group->failure();
  // The ranks agree on a cause only some milliseconds after abort() has returned, perhaps on another rank's.
  if (group->isAborted() && (!failure || failure->code == ErrorCode::Aborted)) {
    return c10d::ErrorType::COMM_ERROR;
  }
  if (!failure) {
    return c10d::ErrorType::SUCCESS;
  }
  if (failure->code == ErrorCode::Timeout) {
    return c10d::ErrorType::TIMEOUT;
  }
  return failure->peer >= 0 && failure->peer != group->identity().jobRank() ? c10d::ErrorType::REMOTE_ERROR
                                                                            : c10d::ErrorType::COMM_ERROR;
}

void PycommBackend::abort() {
  AbortHooks::run(hooks_->take(std::nullopt));
  abortJoining("aborted");
  // After that: a reconfigure() that has not seen it has adopted its group.
  if (const std::shared_ptr<Group> group = groupIfAny()) {
    group->abort(endedBy(group->identity().jobRank(), "aborted"));
  }
}

void PycommBackend::abortFor(const std::string& what) {
  if (const std::shared_ptr<Group> group = groupIfAny()) {
    group->abort(recordInAnyCase(group->identity(), [&] {
      ErrorRecord reason = endedBy(group->identity().jobRank(), "ended");
      reason.summary = "Rank " + std::to_string(reason.peer) + " " + what;
      reason.hint = "see the exception that this rank has raised";
      return reason;
    }));
  }
}

void PycommBackend::abortJoining(const char* does) {
  const std::lock_guard lock(joining_mutex_);
  if (joining_rank_ < 0) {
    return;
  }
  if (!abort_wanted_) {
    abort_wanted_ = endedBy(joining_rank_, does);
  }
  if (joining_ != nullptr) {
    joining_->abort(*abort_wanted_);
  }
}

std::optional<ErrorRecord> PycommBackend::endJoining() noexcept {
  const std::lock_guard lock(joining_mutex_);
  joining_rank_ = -1;
  return std::exchange(abort_wanted_, std::nullopt);
}

void PycommBackend::shutdown() {
  if (reconfigurable_ != nullptr) {
    if (!reconfigurable_->belongsToThisProcess()) {
      return; // nothing here is a forked child's
    }
    closed_ = true;
    std::shared_ptr<Engine::Maker> maker;
    {
      const std::lock_guard lock(joining_mutex_);
      maker = maker_.lock();
    }
    if (maker != nullptr) {
      maker->close(); // while others can still answer at the endpoint
    }
    reconfigurable_->leave();
    abortJoining("destroyed");
  }
  std::shared_ptr<Group> group;
  std::shared_ptr<CudaDevices> devices;
  {
    const EpochLock lock =
        reconfigurable_ == nullptr ? EpochLock(epoch_mutex_, std::defer_lock) : EpochLock(epoch_mutex_);
    group = group_;
    devices = devices_;
  }
  if (group != nullptr) {
    devices->stop();
    beforeWait();
    group->close();
  }
  AbortHooks::Hooks gone; // freed after the lock
  const std::lock_guard lock(hooks_->mutex);
  std::swap(gone, hooks_->hooks);
}

PycommBackend::EpochLock PycommBackend::holdEpoch() const {
  if (reconfigurable_ == nullptr) {
    return EpochLock(epoch_mutex_, std::defer_lock);
  }
  EpochLock lock(epoch_mutex_);
  if (group_ == nullptr) {
    throw noGroup();
  }
  return lock;
}

// With epoch_mutex_.
Error PycommBackend::noGroup() const {
  return {
      ErrorCode::InvalidArgument,
      "This process group has no members: " +
          (why_none_.empty() ? "it was made with enable_reconfigure, and reconfigure() has not been called"
                             : why_none_) +
          ".",
      "exchange the handles of all members, and let each of them call reconfigure() with a new uuid and the same list"};
}

std::shared_ptr<Group> PycommBackend::groupIfAny() const {
  if (reconfigurable_ == nullptr) {
    return group_;
  }
  const EpochLock lock(epoch_mutex_);
  return group_;
}

std::shared_ptr<Group> PycommBackend::group() const {
  const EpochLock lock = holdEpoch();
  return group_;
}

uint32_t PycommBackend::groupNumber() const {
  const EpochLock lock = holdEpoch();
  return owner_->role->number();
}

std::string PycommBackend::reconfigureHandle() const {
  return pycomm::raising([&] {
    if (reconfigurable_ == nullptr) {
      throw Error(
          ErrorCode::InvalidArgument,
          "This process group cannot be reconfigured: it was not made for that.",
          "init_process_group(enable_reconfigure=True), or pg_options=pycomm.Reconfigurable() before torch 2.14");
    }
    if (!reconfigurable_->belongsToThisProcess()) {
      throw Error(
          ErrorCode::Forked,
          "A process group cannot be reconfigured in a child of fork(): its handle and its port belong to the parent.",
          "start workers with the spawn method, or make a new process group in the child");
    }
    return reconfigurable_->handle();
  });
}

void PycommBackend::adopt(OfGroup next, const std::string& why_none, Deadline deadline) {
  std::shared_ptr<CudaDevices> devices;
  c10::intrusive_ptr<WorkOwner> owner;
  Reconfigurable::Met& met = next.met;
  if (met.group != nullptr) {
    devices = CudaDevices::create(met.group, settings_.cuda(*met.group));
    owner = c10::make_intrusive<WorkOwner>(met.group, next.role);
  }
  std::unique_lock<std::shared_timed_mutex> lock(epoch_mutex_, std::defer_lock);
  // A call that blocks, such as the decision about NCCL, ends with its group, which is closed by now.
  if (!lock.try_lock_for(std::chrono::milliseconds(std::max(1000, deadline.remainingMs(60000))))) {
    throw Error(
        ErrorCode::Timeout,
        "reconfigure() timed out: another call for this group is under way and does not return.",
        "call it when no collective is being issued, and not in a signal handler");
  }
  if (met.group != nullptr && closed_) {
    throw destroyed();
  }
  if (met.group != nullptr) {
    renumber(rank_, met.group->identity().rank);
    renumber(size_, met.group->identity().size);
  }
  // The lock goes before the old ones, whose ends may block.
  std::swap(store_, met.store);
  std::swap(group_, met.group);
  std::swap(instance_, met.instance);
  std::swap(devices_, devices);
  std::swap(owner_, owner);
  entitled_ = false;
  why_none_ = why_none;
}

Reconfigurable::Met PycommBackend::met() const {
  const EpochLock lock = holdEpoch();
  return {store_, group_, instance_};
}

void PycommBackend::takeOver(const Reconfigurable::Met& met) {
  const uint32_t number = groupNumber();
  devices_->stop();
  const uint64_t epoch = hooks_->next();
  decltype(windows_) gone; // freed after the lock
  {
    const std::lock_guard lock(windows_mutex_);
    gone.swap(windows_);
  }
  watchFailure(met.group, epoch);
  adopt({met, GroupRole::ofMeeting(met.instance->name(), number)}, "", Deadline::after(settings_.timeout.count()));
}

void PycommBackend::closeFirst(std::weak_ptr<Engine::Maker> maker) {
  const std::lock_guard lock(joining_mutex_);
  maker_ = std::move(maker);
}

// On the control loop: a hook may take the interpreter's lock. Which hooks these are is decided when the group fails: what happens before
// the pool comes to it, a shutdown() or another group, changes nothing.
void PycommBackend::watchFailure(const std::shared_ptr<Group>& group, uint64_t epoch) {
  group->whenFailed([hooks = hooks_, epoch, &pool = group->engine().callbacks()] {
    try {
      if (AbortHooks::Hooks now = hooks->take(epoch); !now.empty()) {
        static_cast<void>(pool.submit([now = std::move(now)] { AbortHooks::run(now); }));
      }
    } catch (const std::exception&) { // no memory for it
    }
  });
}

void PycommBackend::addAbortHook(int64_t id, std::function<void()> hook) {
  auto fresh =
      std::make_shared<const std::function<void()>>(std::move(hook)); // afterwards the old one, freed after the lock
  const std::lock_guard lock(hooks_->mutex);
  std::swap(hooks_->hooks[id], fresh);
}

void PycommBackend::removeAbortHook(int64_t id) {
  std::shared_ptr<const std::function<void()>> gone; // freed after the lock
  const std::lock_guard lock(hooks_->mutex);
  std::swap(hooks_->hooks[id], gone);
  hooks_->hooks.erase(id);
}

void PycommBackend::reconfigureTo(
    int64_t uuid,
    const std::vector<std::string>& handles,
    std::chrono::milliseconds timeout) {
  (void)reconfigureHandle(); // raises if this is not reconfigurable, and in a child of fork()
  const Deadline deadline = Deadline::after(timeout.count());
  pycomm::raising([&] {
    const std::unique_lock<std::mutex> alone(reconfigure_mutex_, std::try_to_lock);
    const bool within_window = [&] {
      const std::lock_guard lock(windows_mutex_);
      return windows_.count(std::this_thread::get_id()) != 0;
    }();
    if (!alone || within_window) {
      throw Error(
          ErrorCode::InvalidArgument,
          alone ? "reconfigure() was called within a coalescing manager."
                : "Another thread reconfigures this group already.",
          alone ? "leave the manager first" : "call reconfigure() from one thread at a time");
    }
    if (closed_) {
      throw destroyed();
    }
    const Reconfigurable::Plan plan = reconfigurable_->plan(uuid, handles);
    const std::string which = "reconfigure(uuid=" + std::to_string(uuid) + ")";
    {
      const std::lock_guard lock(joining_mutex_);
      joining_rank_ = plan.jobRank(); // an abort() counts for the new group from here on
    }
    const auto over = c10::make_scope_exit([&] { (void)endJoining(); });
    uint32_t number = 0;
    if (const std::shared_ptr<Group> old = groupIfAny()) {
      number = groupNumber();
      devices_->stop();
      old->close();
    }
    adopt({}, which + " is under way or was interrupted", deadline);
    const uint64_t epoch = hooks_->next();
    {
      std::map<std::thread::id, Window>
          left; // of other threads, whose managers' bodies have raised or will; freed after the lock
      const std::lock_guard lock(windows_mutex_);
      left.swap(windows_);
    }
    RendezvousConfig meeting; // for the text of a signal
    meeting.rank = plan.rank;
    meeting.job = plan.instance->job();
    Reconfigurable::Met met;
    try {
      joinInterruptibly(meeting, [&](JoinAbort& abort) {
        const auto joining = [&](JoinAbort* now) {
          const std::lock_guard lock(joining_mutex_);
          joining_ = now;
          if (now != nullptr && abort_wanted_) {
            now->abort(*abort_wanted_);
          }
        };
        try {
          joining(&abort);
          met = reconfigurable_->meet(plan, deadline, abort);
        } catch (...) {
          joining(nullptr);
          throw;
        }
        joining(nullptr);
      });
      watchFailure(met.group, epoch);
      adopt({met, GroupRole::ofMeeting(plan.instance->name(), number)}, "", deadline);
      if (const auto wanted = endJoining()) { // after the meeting, which has not seen it
        met.group->abort(*wanted);
      }
    } catch (...) { // also what a handler of a signal has raised
      if (met.group != nullptr) {
        ErrorRecord reason;
        reason.code = ErrorCode::Aborted;
        reason.peer = plan.jobRank();
        reason.summary = "Rank " + std::to_string(reason.peer) + " gave up " + which + " in its last moment.";
        met.group->abort(reason);
        met.group->close();
      }
      adopt({}, "the last call, " + which + ", has failed" + whyHere(), Deadline::after(0));
      throw;
    }
  });
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
c10::intrusive_ptr<c10d::Work> PycommBackend::reconfigure(const c10d::ReconfigureOptions& opts) {
  std::vector<std::string> handles;
  if (const auto* const in_order = std::get_if<std::vector<c10d::ReconfigureHandle>>(&opts.handles)) {
    handles = *in_order;
  } else { // all members must sort alike
    const auto& set = std::get<std::unordered_set<c10d::ReconfigureHandle>>(opts.handles);
    handles.assign(set.begin(), set.end());
    std::sort(handles.begin(), handles.end());
  }
  reconfigureTo(opts.uuid, handles, opts.timeout.value_or(settings_.timeout));
  const auto made = c10::make_intrusive<PycommWork>(
      owner_, getRank(), c10d::OpType::UNKNOWN, "pycomm:reconfigure", PycommWork::Content());
  made->started();
  return made;
}
#endif

bool PycommBackend::goesByNccl(c10::Device device) {
  return raising([&] { return devices_->goesByNccl(device, Deadline::after(settings_.timeout.count())); });
}

bool PycommBackend::supportsTensorAlloc(c10::DeviceIndex device) {
  const std::shared_ptr<Group> group = device < 0 ? groupIfAny() : nullptr;
  return group != nullptr && group->reachesTensors();
}

at::Tensor PycommBackend::allocateTensor(long numel, at::TensorOptions options) {
  return pycomm::raising([&] {
    const bool plain = options.device().is_cpu() && options.layout() == at::kStrided && !options.requires_grad() &&
        !options.pinned_memory();
    if (!plain) {
      throw Error(
          ErrorCode::Unsupported,
          "allocateTensor() makes dense tensors on the CPU.",
          "leave out device, layout, pin_memory and requires_grad");
    }
    return emptyShared({numel}, c10::typeMetaToScalarType(options.dtype()));
  });
}

std::shared_ptr<c10::Allocator> PycommBackend::getMemAllocator() {
  return {&heapAllocator(), [](c10::Allocator*) {}}; // lives as long as the process
}

void PycommBackend::readParts(Group::Call& call, Staging& staging, const std::vector<at::Tensor>& parts) const {
  const std::vector<BufferView> apart = staging.apart(parts);
  if (!apart.empty() && group_->keepsParts(call.schedule)) {
    call.input_parts.assign(apart.begin(), apart.end());
  } else {
    call.input = staging.in(parts);
  }
}

void PycommBackend::writeParts(Group::Call& call, Staging& staging, const std::vector<at::Tensor>& parts) const {
  std::vector<BufferView> apart = staging.apart(parts);
  if (!apart.empty() && group_->keepsParts(call.schedule)) {
    call.output_parts = std::move(apart);
  } else {
    call.output = staging.out(parts);
  }
}

uint64_t PycommBackend::getSequenceNumberForGroup() {
  const std::shared_ptr<Group> group = groupIfAny();
  return group == nullptr ? 0 : static_cast<uint64_t>(group->operationsIssued());
}

uint32_t PycommBackend::tagFor() const {
  if (const uint32_t tag = CallTag::current(); tag != 0) {
    return tag;
  }
  const uint32_t strand = IssueContext::currentTraits().tag;
  if (call_sites_ == nullptr) {
    return strand;
  }
  const uint32_t site = call_sites_->tagHere();
  return strand == 0 ? site : CallTag::of(std::to_string(site), strand); // no site: strands' tags change in each step
}

std::shared_ptr<Operation> PycommBackend::start(const Group::Call& call) {
  if (!entitled_.load(std::memory_order_relaxed) && !entitled_.exchange(true)) {
    entitle();
  }
  return group_->start(call);
}

// torch sets its description of a group after it has made the backend, and two of these say nothing.
void PycommBackend::entitle() {
  const std::string& description = getGroupDesc();
  if (!description.empty() && description != "undefined" && description != "default_pg") {
    group_->identity().title->set(description);
  }
}

PycommBackend::Prepared PycommBackend::prepare(Codec codec) const {
  const bool plain = codec == Codec::None && IssueContext::currentTraits().codec.value_or(Codec::None) == Codec::None;
  return {devices_, plain, Deadline::after(settings_.timeout.count())};
}

c10::intrusive_ptr<c10d::Work> PycommBackend::begin(Titled titled, Prepared prepared) {
  Window* const open = window(); // once, as it may refuse: nothing has begun yet
  const uint32_t tag = tagFor();
  for (Group::Call& call : prepared.calls) { // all of them, before the first one starts
    if (call.schedule.kind != Collective::Send && call.schedule.kind != Collective::Recv) { // start() checks messages
      checkRequest(call.schedule);
      call.tag = tag;
    }
  }
  CallMemory memory;
  if (open != nullptr) {
    memory = open->memory.with(prepared.calls, titled.title);
  } else if (prepared.calls.size() > 1) {
    dropTwins(prepared.calls);
    (void)memory.with(prepared.calls, titled.title);
  }
  for (at::Tensor& temporary : prepared.staging.takeTemporaries()) {
    prepared.content.keep_alive.push_back(std::move(temporary));
  }
  prepared.content.storages = prepared.staging.takeStorages();
  prepared.content.unpack = prepared.staging.takeUnpack();
  prepared.content.cuda = prepared.staging.takeCopies();
  // The Work is made before its first operation, so nothing is under way whose memory has no owner, whatever fails in between.
  const auto made = work(titled, std::move(prepared.content), open);
  PycommWork::Content& content = made->starting();
  try {
    content.operations.reserve(prepared.calls.size());
    if (const auto nccl = prepared.staging.takeNccl()) {
      startNccl(nccl, prepared.calls, content, open);
    } else if (content.cuda != nullptr) {
      if (prepared.calls.size() == 1) {
        encodeOnDevice(prepared.calls.front(), content);
      }
      content.order_after.push_back(content.cuda);
      startBehindCopies(prepared.calls, content);
    } else {
      for (const Group::Call& call : prepared.calls) {
        content.operations.push_back(start(call));
      }
    }
    made->started();
  } catch (...) {
    if (!content.operations.empty()) {
      tellOthers();
    }
    made->cancel();
    if (open != nullptr && content.operations.empty()) {
      open->works.pop_back();
    }
    throw;
  }
  if (open != nullptr) {
    open->memory = std::move(memory);
  }
  return made;
}

void PycommBackend::tellOthers() noexcept {
  ErrorRecord reason = recordInAnyCase(group_->identity(), [&] { return recordOfThrownHere(group_->identity()); });
  if (!isOwnTrouble(reason.code)) {
    return; // all ranks find that
  }
  reason.peer = group_->identity().jobRank();
  group_->abort(reason);
}

void PycommBackend::encodeOnDevice(Group::Call& call, PycommWork::Content& content) const {
  const ScheduleRequest& schedule = call.schedule;
  CudaCopies& copies = *content.cuda;
  if (schedule.codec == Codec::None || getSize() == 1 || schedule.dtype != DType::Float32 ||
      schedule.reduce_op == ReduceOp::PremulSum || !schedule.counts.empty() || call.residual.ptr != nullptr ||
      !copies.reads() || !copies.canGoInPieces()) {
    return; // on the CPU, then
  }
  const bool back = schedule.kind == Collective::AllReduce; // a reduce_scatter's result is not encoded
  const int64_t parts = back ? 1 : getSize();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor room = at::empty(
      {static_cast<int64_t>(CudaCopies::encodedRoom(schedule.codec, schedule.numel, parts))},
      at::TensorOptions().dtype(at::kByte).device(copies.device().device()));
  content.keep_alive.push_back(room);
  const BufferView host =
      copies.encode(schedule.codec, static_cast<std::byte*>(room.data_ptr()), schedule.numel, parts, back);
  call.input = host;
  call.input_encoded = true;
  if (back) {
    call.output = host.slice(0, static_cast<size_t>(encodedNbytes(schedule.codec, schedule.numel)));
    call.output_encoded = true;
  }
}

void PycommBackend::startBehindCopies(std::vector<Group::Call>& calls, PycommWork::Content& content) {
  for (Group::Call& call : calls) {
    call.held = true;
    call.in_pieces = calls.size() == 1 && content.cuda->canGoInPieces();
    content.operations.push_back(start(call));
  }
  PieceFlow* const flow = calls.size() == 1 ? content.operations.front()->request().extras().pieces.get() : nullptr;
  if (flow != nullptr) {
    flow->onLeave(CudaCopies::leaving(content.cuda, group_->engine().callbacks()));
  }
  const auto begin = [group = group_, operations = content.operations, reads = content.cuda->reads()](
                         size_t ended, const std::optional<ErrorRecord>& failure) {
    if (failure) {
      group->abort(recordInAnyCase(group->identity(), [&] {
        ErrorRecord reason = *failure;
        reason.peer = group->identity().jobRank();
        return reason;
      }));
      return; // the memory was never filled: nothing of it leaves
    }
    const bool in_pieces = reads && operations.front()->request().extras().pieces != nullptr;
    for (const auto& operation : operations) {
      in_pieces ? group->release(operation, ended) : group->release(operation);
    }
  };
  try {
    content.cuda->toHost(flow, begin);
  } catch (const std::exception&) {
    // The other ranks have, or will have, operations of these numbers: they are not left waiting for them.
    const Error error(caughtOnDevice());
    begin(0, error.record());
    throw error;
  }
}

void PycommBackend::startNccl(
    const std::shared_ptr<NcclGroup>& nccl,
    const std::vector<Group::Call>& calls,
    PycommWork::Content& content,
    Window* open) {
  for (const Group::Call& call : calls) {
    content.operations.push_back(group_->follow(call));
  }
  if (group_->isEnding()) {
    return; // the operations end with it, and wait() raises it, as for every other operation
  }
  if (open != nullptr) {
    if (open->launch == nullptr) {
      open->nccl = nccl;
      open->launch = nccl->prepare();
    }
    open->calls.insert(open->calls.end(), calls.begin(), calls.end());
    open->operations.insert(open->operations.end(), content.operations.begin(), content.operations.end());
    open->unpacks.push_back(std::move(content.unpack));
    content.nccl = open->launch;
  } else {
    content.nccl = nccl->prepare();
    nccl->launch(*content.nccl, calls, content.operations);
    content.nccl->finish(content.unpack);
  }
  content.order_after.push_back(content.nccl);
  content.unpack = nullptr;
}

void PycommBackend::launch(Window& window) {
  if (window.launch == nullptr || group_->isEnding()) {
    return;
  }
  window.nccl->launch(*window.launch, window.calls, window.operations);
  window.launch->finish([&] {
    for (const auto& unpack : window.unpacks) {
      if (unpack) {
        unpack();
      }
    }
  });
}

PycommBackend::Window* PycommBackend::window() {
  Window old;
  {
    const std::lock_guard lock(windows_mutex_);
    const auto found = windows_.find(std::this_thread::get_id());
    if (found == windows_.end()) {
      return nullptr;
    }
    if (Clock::now() - found->second.opened < settings_.timeout) {
      return &found->second;
    }
    old = std::move(found->second);
    windows_.erase(found);
  }
  const auto age = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - old.opened);
  abandon(std::move(old), kBodyRaised);
  throw Error(
      ErrorCode::InvalidArgument,
      "A coalescing manager that this thread entered " + std::to_string(age.count()) +
          " s ago was never left: its body has raised.",
      "call this again; and see which operations of that body the other ranks have begun");
}

PycommBackend::Windows::node_type PycommBackend::takeWindow() {
  const std::lock_guard lock(windows_mutex_);
  return windows_.extract(std::this_thread::get_id());
}

void PycommBackend::abandon(Window window, const char* reason) {
  for (const auto& part : window.works) {
    part->handOver();
  }
  if (window.launch == nullptr) {
    return;
  }
  ErrorRecord why;
  why.code = ErrorCode::InvalidArgument;
  why.rank = group_->identity().jobRank();
  why.summary = std::string("The operation was never begun: ") + reason + " has raised.";
  why.hint = "see the exception of that";
  window.nccl->abandon(*window.launch, window.operations, why);
}

c10::intrusive_ptr<PycommWork> PycommBackend::work(Titled titled, PycommWork::Content content, Window* open) {
  content.call_sites = call_sites_;
  auto made = c10::make_intrusive<PycommWork>(owner_, getRank(), titled.type, titled.title, std::move(content));
  if (open != nullptr) {
    open->works.push_back(made);
  }
  return made;
}

void PycommBackend::startCoalescing() {
  raising([&] {
    Window left_open; // torch refuses a manager within a manager, so the body of this one has raised
    {
      const std::lock_guard lock(windows_mutex_);
      std::swap(left_open, windows_[std::this_thread::get_id()]);
      windows_[std::this_thread::get_id()].opened = Clock::now();
    }
    abandon(std::move(left_open), kBodyRaised);
  });
}

c10::intrusive_ptr<c10d::Work> PycommBackend::endCoalescing() {
  return raising([&]() -> c10::intrusive_ptr<c10d::Work> {
    auto own = takeWindow();
    if (!own) {
      throw Error(
          ErrorCode::InvalidArgument,
          "endCoalescing() without startCoalescing() on this thread.",
          "a list call that fails ends what startCoalescing() has begun");
    }
    Window& window = own.mapped();
    try {
      launch(window);
    } catch (...) {
      tellOthers(); // as in begin(): they have, or will have, operations of these numbers
      throw;
    }
    PycommWork::Content content;
    const bool by_nccl = std::all_of(
        window.works.begin(), window.works.end(), [](const auto& part) { return part->content().nccl != nullptr; });
    if (by_nccl) {
      content.nccl = window.launch;
    }
    for (const auto& part : window.works) {
      const PycommWork::Content& of = part->content();
      content.operations.insert(content.operations.end(), of.operations.begin(), of.operations.end());
      content.inputs.insert(content.inputs.end(), of.inputs.begin(), of.inputs.end());
      content.outputs.insert(content.outputs.end(), of.outputs.begin(), of.outputs.end());
      content.order_after.insert(content.order_after.end(), of.order_after.begin(), of.order_after.end());
      part->handOver();
      for (const auto& list : of.output_lists) {
        content.outputs.insert(content.outputs.end(), list.begin(), list.end());
      }
    }
    content.parts = std::move(window.works);
    const auto made = work({c10d::OpType::COALESCED, "pycomm:coalesced"}, std::move(content), nullptr);
    made->started();
    return made;
  });
}

} // namespace pycomm
