// A libpycomm_cuda.so whose CUDA is tests/cpp/cuda/fake_cudart, and the part of torch's device interface that a CUDA build brings: so
// that everything between torch's collectives and CUDA's runtime is run, with several ranks, where there is no GPU.
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstring>
#include <new>

#include "fake_cudart/device.h"
#include "fake_cudart/memory.h"

namespace {

thread_local c10::StreamId current_stream[fake_cuda::kDevices] = {};

cudaStream_t native(const c10::Stream& stream) {
  return fake_cuda::streamOf(stream.device_index(), stream.id());
}

/// With the habits of c10/cuda/CUDAFunctions.cpp: a device that nothing has used yet is remembered and not set, as setting it takes
/// some hundred MiB of its memory.
struct FakeGuard final : public c10::impl::DeviceGuardImplInterface {
  static inline thread_local int remembered = -1;

  c10::DeviceType type() const override {
    return c10::DeviceType::CUDA;
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device from = getDevice();
    if (remembered >= 0 || from != to) {
      setDevice(to);
    }
    return from;
  }
  c10::Device getDevice() const override {
    int device = remembered;
    if (device < 0) {
      cudaGetDevice(&device);
    }
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
  }
  void setDevice(c10::Device to) const override {
    remembered = -1;
    TORCH_CHECK(cudaSetDevice(to.index()) == cudaSuccess, "CUDA error: the device is broken");
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (fake_cuda::hasContext(to.index())) {
      remembered = -1;
      cudaSetDevice(to.index());
    } else {
      remembered = to.index();
    }
  }
  c10::Stream getStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::UNSAFE, of, current_stream[of.index()]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, of, next++);
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return getStreamFromGlobalPool(of, false);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    if (out_of_memory) {
      throw std::bad_alloc();
    }
    const c10::Stream from = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return from;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return native(stream);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const c10::DeviceGuard guard(stream.device());
    if (*event == nullptr) {
      cudaEvent_t made = nullptr;
      cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
      *event = made;
    }
    TORCH_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(*event), native(stream)) == cudaSuccess);
  }
  void block(void* event, const c10::Stream& stream) const override {
    const c10::DeviceGuard guard(stream.device());
    TORCH_CHECK(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event), 0) == cudaSuccess);
  }
  bool queryEvent(void* event) const override {
    return cudaEventQuery(static_cast<cudaEvent_t>(event)) == cudaSuccess;
  }
  void synchronizeEvent(void* event) const override {
    cudaEventSynchronize(static_cast<cudaEvent_t>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return fake_cuda::kDevices;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    ++kept;
    const c10::DeviceGuard guard(stream.device());
    fake_cuda::recordUse(data.get(), native(stream));
  }
  static inline std::atomic<int> kept{0};
  static inline std::atomic<bool> out_of_memory{false};
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

c10::Device device(int index) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)};
}

} // namespace

cudaStream_t fakeCurrentStream(c10::Device on) {
  return native(FakeGuard().getStream(on));
}

void finishFakeStream(c10::Device on) {
  const c10::DeviceGuard guard(on);
  cudaStreamSynchronize(fakeCurrentStream(on));
}

c10::Device fakeCurrentDevice() {
  return FakeGuard().getDevice();
}

extern "C" {
#define FAKE_EXPORT __attribute__((visibility("default")))

/// Until the calling thread's current stream has done all it was given.
FAKE_EXPORT void fake_synchronize(int index) {
  finishFakeStream(device(index));
}
/// Memory of a device, for ever.
FAKE_EXPORT void* fake_allocate(int index, size_t nbytes) {
  const c10::DeviceGuard guard(device(index));
  void* ptr = nullptr;
  cudaMalloc(&ptr, nbytes);
  return ptr;
}
/// From or to memory of the host, now: whatever the streams are doing.
FAKE_EXPORT int fake_read(void* host, const void* ptr, size_t nbytes) {
  const char* const bytes = fake_cuda::kernelBytes(ptr, nbytes);
  return bytes == nullptr ? 1 : (std::memcpy(host, bytes, nbytes), 0);
}
FAKE_EXPORT int fake_write(void* ptr, const void* host, size_t nbytes) {
  char* const bytes = fake_cuda::kernelBytes(ptr, nbytes);
  return bytes == nullptr ? 1 : (std::memcpy(bytes, host, nbytes), 0);
}
/// The calling thread's current stream does nothing more until fake_let_go(), as behind a kernel that does not end.
FAKE_EXPORT void fake_hold(int index) {
  const c10::DeviceGuard guard(device(index));
  fake_cuda::hold(fakeCurrentStream(device(index)));
}
/// The stream that copies next does so many copies, and no more until fake_let_go().
FAKE_EXPORT void fake_hold_copies(int count) {
  fake_cuda::holdCopies(count);
}
FAKE_EXPORT void fake_let_go(void) {
  fake_cuda::letGo();
}
/// From here on the calling thread's streams are captured, in global mode.
FAKE_EXPORT void fake_begin_capture(void) {
  fake_cuda::beginCapture(cudaStreamCaptureModeGlobal);
}
/// 1: the graph is whole; 0: a call that must not be made meanwhile has broken it.
FAKE_EXPORT int fake_end_capture(void) {
  return fake_cuda::endCapture() ? 1 : 0;
}
/// Every call of CUDA's fails from here on.
FAKE_EXPORT void fake_break_down(void) {
  fake_cuda::breakDown();
}
/// They work again. Copies that were queued meanwhile never ran.
FAKE_EXPORT void fake_mend(void) {
  fake_cuda::mend();
}
/// 1: the host has no memory left when another stream is made the current one, until 0.
FAKE_EXPORT void fake_run_out_of_memory(int out) {
  FakeGuard::out_of_memory = out != 0;
}
/// The devices' compute capability is this, point 5.
FAKE_EXPORT void fake_set_capability(int major) {
  fake_cuda::setCapability(major);
}
/// Which GPU this process says it has.
FAKE_EXPORT void fake_set_uuid(const char* text) {
  fake_cuda::setUuid(text);
}
/// Kernels of the CUDA library that have run, and are about to.
FAKE_EXPORT int fake_launches(void) {
  return fake_cuda::launches();
}
/// Bytes of all copies that were put onto streams.
FAKE_EXPORT long fake_copied(void) {
  return fake_cuda::copiedNbytes();
}
/// How often an event was asked whether it has been reached.
FAKE_EXPORT int fake_queries(void) {
  return fake_cuda::queries();
}
/// Whether anything has used this device.
FAKE_EXPORT int fake_has_context(int index) {
  return fake_cuda::hasContext(index) ? 1 : 0;
}
/// The calling thread's device, as torch and as CUDA have it.
FAKE_EXPORT int fake_current_device(void) {
  return fakeCurrentDevice().index();
}
/// Whether the memory that begins here, which may have been freed since, was ever marked as used by this stream of torch's.
FAKE_EXPORT int fake_was_kept(const void* ptr, int64_t stream) {
  return fake_cuda::wasUsedOn(ptr, fake_cuda::streamOf(0, stream)) ? 1 : 0;
}
/// How often memory was marked as used by a side stream.
FAKE_EXPORT int fake_kept(void) {
  return FakeGuard::kept;
}
}
