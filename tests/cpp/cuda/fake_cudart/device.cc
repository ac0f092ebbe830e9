#include "fake_cudart/device.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "fake_cudart/memory.h"
#include "fake_cudart/streams.h"
#include "host_device.h"

struct FakeEvent {
  std::shared_ptr<std::atomic<bool>> reached; ///< null: never recorded
  int device = 0;
};

namespace fake_cuda {
namespace {

using pycomm::cuda::BucketArgs;
using pycomm::cuda::CodecArgs;
using pycomm::cuda::ReduceArgs;

struct Capture {
  std::thread::id thread;
  uint64_t stream;
  cudaStreamCaptureMode mode;
  bool broken = false;
};

/// Memory that was given back.
struct Grave {
  void* ptr;
  std::vector<std::shared_ptr<std::atomic<bool>>> until; ///< reached by the streams that may still use it
  std::chrono::steady_clock::time_point next;
  int times = 0;
};

struct State {
  State() : streams(seed) {}
  static uint64_t chooseSeed() {
    const char* const given = std::getenv("FAKE_CUDA_SEED");
    const uint64_t chosen = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    std::fprintf(stderr, "fake CUDA: FAKE_CUDA_SEED=%llu\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }
  const uint64_t seed = chooseSeed();
  Streams streams;
  std::atomic<bool> stuck{false};
  std::atomic<int> copies_left{-1}; ///< of the stream that copies next; -1: any number
  std::atomic<uint64_t> copying{0}; ///< that stream
  std::atomic<int> synchronizing{0}; ///< threads that wait for the device
  std::atomic<int> queries{0};
  std::atomic<int> launches{0};
  std::atomic<long> copied{0};
  std::atomic<int> capability{8};
  std::atomic<int> next_stream{0x800};

  std::mutex mutex; ///< guards the rest
  std::set<int> contexts;
  std::vector<Capture> captures;
  std::string uuid = "process " + std::to_string(getpid()); ///< each rank has a GPU of its own
  struct Allocation {
    uint64_t stream;
    std::map<uint64_t, std::shared_ptr<std::atomic<bool>>> uses; ///< streams that must be through first
  };
  std::map<void*, Allocation> torchs; ///< of allocate()
  std::set<std::pair<const void*, uint64_t>> used_on; ///< what recordUse() was given
  std::vector<Grave> graves;
  bool buries = false;
};

// Never destroyed: its thread runs until the process ends.
State& state() {
  static auto* const made = new State();
  return *made;
}

thread_local int t_device = 0;
thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t t_last = cudaSuccess;
thread_local bool t_in_callback = false;
thread_local bool t_waits = false; ///< this thread is one of `synchronizing`
thread_local std::string t_words; ///< about the last IllegalAddress

cudaError_t failed(cudaError_t error) {
  t_last = error;
  return error;
}

uint64_t keyOf(cudaStream_t stream) {
  const auto handle = reinterpret_cast<uint64_t>(stream);
  return handle == 0 ? 0x1000 * (1 + static_cast<uint64_t>(t_device)) : handle;
}

int deviceOf(uint64_t key) {
  return static_cast<int>(key / 0x1000) - 1;
}

/// Whether CUDA forbids an unsafe call here, now; the captures that forbid it are broken then.
bool capturesForbid() {
  if (t_mode == cudaStreamCaptureModeRelaxed) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(state().mutex);
  bool forbidden = false;
  for (Capture& each : state().captures) {
    const bool own = each.thread == std::this_thread::get_id() && each.mode != cudaStreamCaptureModeRelaxed;
    if (own || (t_mode == cudaStreamCaptureModeGlobal && each.mode == cudaStreamCaptureModeGlobal)) {
      each.broken = true;
      forbidden = true;
    }
  }
  return forbidden;
}

/// Writes nonsense over what was given back, again and again for some milliseconds, as its next owner might.
void bury() {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto& graves = state().graves;
  for (size_t i = 0; i < graves.size();) {
    Grave& grave = graves[i];
    const bool free =
        std::all_of(grave.until.begin(), grave.until.end(), [](const auto& flag) { return flag->load(); });
    if (free && now >= grave.next) {
      grave.next = now + std::chrono::milliseconds(2);
      Memory::the().poison(grave.ptr);
      if (++grave.times == 6) {
        Memory::the().forget(grave.ptr);
        std::swap(grave, graves.back());
        graves.pop_back();
        continue;
      }
    }
    ++i;
  }
}

enum class Call { Safe, Unsafe };

cudaError_t enter(Call call, bool needs_context = true) {
  if (t_in_callback) {
    std::fprintf(stderr, "fake CUDA: a stream's callback has called CUDA\n");
    return failed(cudaErrorNotPermitted);
  }
  if (state().streams.broken) {
    return failed(cudaErrorLaunchFailure);
  }
  if (call == Call::Unsafe && capturesForbid()) {
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  if (needs_context) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().contexts.insert(t_device);
  }
  return cudaSuccess;
}

/// While it lives, this thread waits for the device.
class Waits {
 public:
  Waits() {
    ++state().synchronizing;
    t_waits = true;
  }
  ~Waits() {
    t_waits = false;
    --state().synchronizing;
  }
};

cudaError_t refused(const char* what, const IllegalAddress& why) {
  t_words = std::string(what) + ": " + why.what();
  std::fprintf(stderr, "fake CUDA: %s\n", t_words.c_str());
  return failed(cudaErrorIllegalAddress);
}

/// Puts a kernel onto its stream, if that is of the current device and all addresses are.
template <class Resolve>
void launch(const char* name, pycomm::cuda::Stream stream, const Resolve& resolve) {
  if (enter(Call::Safe) != cudaSuccess) {
    return;
  }
  const uint64_t key = keyOf(static_cast<cudaStream_t>(stream));
  if (deviceOf(key) != t_device) {
    failed(cudaErrorInvalidResourceHandle);
    return;
  }
  try {
    std::function<void()> kernel = resolve();
    ++state().launches;
    state().streams.put(
        key,
        [kernel = std::move(kernel)](bool broken) {
          if (!broken) {
            kernel();
          }
          return true;
        },
        true);
    if (stream == nullptr) { // tests without streams of their own read at once
      const Waits waits;
      state().streams.synchronize(key);
    }
  } catch (const IllegalAddress& why) {
    refused(name, why);
  }
}

template <class Pointer>
Pointer resolved(Pointer ptr, size_t nbytes) {
  return ptr == nullptr || nbytes == 0 ? ptr : reinterpret_cast<Pointer>(Memory::the().inKernel(ptr, nbytes, true));
}

pycomm::cuda::testing::HostDevice& processor() {
  static auto* const made = new pycomm::cuda::testing::HostDevice();
  return *made;
}

BucketArgs resolved(BucketArgs args, size_t grad, size_t wire) {
  args.bucket = resolved(args.bucket, args.numel * wire);
  args.stats = resolved(args.stats, sizeof(*args.stats));
  uint64_t begin = 0;
  for (uint32_t i = 0; i < args.count; ++i) {
    args.segments[i].ptr = resolved(args.segments[i].ptr, (args.segments[i].end - begin) * grad);
    begin = args.segments[i].end;
  }
  return args;
}

CodecArgs resolved(CodecArgs args) {
  const size_t numel = args.numel * args.parts;
  args.values = resolved(args.values, numel * sizeof(float));
  args.encoded = resolved(
      args.encoded,
      static_cast<size_t>(pycomm::encodedNbytes(args.codec, static_cast<int64_t>(args.numel))) * args.parts);
  args.overflows = resolved(args.overflows, sizeof(*args.overflows));
  return args;
}

} // namespace

cudaStream_t streamOf(int device, int64_t number) {
  return number == 0 ? nullptr : reinterpret_cast<cudaStream_t>(0x1000 * (1 + device) + number);
}

void put(cudaStream_t stream, Task task) {
  state().streams.put(keyOf(stream), std::move(task), false);
}

void* allocate(size_t nbytes, cudaStream_t stream) {
  void* const ptr = Memory::the().allocate(nbytes, t_device);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().torchs.emplace(ptr, State::Allocation{keyOf(stream), {}});
  return ptr;
}

void recordUse(const void* ptr, cudaStream_t stream) {
  void* const begin = Memory::the().beginOf(ptr);
  const uint64_t key = keyOf(stream);
  const std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().torchs.find(begin);
  if (found != state().torchs.end() && key != found->second.stream) {
    found->second.uses[key] = nullptr;
    state().used_on.emplace(begin, key);
  }
}

bool wasUsedOn(const void* ptr, cudaStream_t stream) {
  const uint64_t key = keyOf(stream);
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().used_on.count({ptr, key}) != 0;
}

void giveBack(void* ptr) {
  State::Allocation allocation;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().torchs.find(ptr);
    allocation = std::move(found->second);
    state().torchs.erase(found);
  }
  Memory::the().release(ptr);
  allocation.uses[allocation.stream] = nullptr;
  Grave grave{ptr, {}, {}};
  for (const auto& [stream, none] : allocation.uses) {
    grave.until.push_back(std::make_shared<std::atomic<bool>>(false));
    state().streams.put(
        stream,
        [flag = grave.until.back()](bool) {
          *flag = true;
          return true;
        },
        false);
  }
  bool first = false;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    state().graves.push_back(std::move(grave));
    first = !std::exchange(state().buries, true);
  }
  if (first) {
    constexpr uint64_t kGraveyard = 0x10; // no stream's
    state().streams.put(
        kGraveyard,
        [](bool) {
          bury();
          return false;
        },
        false);
  }
}

void hold(cudaStream_t stream) {
  state().stuck = true;
  put(stream, [](bool broken) { return broken || !state().stuck; });
}

void holdCopies(int count) {
  state().stuck = true;
  state().copying = 0;
  state().copies_left = count;
}

void letGo() {
  state().copies_left = -1;
  state().stuck = false;
}

void breakDown() {
  state().streams.broken = true;
}

void mend() {
  state().streams.broken = false;
}

void beginCapture(cudaStreamCaptureMode mode) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().captures.push_back({std::this_thread::get_id(), 0, mode});
}

bool endCapture() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (auto each = state().captures.begin(); each != state().captures.end(); ++each) {
    if (each->thread == std::this_thread::get_id()) {
      const bool whole = !each->broken;
      state().captures.erase(each);
      return whole;
    }
  }
  return false;
}

void setCapability(int major) {
  state().capability = major;
}

void setUuid(const std::string& text) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().uuid = text;
}

bool hasContext(int device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().contexts.count(device) != 0;
}

int launches() {
  return state().launches;
}

long copiedNbytes() {
  return state().copied;
}

int queries() {
  return state().queries;
}

uint64_t seed() {
  return state().seed;
}

uint32_t draw(uint32_t limit) {
  return state().streams.draw(limit);
}

char* kernelBytes(const void* ptr, size_t nbytes) {
  static char nothing = 0;
  if (nbytes == 0) {
    return &nothing;
  }
  try {
    return reinterpret_cast<char*>(Memory::the().inKernel(ptr, nbytes, false));
  } catch (const IllegalAddress& why) {
    refused("a collective", why);
    return nullptr;
  }
}

} // namespace fake_cuda

using namespace fake_cuda; // NOLINT: what follows are CUDA's functions

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return enter(Call::Safe, false);
}
cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return enter(Call::Safe, false);
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) {
    return failed(cudaErrorInvalidDevice);
  }
  if (t_in_callback) {
    return enter(Call::Safe, false);
  }
  const int before = std::exchange(t_device, device);
  const cudaError_t entered = enter(Call::Safe); // which makes its context, since CUDA 12
  if (entered != cudaSuccess) {
    t_device = before;
  }
  return entered;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  std::memset(properties, 0, sizeof(*properties));
  // 16 bytes of a longer text: all of it counts.
  const size_t hash = std::hash<std::string>()(state().uuid + "/" + std::to_string(device));
  std::memcpy(properties->uuid.bytes, &hash, sizeof(hash));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? state().capability.load() : 5;
  return enter(Call::Safe, false);
}
cudaError_t cudaHostAlloc(void** ptr, size_t nbytes, unsigned) {
  if (const cudaError_t error = enter(Call::Unsafe); error != cudaSuccess) {
    return error;
  }
  *ptr = Memory::the().allocatePinned(nbytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* ptr) {
  if (const cudaError_t error = enter(Call::Unsafe); error != cudaSuccess) {
    return error;
  }
  return Memory::the().freePinned(ptr) ? cudaSuccess : failed(cudaErrorInvalidValue);
}
cudaError_t cudaMalloc(void** ptr, size_t nbytes) {
  if (const cudaError_t error = enter(Call::Unsafe); error != cudaSuccess) {
    return error;
  }
  *ptr = Memory::the().allocate(nbytes, t_device);
  return cudaSuccess;
}
cudaError_t cudaFree(void* ptr) {
  if (const cudaError_t error = enter(Call::Unsafe); error != cudaSuccess) {
    return error;
  }
  try {
    Memory::the().release(ptr);
  } catch (const IllegalAddress& why) {
    return refused("cudaFree", why);
  }
  const Waits waits;
  state().streams.synchronizeAll();
  Memory::the().poison(ptr);
  Memory::the().forget(ptr);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  if (const cudaError_t error = enter(Call::Safe); error != cudaSuccess) {
    return error;
  }
  const uint64_t key = keyOf(stream);
  State& all = state();
  uint64_t none = 0;
  if (all.copies_left >= 0 && (all.copying.compare_exchange_strong(none, key) || none == key) &&
      all.copies_left.fetch_sub(1) == 0) {
    put(stream, [](bool broken) { return broken || !state().stuck; });
  }
  try {
    if (nbytes == 0) {
      return cudaSuccess;
    }
    std::byte* const to = Memory::the().inKernel(dst, nbytes, true);
    const std::byte* const from = Memory::the().inKernel(src, nbytes, true);
    all.copied += static_cast<long>(nbytes);
    all.streams.put(
        key,
        [=](bool broken) {
          if (!broken) {
            std::memmove(to, from, nbytes);
          }
          return true;
        },
        true);
    return cudaSuccess;
  } catch (const IllegalAddress& why) {
    return refused("cudaMemcpyAsync", why);
  }
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const cudaError_t error = enter(Call::Safe); error != cudaSuccess) {
    return error;
  }
  *event = new FakeEvent{nullptr, t_device};
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return enter(Call::Safe, false);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t error = enter(Call::Safe); error != cudaSuccess) {
    return error;
  }
  if (deviceOf(keyOf(stream)) != event->device) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const auto reached = std::make_shared<std::atomic<bool>>(false);
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    event->reached = reached;
  }
  put(stream, [reached](bool) {
    *reached = true;
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const cudaError_t error = enter(Call::Safe); error != cudaSuccess) {
    return error;
  }
  std::shared_ptr<std::atomic<bool>> reached;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    reached = event->reached;
  }
  if (reached != nullptr) {
    put(stream, [reached](bool broken) { return broken || *reached; });
  }
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ++state().queries;
  while (state().synchronizing > (t_waits ? 1 : 0)) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (const cudaError_t error = enter(Call::Unsafe); error != cudaSuccess) {
    return error;
  }
  const std::lock_guard<std::mutex> lock(state().mutex);
  return event->reached == nullptr || *event->reached ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t error = enter(Call::Unsafe); error != cudaSuccess) {
    return error;
  }
  std::shared_ptr<std::atomic<bool>> reached;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    reached = event->reached;
  }
  const Waits waits;
  while (reached != nullptr && !*reached && !state().streams.broken) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return enter(Call::Safe);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (const cudaError_t error = enter(Call::Safe); error != cudaSuccess) {
    return error;
  }
  *stream = streamOf(t_device, state().next_stream++);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return enter(Call::Safe, false);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = enter(Call::Unsafe); error != cudaSuccess) {
    return error;
  }
  const Waits waits;
  state().streams.synchronize(keyOf(stream));
  return enter(Call::Safe);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *status = cudaStreamCaptureStatusNone;
  for (const Capture& each : state().captures) {
    if (each.thread == std::this_thread::get_id()) {
      *status = cudaStreamCaptureStatusActive;
    }
  }
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* user, unsigned) {
  if (const cudaError_t error = enter(Call::Safe); error != cudaSuccess) {
    return error;
  }
  put(stream, [=](bool broken) {
    t_in_callback = true;
    callback(stream, broken ? cudaErrorLaunchFailure : cudaSuccess, user);
    t_in_callback = false;
    return true;
  });
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, t_mode);
  return enter(Call::Safe);
}
cudaError_t cudaGetLastError() {
  return std::exchange(t_last, cudaSuccess);
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotPermitted:
      return "cudaErrorNotPermitted";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
  }
  return "?";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? t_words.c_str() : "of the fake device";
}

// What kernels.cu is on a GPU.
namespace pycomm::cuda {

bool launchPack(DType grad, DType wire, const BucketArgs& args, void* stream) {
  return withCast(grad, wire, [&](auto) {
    launch("pack", stream, [&] {
      auto on_host = std::make_shared<BucketArgs>(resolved(args, elementSize(grad), elementSize(wire)));
      return [=] { static_cast<void>(processor().pack(grad, wire, *on_host, nullptr)); };
    });
  });
}
bool launchUnpack(DType grad, DType wire, const BucketArgs& args, void* stream) {
  return withCast(grad, wire, [&](auto) {
    launch("unpack", stream, [&] {
      auto on_host = std::make_shared<BucketArgs>(resolved(args, elementSize(grad), elementSize(wire)));
      return [=] { static_cast<void>(processor().unpack(grad, wire, *on_host, nullptr)); };
    });
  });
}
void launchExponent(const ExponentArgs& args, void* stream) {
  launch("exponent", stream, [&] {
    ExponentArgs on_host = args;
    on_host.stats = resolved(args.stats, sizeof(*args.stats));
    on_host.tail = resolved(args.tail, args.numel * sizeof(*args.tail));
    return [=] { processor().writeExponent(on_host, nullptr); };
  });
}
bool launchReduce(DType dtype, ReduceOp op, const ReduceArgs& args, void* stream) {
  return withFold(dtype, op, [&](auto) {
    launch("reduce", stream, [&] {
      auto on_host = std::make_shared<ReduceArgs>(args);
      on_host->dst = resolved(args.dst, args.numel * elementSize(dtype));
      for (uint32_t i = 0; i < args.count; ++i) {
        on_host->sources[i] = resolved(args.sources[i], args.numel * elementSize(dtype));
      }
      return [=] { processor().reduce(dtype, op, *on_host, nullptr); };
    });
  });
}
void launchEncode(const CodecArgs& args, void* stream) {
  launch("encode", stream, [&] { return [on_host = resolved(args)] { processor().encode(on_host, nullptr); }; });
}
void launchDecode(const CodecArgs& args, void* stream) {
  launch("decode", stream, [&] { return [on_host = resolved(args)] { processor().decode(on_host, nullptr); }; });
}
bool deviceRunsKernels() {
  return state().capability >= 8;
}

} // namespace pycomm::cuda
