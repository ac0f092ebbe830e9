#include "cuda/cudart_runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>

#include "base/error.h"
#include "cuda/kernels.h"

namespace pycomm::cuda {
namespace {

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) {
    return;
  }
  // An error of the call, and not of a kernel before it, would otherwise be reported again by the next check.
  static_cast<void>(cudaGetLastError());
  ErrorRecord record;
  record.code = result == cudaErrorMemoryAllocation ? ErrorCode::OutOfMemory : ErrorCode::SystemError;
  record.summary = std::string("CUDA: ") + call + " failed.";
  record.cause = std::string(cudaGetErrorName(result)) + " (" + cudaGetErrorString(result) + ")";
  record.hint = result == cudaErrorMemoryAllocation
      ? "use a smaller batch or fewer buckets; torch.cuda.empty_cache() returns what torch keeps"
      : "CUDA_LAUNCH_BLOCKING=1 shows which call broke the device; nvidia-smi shows whether it is there";
  throw Error(record);
}

/// While it lives, this thread may allocate and free although another one captures a graph in global mode, the default of
/// torch.cuda.graph(): CUDA would refuse the call and break the capture. None of these calls is about a captured stream.
class WhileOthersCapture {
 public:
  WhileOthersCapture() {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  ~WhileOthersCapture() {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  WhileOthersCapture(const WhileOthersCapture&) = delete;
  WhileOthersCapture& operator=(const WhileOthersCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Notice {
  Reached reached;
  void* context;
};

void CUDART_CB onReached(cudaStream_t /*stream*/, cudaError_t status, void* user) {
  const std::unique_ptr<Notice> notice(static_cast<Notice*>(user));
  notice->reached(notice->context, status == cudaSuccess ? nullptr : cudaGetErrorName(status));
}

class CudartRuntime final : public DeviceRuntime {
 public:
  void setDevice(int device) override {
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  void checkDevice() override {
    const WhileOthersCapture relaxed;
    if (deviceRunsKernels()) {
      return;
    }
    int device = 0;
    int major = 0;
    int minor = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    throw Error(
        ErrorCode::Unsupported,
        "cuda:" + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
            std::to_string(minor) + ", and pycomm's CUDA library was built without code for it.",
        "build it on this machine with CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=native (8.0 or later), or use tensor.cpu()");
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
  void* allocatePinned(size_t nbytes) override {
    const WhileOthersCapture relaxed;
    void* ptr = nullptr;
    check(cudaHostAlloc(&ptr, std::max<size_t>(nbytes, 1), cudaHostAllocPortable), "cudaHostAlloc");
    return ptr;
  }
  void freePinned(void* ptr) noexcept override {
    const WhileOthersCapture relaxed;
    static_cast<void>(cudaFreeHost(ptr));
  }
  void* allocateDevice(size_t nbytes) override {
    const WhileOthersCapture relaxed;
    void* ptr = nullptr;
    check(cudaMalloc(&ptr, std::max<size_t>(nbytes, 1)), "cudaMalloc");
    return ptr;
  }
  void freeDevice(void* ptr) noexcept override {
    const WhileOthersCapture relaxed;
    static_cast<void>(cudaFree(ptr));
  }
  void copy(void* dst, const void* src, size_t nbytes, Stream stream) override {
    check(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
  }
  Event createEvent() override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  void destroyEvent(Event event) noexcept override {
    static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
  }
  void record(Event event, Stream stream) override {
    check(cudaEventRecord(static_cast<cudaEvent_t>(event), native(stream)), "cudaEventRecord");
  }
  void streamWait(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event), 0), "cudaStreamWaitEvent");
  }
  Stream createStream() override {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
  }
  void destroyStream(Stream stream) noexcept override {
    static_cast<void>(cudaStreamDestroy(native(stream)));
  }
  void whenReached(Stream stream, Reached reached, void* context) override {
    auto notice = std::make_unique<Notice>(Notice{reached, context});
    // Unlike cudaLaunchHostFunc() it is also called if the device breaks.
    check(cudaStreamAddCallback(native(stream), &onReached, notice.get(), 0), "cudaStreamAddCallback");
    static_cast<void>(notice.release()); // onReached's now
  }
  bool isCapturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  void pack(DType grad, DType wire, const BucketArgs& args, Stream stream) override {
    launchPack(grad, wire, args, stream);
    check(cudaGetLastError(), "the launch of the pack kernel");
  }
  void unpack(DType grad, DType wire, const BucketArgs& args, Stream stream) override {
    launchUnpack(grad, wire, args, stream);
    check(cudaGetLastError(), "the launch of the unpack kernel");
  }
  void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Stream stream) override {
    launchReduce(dtype, op, args, stream);
    check(cudaGetLastError(), "the launch of the reduce kernel");
  }
  void encode(const CodecArgs& args, Stream stream) override {
    launchEncode(args, stream);
    check(cudaGetLastError(), "the launch of the encode kernel");
  }
  void decode(const CodecArgs& args, Stream stream) override {
    launchDecode(args, stream);
    check(cudaGetLastError(), "the launch of the decode kernel");
  }

 private:
  static cudaStream_t native(Stream stream) {
    return static_cast<cudaStream_t>(stream);
  }
};

} // namespace

std::unique_ptr<DeviceRuntime> makeCudartRuntime() {
  return std::make_unique<CudartRuntime>();
}

} // namespace pycomm::cuda
