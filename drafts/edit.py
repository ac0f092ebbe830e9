import shutil


def sub(path, *pairs):
    s = open(path).read()
    for a, b in pairs:
        assert s.count(a) == 1, (path, a, s.count(a))
        s = s.replace(a, b)
    open(path, "w").write(s)


for name in ("cuda_nccl.h", "cuda_nccl.cc", "nccl_calls.h", "nccl_calls.cc"):
    shutil.copy("/tmp/cuda-nccl/csrc/c10d/" + name, "csrc/c10d/" + name)

# ---- schedule, engine
sub("csrc/schedule/step.h", ("  Hierarchical = 9,\n", "  Hierarchical = 9,\n  Nccl = 10, ///< no schedule: NCCL moves the bytes (Group::follow)\n"))

DIGEST = '''// FNV-1a over the split sizes: 0 for even splits, so that error texts stay short where there are none.
uint32_t splitsDigest(const std::vector<int64_t>& counts) {
  if (counts.empty()) {
    return 0;
  }
  uint32_t hash = 2166136261U;
  for (const int64_t count : counts) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ static_cast<uint32_t>((count >> shift) & 0xff)) * 16777619U;
    }
  }
  return hash == 0 ? 1 : hash;
}

'''
sub(
    "csrc/engine/group.cc",
    (DIGEST, ""),
    (
        '''  // In an all_to_all every rank has splits of its own, and in a gather or scatter only the root knows all sizes; what matters there
  // is compared pair by pair, as frames meet.
  const bool splits_are_own = schedule.kind == Collective::AllToAll || schedule.kind == Collective::Gather ||
      schedule.kind == Collective::Scatter;
  request.descriptor.digest = splits_are_own ? 0 : splitsDigest(schedule.counts);
''',
        "  request.descriptor.digest = splitsDigest(schedule.kind, schedule.counts);\n",
    ),
)
sub(
    "csrc/engine/descriptor.h",
    (
        "} // namespace pycomm\n",
        '''/// Of the split sizes that all ranks must have alike; 0 for even splits, and where each rank has its own.
[[nodiscard]] uint32_t splitsDigest(Collective kind, const std::vector<int64_t>& counts);

} // namespace pycomm
''',
    ),
    ("#include <string>\n", "#include <string>\n#include <vector>\n"),
)
s = open("csrc/engine/descriptor.cc").read()
i = s.rindex("} // namespace pycomm")
s = (
    s[:i]
    + '''// FNV-1a; never 0 for uneven splits. In an all_to_all every rank has splits of its own, and in a gather or scatter only the root
// knows all sizes; what matters there is compared pair by pair, as frames meet.
uint32_t splitsDigest(Collective kind, const std::vector<int64_t>& counts) {
  const bool own = kind == Collective::AllToAll || kind == Collective::Gather || kind == Collective::Scatter;
  if (own || counts.empty()) {
    return 0;
  }
  uint32_t hash = 2166136261U;
  for (const int64_t count : counts) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ static_cast<uint32_t>((count >> shift) & 0xff)) * 16777619U;
    }
  }
  return hash == 0 ? 1 : hash;
}

} // namespace pycomm
'''
)
open("csrc/engine/descriptor.cc", "w").write(s)

sub(
    "csrc/engine/data_plane.h",
    (
        "  void hostUnstuck(uint64_t op_id);\n",
        '''  void hostUnstuck(uint64_t op_id);

  /// Of an operation that another library runs: it is compared and watched over, and ends when it is said to have, or with the group.
  void follow(const std::shared_ptr<Operation>& operation);
  void followedEnded(uint64_t op_id, std::optional<ErrorRecord> error);
''',
    ),
    (
        "  void checkHostDeadlines(TimePoint now);\n",
        '''  void checkHostDeadlines(TimePoint now);
  void checkFollowedDeadlines(TimePoint now);
  void endFollowed(const std::function<ErrorRecord(const Operation&, const Transfer*)>& why);
''',
    ),
    (
        "  int64_t host_recalled_ = 0;",
        "  std::unordered_map<uint64_t, std::shared_ptr<Operation>> followed_; ///< see follow()\n  int64_t host_recalled_ = 0;",
    ),
)
sub(
    "csrc/engine/data_plane.cc",
    ("  host_stuck_.clear();\n", "  host_stuck_.clear();\n  endFollowed(why);\n"),
    ("  checkHostDeadlines(now);\n", "  checkHostDeadlines(now);\n  checkFollowedDeadlines(now);\n"),
)
s = open("csrc/engine/data_plane_host.cc").read()
s = s.replace(
    "// What the data plane does for operations in shared memory (HostPlane): it watches over their deadlines, and lets the ranks ask each\n// other about them. Their bytes never come here.\n",
    "// What the data plane does for operations whose bytes never come here, those in shared memory (HostPlane) and of NCCL: it watches over\n// their deadlines, and lets the ranks ask each other about them.\n",
)
i = s.rindex("} // namespace pycomm")
s = (
    s[:i]
    + '''void DataPlane::follow(const std::shared_ptr<Operation>& operation) {
  if (failure_ || closing_) {
    post(operation); // which says so
    return;
  }
  guarded(-1, [&] {
    const Operation::Request& request = operation->request();
    next_deadline_ = std::min(next_deadline_, request.deadline.instant());
    followed_.emplace(request.id.id, operation);
    protocol_.posted(request.id, request.descriptor, PreparedSchedule(), Clock::now());
    act();
  });
}

void DataPlane::followedEnded(uint64_t op_id, std::optional<ErrorRecord> error) {
  const auto found = followed_.find(op_id);
  if (found == followed_.end()) {
    return; // the group has failed meanwhile
  }
  const std::shared_ptr<Operation> operation = std::move(found->second);
  followed_.erase(found);
  protocol_.ended(op_id);
  operation->finish(error ? std::optional<ErrorRecord>(errorOf(*operation, *error, identity_)) : std::nullopt);
}

void DataPlane::endFollowed(const std::function<ErrorRecord(const Operation&, const Transfer*)>& why) {
  for (const auto& entry : std::exchange(followed_, {})) {
    protocol_.ended(entry.first);
    entry.second->finish(why(*entry.second, nullptr));
  }
}

void DataPlane::checkFollowedDeadlines(TimePoint now) {
  for (const auto& entry : followed_) {
    const Deadline deadline = entry.second->request().deadline;
    if (deadline.expired(now)) {
      notice(timedOut(*entry.second, 0, 0, -1, protocol_.missing(entry.first), identity_));
    } else {
      next_deadline_ = std::min(next_deadline_, deadline.instant());
    }
  }
}

} // namespace pycomm
'''
)
open("csrc/engine/data_plane_host.cc", "w").write(s)
sub(
    "csrc/engine/failure_text.cc",
    (
        '''rankText(record.peer, identity) : "its own memory") + ".";
''',
        '''rankText(record.peer, identity) : ownPart(operation)) + ".";
''',
    ),
    (
        '''ErrorRecord timedOut(
    const Operation& operation,
''',
        '''namespace {

// What is left to wait for where every rank has come.
std::string ownPart(const Operation& operation) {
  return operation.request().descriptor.algorithm == Algorithm::Nccl ? "NCCL, or its stream" : "its own memory";
}

} // namespace

ErrorRecord timedOut(
    const Operation& operation,
''',
    ),
)
sub(
    "csrc/engine/group.h",
    (
        '''  /// Whether this call may have its parts in buffers''',
        '''  /// Takes note of an operation that another library runs (Algorithm::Nccl). It has its place in the order of operations, is compared
  /// with the other ranks', recorded, and watched over like all others; nothing of it moves here. It ends with the group, or when
  /// followedEnded() says so. Collectives only; throws as start() does.
  [[nodiscard]] std::shared_ptr<Operation> follow(const Call& call);
  void followedEnded(const std::shared_ptr<Operation>& operation, const std::optional<ErrorRecord>& error);
  /// One more round between the ranks, in the store: `mine` of all, by rank. Fails the group if it fails.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& key, const std::string& mine, Deadline deadline);

  /// Whether this call may have its parts in buffers''',
    ),
)
open("csrc/engine/group_follow.cc", "w").write('''// Operations of a group that another library runs.
#include <utility>

#include "engine/failure_text.h"
#include "engine/group.h"
#include "engine/host_plane.h"
#include "schedule/request_checks.h"

namespace pycomm {

std::shared_ptr<Operation> Group::follow(const Call& call) {
  refuseInChild();
  const ScheduleRequest schedule = ours(call.schedule);
  checkRequest(schedule);
  Operation::Request request;
  request.descriptor.kind = schedule.kind;
  request.descriptor.dtype = schedule.dtype;
  request.descriptor.reduce_op = schedule.reduce_op;
  request.descriptor.wire_dtype = schedule.wire_dtype;
  request.descriptor.algorithm = Algorithm::Nccl;
  request.descriptor.root = schedule.root;
  request.descriptor.numel = schedule.numel;
  request.descriptor.tag = call.tag;
  request.descriptor.digest = splitsDigest(schedule.kind, schedule.counts);
  request.deadline = call.deadline;
  request.id = takeOperationId(counter_, identity_.hash);
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->setMark(recorded(*operation));
  operation->mark().running(operation->issuedAt(), 0);
  engine_.lane().post([self = shared_from_this(), operation] {
    if (self->data_ != nullptr) {
      self->data_->follow(operation);
      return;
    }
    ErrorRecord record;
    record.code = ErrorCode::ShutDown;
    record.summary = "The process group is closed.";
    record.hint = "destroy_process_group() was called before this operation";
    operation->finish(errorOf(*operation, record, self->identity_));
  });
  return operation;
}

void Group::followedEnded(const std::shared_ptr<Operation>& operation, const std::optional<ErrorRecord>& error) {
  engine_.lane().post([self = shared_from_this(), operation, error] {
    if (self->data_ != nullptr) {
      self->data_->followedEnded(operation->request().id.id, error);
    }
  });
}

std::vector<std::string> Group::exchange(const std::string& key, const std::string& mine, Deadline deadline) {
  try {
    return exchangeTexts(store_, claim_, identity_.size, key, mine, deadline, abort_);
  } catch (const Error& error) {
    const ErrorRecord record = tellFailure(store_, claim_, error.record());
    abort(record);
    throw Error(record);
  }
}

} // namespace pycomm
''')

# ---- cuda library
sub(
    "csrc/cuda/device_runtime.h",
    (
        "  virtual void setDevice(int device) = 0;\n",
        '''  virtual void setDevice(int device) = 0;
  /// The same for two processes only if they use the same GPU, or the same part of one.
  [[nodiscard]] virtual std::string deviceUuid(int device) = 0;
''',
    ),
    ("#include <cstdint>\n", "#include <cstdint>\n#include <string>\n"),
)
sub(
    "csrc/cuda/cudart_runtime.cu",
    (
        '''    check(cudaSetDevice(device), "cudaSetDevice");
  }
''',
        '''    check(cudaSetDevice(device), "cudaSetDevice");
  }
  std::string deviceUuid(int device) override {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (const char byte : properties.uuid.bytes) {
      text += kDigits[static_cast<unsigned char>(byte) >> 4];
      text += kDigits[static_cast<unsigned char>(byte) & 15];
    }
    return text;
  }
''',
    ),
)
sub(
    "tests/cpp/cuda/host_device.h",
    (
        "  void setDevice(int) override {}\n",
        '''  void setDevice(int) override {}
  std::string deviceUuid(int device) override {
    return "host" + std::to_string(device);
  }
''',
    ),
    ("#include <cstring>\n", "#include <algorithm>\n#include <cstring>\n#include <string>\n"),
)
sub(
    "csrc/cuda/c_api.h",
    ("#define PYCOMM_CUDA_VERSION 1", "#define PYCOMM_CUDA_VERSION 2"),
    (
        "  uint16_t (*set_device)(int device, PycommCudaError* error);\n",
        '''  uint16_t (*set_device)(int device, PycommCudaError* error);
  /// The same in two processes only if they use the same GPU, or the same part of one.
  uint16_t (*device_uuid)(int device, char* text, size_t capacity, PycommCudaError* error);
''',
    ),
    (
        "  uint16_t (*nccl_create)(",
        '''  /// Whether NCCL can be loaded from where nccl_create would.
  uint16_t (*nccl_probe)(const char* const* library_paths, size_t library_count, PycommCudaError* error);
  uint16_t (*nccl_create)(''',
    ),
)
sub(
    "csrc/cuda/c_table.cc",
    (
        "uint16_t allocatePinned(",
        '''uint16_t deviceUuid(int device, char* text, size_t capacity, PycommCudaError* error) {
  return guarded(error, [&] {
    const std::string uuid = theRuntime().deviceUuid(device);
    const size_t length = std::min(uuid.size(), capacity - 1);
    std::memcpy(text, uuid.data(), length);
    text[length] = '\\0';
  });
}

uint16_t allocatePinned(''',
    ),
    ("    made.set_device = setDevice;\n", "    made.set_device = setDevice;\n    made.device_uuid = deviceUuid;\n"),
)
sub(
    "csrc/cuda/c_nccl.cc",
    (
        "uint16_t create(const PycommCudaNcclConfig* given",
        '''uint16_t probe(const char* const* library_paths, size_t library_count, PycommCudaError* error) {
  return guarded(error, [&] { static_cast<void>(loadNccl({library_paths, library_paths + library_count})); });
}

uint16_t create(const PycommCudaNcclConfig* given''',
    ),
    ("  table.nccl_create = create;\n", "  table.nccl_probe = probe;\n  table.nccl_create = create;\n"),
)

# ---- c10d
sub(
    "csrc/c10d/cuda_staging.h",
    (
        '''  /// The calling thread's current stream, as CUDA knows it.
''',
        '''  [[nodiscard]] void* sideStream() const; ///< in(), as CUDA knows it
  /// The calling thread's current stream, as CUDA knows it.
''',
    ),
    (
        '''/// The devices of one process group, each made when its first tensor comes. Thread-safe.
class CudaDevices {
 public:
  explicit CudaDevices(std::string library_path) : library_path_(std::move(library_path)) {}

  /// Throws Error(Unsupported) where the CUDA library is not there.
  [[nodiscard]] std::shared_ptr<CudaDevice> at(c10::Device device);

 private:
  const std::string library_path_;
  std::mutex mutex_; ///< guards devices_
  std::map<c10::DeviceIndex, std::shared_ptr<CudaDevice>> devices_;
};
''',
        '''/// What a caller's stream goes on behind: copies to the device, or NCCL's kernels.
class CudaOrder {
 public:
  virtual ~CudaOrder() = default;
  /// The caller's current stream goes on behind it.
  virtual void orderCaller() const = 0;
  /// The side stream that it is on.
  [[nodiscard]] virtual c10::Stream stream() const = 0;
  /// The memory of `tensors` is not used for others before the side stream is through with it, whoever frees it first.
  virtual void keepFor(const std::vector<at::Tensor>& tensors) const = 0;
};

void keepForStream(const std::vector<at::Tensor>& tensors, const c10::Stream& stream);
''',
    ),
    ("class CudaCopies {", "class CudaCopies final : public CudaOrder {"),
    ("  ~CudaCopies();", "  ~CudaCopies() override;"),
    ("  void orderCaller() const;\n", "  void orderCaller() const override;\n  [[nodiscard]] c10::Stream stream() const override {\n    return device_->in();\n  }\n"),
    (
        '''  /// The memory of `tensors` is not used for others before the side stream is through with it, whoever frees it first.
  void keepFor(const std::vector<at::Tensor>& tensors) const;
''',
        "  void keepFor(const std::vector<at::Tensor>& tensors) const override;\n",
    ),
    ("#include <map>\n", ""),
    ("#include <mutex>\n", ""),
)
sub(
    "csrc/c10d/cuda_staging.cc",
    (
        '''std::shared_ptr<CudaDevice> CudaDevices::at(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<CudaDevice>& made = devices_[device.index()];
  if (made == nullptr) {
    made = std::make_shared<CudaDevice>(cudaLibrary(library_path_), device);
  }
  return made;
}
''',
        '''void keepForStream(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.device() == stream.device() && tensor.has_storage()) {
      guardOf(stream.device()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
  }
}
''',
    ),
    (
        "void* CudaDevice::callersStream() const {",
        '''void* CudaDevice::sideStream() const {
  return nativeOf(in_);
}

void* CudaDevice::callersStream() const {''',
    ),
    (
        '''  for (const at::Tensor& tensor : tensors) {
    if (tensor.device() == device_->device() && tensor.has_storage()) {
      guardOf(device_->device()).recordDataPtrOnStream(tensor.storage().data_ptr(), device_->in());
    }
  }
''',
        "  keepForStream(tensors, device_->in());\n",
    ),
)
open("csrc/c10d/cuda_devices.h", "w").write('''#pragma once

#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/cuda_nccl.h"
#include "c10d/cuda_staging.h"
#include "engine/group.h"

namespace pycomm {

/// The devices of one process group, each made when its first tensor comes, and which way its CUDA tensors go. Thread-safe.
class CudaDevices {
 public:
  struct Config {
    std::string library; ///< the path of libpycomm_cuda.so, loaded when the first CUDA tensor comes
    std::vector<std::string> nccl_libraries; ///< where NCCL is looked for
    bool may_use_nccl = false; ///< every rank has a GPU: what they do with it they settle when the first tensor comes
    bool must_use_nccl = false;
  };
  CudaDevices(std::shared_ptr<Group> group, Config config) : group_(std::move(group)), config_(std::move(config)) {}

  /// Throws Error(Unsupported) where the CUDA library is not there.
  [[nodiscard]] std::shared_ptr<CudaDevice> at(c10::Device device);

  /// NCCL, if this group's collectives of CUDA tensors go that way; null: through the host. The first call settles it with the other
  /// ranks, and blocks for them. Throws Error(Unsupported) if it must be NCCL and cannot, and what makes the group fail.
  [[nodiscard]] std::shared_ptr<NcclGroup> ncclAt(c10::Device device, Deadline deadline);

  /// Before the group is closed.
  void stop();

 private:
  const std::shared_ptr<Group> group_;
  const Config config_;
  std::mutex mutex_; ///< guards devices_
  std::map<c10::DeviceIndex, std::shared_ptr<CudaDevice>> devices_;
  std::mutex nccl_mutex_; ///< guards the rest
  bool settled_ = false;
  std::string why_not_;
  std::shared_ptr<NcclGroup> nccl_;
};

} // namespace pycomm
''')
open("csrc/c10d/cuda_devices.cc", "w").write('''#include "c10d/cuda_devices.h"

#include "base/log.h"

namespace pycomm {

std::shared_ptr<CudaDevice> CudaDevices::at(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<CudaDevice>& made = devices_[device.index()];
  if (made == nullptr) {
    made = std::make_shared<CudaDevice>(cudaLibrary(config_.library), device);
  }
  return made;
}

std::shared_ptr<NcclGroup> CudaDevices::ncclAt(c10::Device device, Deadline deadline) {
  if (!config_.may_use_nccl) {
    return nullptr;
  }
  const auto on = at(device);
  on->refuseCapture();
  const std::lock_guard<std::mutex> lock(nccl_mutex_);
  if (!settled_) {
    why_not_ = NcclGroup::whyNot(*group_, *on, config_.nccl_libraries, deadline);
    if (why_not_.empty()) {
      nccl_ = NcclGroup::create(group_, on, config_.nccl_libraries, deadline);
    }
    settled_ = true;
    if (group_->identity().rank == 0) {
      log(LogLevel::Info,
          "group " + group_->identity().name + ": CUDA tensors go " +
              (nccl_ != nullptr ? "by NCCL, " + nccl_->origin() : "through the host: " + why_not_));
    }
  }
  if (nccl_ == nullptr && config_.must_use_nccl) {
    throw Error(
        ErrorCode::Unsupported,
        "cuda_mode=nccl, but NCCL cannot be used: " + why_not_ + ".",
        "give each rank a GPU of its own (torch.cuda.set_device) and install NCCL, or use cuda_mode='tcp'");
  }
  if (nccl_ != nullptr && nccl_->device().device() != device) {
    throw Error(
        ErrorCode::InvalidArgument,
        "This group's NCCL works on " + nccl_->device().device().str() + ", and a tensor is on " + device.str() + ".",
        "use one device a rank and group, or cuda_mode='tcp'");
  }
  return nccl_;
}

void CudaDevices::stop() {
  const std::lock_guard<std::mutex> lock(nccl_mutex_);
  if (nccl_ != nullptr) {
    nccl_->stop();
  }
}

} // namespace pycomm
''')
sub(
    "csrc/c10d/staging.h",
    ('#include "c10d/cuda_staging.h"\n', '#include "c10d/cuda_devices.h"\n#include "c10d/cuda_staging.h"\n'),
    (
        '''/// The engine works in the CPU's memory: of CUDA tensors the views are of pinned memory, and takeCopies() is what moves between the
/// two. All of one call's tensors are on one device.
''',
        '''/// The engine works in the CPU's memory: of CUDA tensors the views are of pinned memory, and takeCopies() is what moves between the
/// two. Where NCCL runs the call the views are of the device's memory. All of one call's tensors are on one device.
''',
    ),
    (
        '''  /// `devices` is used where a tensor is on a CUDA device.
  explicit Staging(std::shared_ptr<CudaDevices> devices = nullptr) : devices_(std::move(devices)) {}
''',
        '''  /// `devices` is used where a tensor is on a CUDA device; NCCL only if the call is one for it.
  Staging(std::shared_ptr<CudaDevices> devices, bool may_use_nccl, Deadline deadline)
      : devices_(std::move(devices)), may_use_nccl_(may_use_nccl), deadline_(deadline) {}
''',
    ),
    (
        '''  /// Copies from temporaries to outputs, once''',
        '''  /// What runs the call; null: the engine.
  [[nodiscard]] std::shared_ptr<NcclGroup> takeNccl() {
    return std::move(nccl_);
  }
  /// Copies from temporaries to outputs, once''',
    ),
    (
        "  std::shared_ptr<CudaCopies> cuda_;\n",
        '''  bool may_use_nccl_;
  Deadline deadline_;
  std::shared_ptr<NcclGroup> nccl_;
  std::shared_ptr<CudaCopies> cuda_;
''',
    ),
)
sub(
    "csrc/c10d/staging.cc",
    (
        '''  if (cuda_ == nullptr) {
''',
        '''  if (may_use_nccl_ && cuda_ == nullptr && nccl_ == nullptr) {
    nccl_ = devices_->ncclAt(device, deadline_);
  }
  if (nccl_ != nullptr) {
    return view;
  }
  if (cuda_ == nullptr) {
''',
    ),
)
sub(
    "csrc/c10d/backend.h",
    (
        '''    std::string cuda_library; ///< the path of libpycomm_cuda.so, loaded when the first CUDA tensor comes
''',
        "    CudaDevices::Config cuda;\n",
    ),
    (
        '''    explicit Prepared(std::shared_ptr<CudaDevices> devices) : staging(std::move(devices)) {}
''',
        '''    /// `deadline`: how long to wait for the other ranks where CUDA tensors have yet to find their way.
    explicit Prepared(std::shared_ptr<CudaDevices> devices, bool may_use_nccl = true, Deadline deadline = Deadline::never())
        : staging(std::move(devices), may_use_nccl, deadline) {}
''',
    ),
    (
        '''  void startBehindCopies(std::vector<Group::Call>& calls, PycommWork::Content& content);
''',
        '''  void startBehindCopies(std::vector<Group::Call>& calls, PycommWork::Content& content);
  /// Has NCCL run the calls.
  void startNccl(NcclGroup& nccl, const std::vector<Group::Call>& calls, PycommWork::Content& content);
''',
    ),
)
sub(
    "csrc/c10d/backend_messages.cc",
    (
        "    Prepared prepared(devices_);\n",
        "    Prepared prepared(devices_, false); // messages have no order that all ranks share, which NCCL needs\n",
    ),
)
sub(
    "csrc/c10d/backend.cc",
    (
        "      devices_(std::make_shared<CudaDevices>(settings_.cuda_library)) {\n",
        "      devices_(std::make_shared<CudaDevices>(group_, settings_.cuda)) {\n",
    ),
    (
        '''  // Here, on a user's thread, and not with the last reference, which the lane may hold.
''',
        '''  // Here, on a user's thread, and not with the last reference, which the lane may hold.
  devices_->stop();
''',
    ),
    (
        '''void PycommBackend::shutdown() {
''',
        '''void PycommBackend::shutdown() {
  devices_->stop();
''',
    ),
    (
        '''  if (content.cuda != nullptr) {
    content.behind.push_back(content.cuda);
''',
        '''  const auto nccl = prepared.staging.takeNccl();
  if (nccl != nullptr) {
    startNccl(*nccl, prepared.calls, content);
  } else if (content.cuda != nullptr) {
    content.behind.push_back(content.cuda);
''',
    ),
    (
        "c10::intrusive_ptr<c10d::Work> PycommBackend::work(Titled titled",
        '''void PycommBackend::startNccl(
    NcclGroup& nccl,
    const std::vector<Group::Call>& calls,
    PycommWork::Content& content) {
  for (const Group::Call& call : calls) {
    content.operations.push_back(group_->follow(call));
  }
  if (group_->failure()) {
    return; // the operations end with it, and wait() raises it, as for every other operation
  }
  content.nccl = nccl.launch(calls, content.operations);
  content.behind.push_back(content.nccl);
  content.nccl->finish(content.unpack);
  content.unpack = nullptr;
}

c10::intrusive_ptr<c10d::Work> PycommBackend::work(Titled titled''',
    ),
)
sub(
    "csrc/c10d/work.h",
    ('#include "c10d/cuda_staging.h"\n', '#include "c10d/cuda_nccl.h"\n#include "c10d/cuda_staging.h"\n'),
    (
        "    std::vector<std::shared_ptr<CudaCopies>> behind; ///< whose copies to the device whoever waits goes on behind\n",
        '''    std::shared_ptr<NcclLaunch> nccl; ///< this work's own, which only orders streams; null where the engine runs it
    std::vector<std::shared_ptr<const CudaOrder>> behind; ///< what whoever waits goes on behind
''',
    ),
    (
        '''blocks until the copies to the device are on their way; the caller's current stream then waits for those.
''',
        '''blocks until the copies to the device are on their way; the caller's current stream then waits for those. Where NCCL runs them it
  /// blocks for nothing.
''',
    ),
)
sub(
    "csrc/c10d/work.cc",
    ("    for (const auto& copies : content.behind) {\n      const c10::Stream stream = copies->device().in();\n", "    for (const auto& each : content.behind) {\n      const c10::Stream stream = each->stream();\n"),
    (
        '''  if (state_->content.cuda != nullptr && !state_->waited) {
    const Content& content = state_->content;
    content.cuda->keepFor(content.outputs);
    content.cuda->keepFor(content.keep_alive);
    for (const auto& list : content.output_lists) {
      content.cuda->keepFor(list);
    }
  }
''',
        '''  const Content& content = state_->content;
  if ((content.cuda != nullptr || content.nccl != nullptr) && !state_->waited) {
    const CudaOrder& order = content.cuda != nullptr ? static_cast<const CudaOrder&>(*content.cuda) : *content.nccl;
    order.keepFor(content.inputs);
    order.keepFor(content.outputs);
    order.keepFor(content.keep_alive);
    for (const auto& list : content.output_lists) {
      order.keepFor(list);
    }
  }
''',
    ),
    (
        '''  for (const auto& operation : state_->content.operations) {
    const auto ended = [&] {
''',
        '''  const bool only_orders = state_->content.nccl != nullptr && !state_->group->failure();
  for (const auto& operation : state_->content.operations) {
    if (only_orders) {
      break;
    }
    const auto ended = [&] {
''',
    ),
    (
        "    for (const auto& copies : state_->content.behind) {\n      raising([&] { copies->orderCaller(); });\n",
        "    for (const auto& each : state_->content.behind) {\n      raising([&] { each->orderCaller(); });\n",
    ),
    (
        '''  state_->finish();
  const auto record = state_->error();
  if (!record) {
''',
        '''  if (!only_orders) {
    state_->finish();
  }
  const auto record = state_->error();
  if (!record) {
''',
    ),
    (
        '''  if (state_->waited) {
    // Who has''',
        '''  if (state_->waited || state_->content.nccl != nullptr) {
    // With NCCL everything is behind events. Who has''',
    ),
)
sub(
    "csrc/bindings/backend.cc",
    ("    settings.cuda_library = options.cuda_library;\n", ""),
    (
        '''    return c10::make_intrusive<PycommBackend>(adapter, Group::join(processEngine(), *adapter, config), settings);
''',
        '''    const std::shared_ptr<Group> group = Group::join(processEngine(), *adapter, config);
    settings.cuda = cudaConfig(options, *group, meeting.deadline);
    return c10::make_intrusive<PycommBackend>(adapter, group, settings);
''',
    ),
    (
        "c10::intrusive_ptr<c10d::Backend> createBackend(",
        '''// Which way CUDA tensors may go is settled by all ranks, also those that will never have one.
CudaDevices::Config cudaConfig(const NativeOptions& options, Group& group, Deadline deadline) {
  CudaDevices::Config config;
  config.library = options.cuda_library;
  config.nccl_libraries = options.nccl_libraries;
  if (options.cuda_mode == "tcp") {
    return config;
  }
  config.must_use_nccl = options.cuda_mode == "nccl";
  const std::vector<std::string> votes = group.identity().size == 1
      ? std::vector<std::string>{options.why_no_nccl}
      : group.exchange("nccl", options.why_no_nccl, deadline);
  const auto no = std::find_if(votes.begin(), votes.end(), [](const std::string& why) { return !why.empty(); });
  config.may_use_nccl = no == votes.end();
  if (config.must_use_nccl && !config.may_use_nccl) {
    throw Error(
        ErrorCode::Unsupported,
        "cuda_mode=nccl, but rank " + std::to_string(no - votes.begin()) + " " + *no + ".",
        "use cuda_mode='auto', which falls back to pinned memory of the host");
  }
  return config;
}

c10::intrusive_ptr<c10d::Backend> createBackend(''',
    ),
    (
        '''        check_call_sites(options["check_call_sites"].cast<bool>()),
''',
        '''        nccl_libraries(options["nccl_libraries"].cast<std::vector<std::string>>()),
        why_no_nccl(options["why_no_nccl"].cast<std::string>()),
        check_call_sites(options["check_call_sites"].cast<bool>()),
''',
    ),
    (
        "  bool check_call_sites;\n",
        '''  std::vector<std::string> nccl_libraries;
  std::string why_no_nccl; ///< empty: this rank may
  bool check_call_sites;
''',
    ),
)

# ---- Python
sub(
    "pycomm/_settings.py",
    (
        '''def _cuda_mode(where: str, value: object) -> str:
    if isinstance(value, str) and value.strip().lower() == "nccl":
        raise ValueError(
            f"{where}={value!r} is not available yet: CUDA tensors go over the network through "
            "pinned memory; use 'auto' or 'tcp'"
        )
    return _one_of("auto", "tcp")(where, value)


''',
        "",
    ),
    (
        'Setting("cuda_mode", _cuda_mode, "auto", "PYCOMM_CUDA_MODE")',
        'Setting("cuda_mode", _one_of("auto", "nccl", "tcp"), "auto", "PYCOMM_CUDA_MODE")',
    ),
)
sub(
    "pycomm/options.py",
    (
        '''            the same engine that serves CPU tensors. "auto", the default, is the same today
            (docs/cuda.md). ``PYCOMM_CUDA_MODE``.
''',
        '''            the same engine that serves CPU tensors; "nccl" hands collectives to NCCL, or is an
            error that says why not; "auto": NCCL where every rank has a GPU of its own and NCCL
            loads, else "tcp" (docs/cuda.md). ``PYCOMM_CUDA_MODE``.
''',
    ),
    (
        '''        return ResolvedOptions(**values, origins=origins)
''',
        '''        if values["cuda_mode"] == "nccl" and not nccl_serves(algorithm, wire_dtype):
            raise ValueError(
                f"{origins['cuda_mode']}='nccl' does not go with algorithm={algorithm!r} and "
                f"wire_dtype={wire_dtype!r}: NCCL knows 'auto', 'ring' and 'direct', and no codecs"
            )
        return ResolvedOptions(**values, origins=origins)
''',
    ),
    (
        "_generated_init = Options.__init__\n",
        '''def nccl_serves(algorithm: str, wire_dtype: str) -> bool:
    """Whether NCCL can do what these settings ask for."""
    return algorithm in ("auto", "ring", "direct") and wire_dtype == "fp32"


_generated_init = Options.__init__
''',
    ),
)
sub(
    "pycomm/_extension.py",
    (
        '''_REBUILD = ''',
        '''NCCL_LIBRARIES = [
    Path(torch.__file__).resolve().parent.parent / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
]
"""Where NCCL is looked for, after the one that this process has loaded and before the system's."""
_REBUILD = ''',
    ),
    (
        '''def load() -> Extension:
''',
        '''def why_no_nccl() -> str:
    """Why CUDA tensors of this process cannot go by NCCL; empty if they may. Loads nothing."""
    if not torch.cuda.is_available():
        return "has no GPU that torch can use"
    if not CUDA_LIBRARY.exists():
        return f"has no {CUDA_LIBRARY.name} beside pycomm's extension"
    return ""


def load() -> Extension:
''',
    ),
)
sub(
    "pycomm/backend.py",
    (
        '''        "cuda_library": str(_extension.CUDA_LIBRARY),
''',
        '''        "cuda_library": str(_extension.CUDA_LIBRARY),
        "nccl_libraries": [str(path) for path in _extension.NCCL_LIBRARIES],
        "why_no_nccl": _extension.why_no_nccl()
        if nccl_serves(resolved.algorithm, resolved.wire_dtype)
        else f"has algorithm={resolved.algorithm!r} and wire_dtype={resolved.wire_dtype!r}",
''',
    ),
    (
        "from pycomm.options import FLIGHT_RECORD_NAME, Options, ResolvedOptions, fault_points\n",
        '''from pycomm.options import (
    FLIGHT_RECORD_NAME,
    Options,
    ResolvedOptions,
    fault_points,
    nccl_serves,
)
''',
    ),
)
sub(
    "tests/python/test_options.py",
    ('    ("cuda_mode", "nccl", "not available yet"),\n', ""),
    ("""    ("cuda_mode", "gpu", "'auto' or 'tcp'"),\n""", """    ("cuda_mode", "gpu", "'auto' or 'nccl' or 'tcp'"),\n"""),
)
