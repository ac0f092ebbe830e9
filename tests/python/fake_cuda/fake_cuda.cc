// A libpycomm_cuda.so whose device is host memory, and the part of torch's device interface that a CUDA build brings: so
// that everything between torch's collectives and the CUDA library is run, with several ranks, where there is no GPU.
// Kernels of torch's own are not imitated: tests use contiguous tensors and read their memory.
#define PYCOMM_CUDA_LIBRARY

#include <unistd.h>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "async_device.h"
#include "cuda/c_api.h"
#include "cuda/c_table.h"

namespace {

using pycomm::DType;
using pycomm::ReduceOp;
using pycomm::cuda::BucketArgs;
using pycomm::cuda::CodecArgs;
using pycomm::cuda::ReduceArgs;
using pycomm::cuda::testing::AsyncDevice;

constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};
thread_local bool capturing = false;
std::atomic<int> kernels{0};
std::atomic<long> copied{0};
std::atomic<bool> stuck{false};
std::atomic<int> copies_before_stuck{-1}; // of the stream that copies next; -1: any number
std::atomic<pycomm::cuda::Stream> stuck_stream{nullptr};
std::string uuid = "process " + std::to_string(getpid()); // each rank has a GPU of its own unless a test says otherwise

void waitForRelease() {
  while (stuck) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

class FakeDevice final : public AsyncDevice {
 public:
  FakeDevice() : AsyncDevice(std::chrono::milliseconds(2)) {}
  int deviceCount() override {
    return kDevices;
  }
  bool isCapturing(pycomm::cuda::Stream) override {
    return capturing;
  }
};

// Never destroyed: streams' threads run until the process ends.
FakeDevice& device() {
  static auto* const made = new FakeDevice();
  return *made;
}

/// Forwards to the one device, since a table owns its runtime. Kernels run when their stream comes to them; those without a stream,
/// at once.
class Forwarding final : public pycomm::cuda::testing::HostDevice {
 public:
  int deviceCount() override {
    return device().deviceCount();
  }
  void copy(void* dst, const void* src, size_t nbytes, pycomm::cuda::Stream stream) override {
    pycomm::cuda::Stream none = nullptr;
    if (copies_before_stuck >= 0 && (stuck_stream.compare_exchange_strong(none, stream) || none == stream) &&
        copies_before_stuck.fetch_sub(1) == 0) {
      device().run(stream, waitForRelease);
    }
    copied += static_cast<long>(nbytes);
    device().copy(dst, src, nbytes, stream);
  }
  void pack(DType grad, DType wire, const BucketArgs& args, pycomm::cuda::Stream stream) override {
    inOrder(stream, [=] { host().pack(grad, wire, args, nullptr); });
  }
  void unpack(DType grad, DType wire, const BucketArgs& args, pycomm::cuda::Stream stream) override {
    inOrder(stream, [=] { host().unpack(grad, wire, args, nullptr); });
  }
  void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, pycomm::cuda::Stream stream) override {
    inOrder(stream, [=] { host().reduce(dtype, op, args, nullptr); });
  }
  void encode(const CodecArgs& args, pycomm::cuda::Stream stream) override {
    inOrder(stream, [=] { host().encode(args, nullptr); });
  }
  void decode(const CodecArgs& args, pycomm::cuda::Stream stream) override {
    inOrder(stream, [=] { host().decode(args, nullptr); });
  }
  pycomm::cuda::Event createEvent() override {
    return device().createEvent();
  }
  void destroyEvent(pycomm::cuda::Event event) noexcept override {
    device().destroyEvent(event);
  }
  void record(pycomm::cuda::Event event, pycomm::cuda::Stream stream) override {
    device().record(event, stream);
  }
  void streamWait(pycomm::cuda::Stream stream, pycomm::cuda::Event event) override {
    device().streamWait(stream, event);
  }
  bool eventDone(pycomm::cuda::Event event) override {
    return device().eventDone(event);
  }
  void waitEvent(pycomm::cuda::Event event) override {
    device().waitEvent(event);
  }
  bool isCapturing(pycomm::cuda::Stream stream) override {
    return device().isCapturing(stream);
  }
  std::string deviceUuid(int) override {
    return uuid;
  }

 private:
  static pycomm::cuda::testing::HostDevice& host() {
    static pycomm::cuda::testing::HostDevice made;
    return made;
  }
  static void inOrder(pycomm::cuda::Stream stream, std::function<void()> kernel) {
    ++kernels;
    stream == nullptr ? kernel() : device().run(stream, std::move(kernel));
  }
};

void* native(const c10::Stream& stream) {
  return reinterpret_cast<void*>(0x1000 * (1 + stream.device_index()) + stream.id());
}

struct FakeGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::CUDA;
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device from = getDevice();
    current_device = to.index();
    return from;
  }
  c10::Device getDevice() const override {
    return {c10::DeviceType::CUDA, current_device};
  }
  void setDevice(c10::Device to) const override {
    current_device = to.index();
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    current_device = to.index();
  }
  c10::Stream getStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, of, current_stream[of.index()]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, of, next++);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream from = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return from;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return native(stream);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = device().createEvent();
    }
    device().record(*event, native(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    device().streamWait(native(stream), event);
  }
  bool queryEvent(void* event) const override {
    return device().eventDone(event);
  }
  void synchronizeEvent(void* event) const override {
    device().waitEvent(event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    device().destroyEvent(event);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    ++kept;
  }
  static inline std::atomic<int> kept{0};
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

std::unique_ptr<pycomm::cuda::DeviceRuntime> makeFake() {
  return std::make_unique<Forwarding>();
}

} // namespace

const PycommCudaTable* pycomm_cuda_table(void) {
  return pycomm::cuda::makeTable(makeFake);
}

void putOnFakeStream(void* stream, std::function<void()> task) {
  device().run(stream, std::move(task));
}

void finishFakeStream(c10::Device on) {
  device().synchronize(native(FakeGuard().getStream(on)));
}

c10::Device fakeCurrentDevice() {
  return FakeGuard().getDevice();
}

extern "C" {
#define FAKE_EXPORT __attribute__((visibility("default")))

/// Until the calling thread's current stream has done all it was given.
FAKE_EXPORT void fake_synchronize(int index) {
  finishFakeStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)));
}
/// The calling thread's current stream does nothing more until fake_let_go(), as behind a kernel that does not end.
FAKE_EXPORT void fake_hold(int index) {
  const c10::Device on(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  stuck = true;
  device().run(native(FakeGuard().getStream(on)), waitForRelease);
}
/// The stream that copies next does so many copies, and no more until fake_let_go().
FAKE_EXPORT void fake_hold_copies(int count) {
  stuck = true;
  stuck_stream = nullptr;
  copies_before_stuck = count;
}
FAKE_EXPORT void fake_let_go(void) {
  stuck = false;
}
/// From here on the calling thread's streams count as captured.
FAKE_EXPORT void fake_capture(int on) {
  capturing = on != 0;
}
/// Which GPU this process says it has.
FAKE_EXPORT void fake_set_uuid(const char* text) {
  uuid = text;
}
/// Kernels of the CUDA library that have run, and are about to.
FAKE_EXPORT int fake_launches(void) {
  return kernels;
}
/// Bytes of all copies that were put onto streams.
FAKE_EXPORT long fake_copied(void) {
  return copied;
}
/// How often memory was marked as used by a side stream.
FAKE_EXPORT int fake_kept(void) {
  return FakeGuard::kept;
}
}
