// The table of libpycomm_cuda.so (device/cuda_table.h): each function is one call of CUDA's runtime, which is linked statically.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "cuda/dispatch.h"
#include "cuda/kernels.h"
#include "device/cuda_table.h"

namespace pycomm::cuda {
namespace {

static_assert(kCudaOutOfMemory == cudaErrorMemoryAllocation, "CUDA's number");

int answer(cudaError_t result) {
  if (result != cudaSuccess) {
    // An error of the call, and not of a kernel before it, would otherwise be reported again by the next check.
    static_cast<void>(cudaGetLastError());
  }
  return static_cast<int>(result);
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

cudaStream_t native(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

const char* errorName(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}

const char* errorText(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int setDevice(int device) {
  return answer(cudaSetDevice(device));
}

int checkDevice(int* has_code, int* device, int* major, int* minor) {
  const WhileOthersCapture relaxed;
  *has_code = deviceRunsKernels() ? 1 : 0;
  cudaError_t result = *has_code != 0 ? cudaSuccess : cudaGetDevice(device);
  if (*has_code == 0 && result == cudaSuccess) {
    result = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, *device);
  }
  if (*has_code == 0 && result == cudaSuccess) {
    result = cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, *device);
  }
  return answer(result);
}

int deviceUuid(int device, unsigned char* uuid) {
  cudaDeviceProp properties;
  const cudaError_t result = cudaGetDeviceProperties(&properties, device);
  if (result == cudaSuccess) {
    std::memcpy(uuid, properties.uuid.bytes, sizeof(properties.uuid.bytes));
  }
  return answer(result);
}

int allocatePinned(size_t nbytes, void** ptr) {
  const WhileOthersCapture relaxed;
  return answer(cudaHostAlloc(ptr, std::max<size_t>(nbytes, 1), cudaHostAllocPortable));
}

void freePinned(void* ptr) {
  const WhileOthersCapture relaxed;
  static_cast<void>(cudaFreeHost(ptr));
}

int allocateDevice(size_t nbytes, void** ptr) {
  const WhileOthersCapture relaxed;
  return answer(cudaMalloc(ptr, std::max<size_t>(nbytes, 1)));
}

void freeDevice(void* ptr) {
  const WhileOthersCapture relaxed;
  static_cast<void>(cudaFree(ptr));
}

int copy(void* dst, const void* src, size_t nbytes, void* stream) {
  return answer(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, native(stream)));
}

int createEvent(void** event) {
  cudaEvent_t made = nullptr;
  const cudaError_t result = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
  *event = made;
  return answer(result);
}

void destroyEvent(void* event) {
  static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
}

int record(void* event, void* stream) {
  return answer(cudaEventRecord(static_cast<cudaEvent_t>(event), native(stream)));
}

int streamWait(void* stream, void* event) {
  return answer(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event), 0));
}

int createStream(void** stream) {
  cudaStream_t made = nullptr;
  const cudaError_t result = cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
  *stream = made;
  return answer(result);
}

void destroyStream(void* stream) {
  static_cast<void>(cudaStreamDestroy(native(stream)));
}

struct Notice {
  void (*reached)(void* context, const char* failure);
  void* context;
};

void CUDART_CB onReached(cudaStream_t /*stream*/, cudaError_t status, void* user) {
  const Notice notice = *static_cast<Notice*>(user);
  delete static_cast<Notice*>(user);
  notice.reached(notice.context, status == cudaSuccess ? nullptr : cudaGetErrorName(status));
}

int whenReached(void* stream, void (*reached)(void* context, const char* failure), void* context) {
  auto* const notice = new (std::nothrow) Notice{reached, context};
  if (notice == nullptr) {
    return kCudaNoHostMemory;
  }
  // Unlike cudaLaunchHostFunc() it is also called if the device breaks.
  const cudaError_t result = cudaStreamAddCallback(native(stream), &onReached, notice, 0);
  if (result != cudaSuccess) {
    delete notice;
  }
  return answer(result);
}

int isCapturing(void* stream, int* capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(native(stream), &status);
  *capturing = status != cudaStreamCaptureStatusNone ? 1 : 0;
  return answer(result);
}

int launched(bool exists) {
  return exists ? static_cast<int>(cudaGetLastError()) : kCudaNoKernel;
}

int hasReduce(DType dtype, ReduceOp op) {
  return hasReduceKernel(dtype, op) ? 1 : 0;
}

int pack(DType grad, DType wire, const BucketArgs* args, void* stream) {
  return launched(launchPack(grad, wire, *args, stream));
}

int unpack(DType grad, DType wire, const BucketArgs* args, void* stream) {
  return launched(launchUnpack(grad, wire, *args, stream));
}

int writeExponent(const ExponentArgs* args, void* stream) {
  launchExponent(*args, stream);
  return launched(true);
}

int reduce(DType dtype, ReduceOp op, const ReduceArgs* args, void* stream) {
  return launched(launchReduce(dtype, op, *args, stream));
}

bool hasCodec(Codec codec) {
  switch (codec) {
    case Codec::BFloat16:
    case Codec::Float16:
    case Codec::Int8:
      return true;
    case Codec::None:
      break;
  }
  return false;
}

int encode(const CodecArgs* args, void* stream) {
  if (!hasCodec(args->codec)) {
    return kCudaNoKernel;
  }
  launchEncode(*args, stream);
  return launched(true);
}

int decode(const CodecArgs* args, void* stream) {
  if (!hasCodec(args->codec)) {
    return kCudaNoKernel;
  }
  launchDecode(*args, stream);
  return launched(true);
}

CudaTable makeTable() {
  CudaTable table = {};
  table.version = kPycommCudaVersion;
  table.nbytes = sizeof(CudaTable);
  table.error_name = errorName;
  table.error_text = errorText;
  table.set_device = setDevice;
  table.check_device = checkDevice;
  table.device_uuid = deviceUuid;
  table.allocate_pinned = allocatePinned;
  table.free_pinned = freePinned;
  table.allocate_device = allocateDevice;
  table.free_device = freeDevice;
  table.copy = copy;
  table.create_event = createEvent;
  table.destroy_event = destroyEvent;
  table.record = record;
  table.stream_wait = streamWait;
  table.create_stream = createStream;
  table.destroy_stream = destroyStream;
  table.when_reached = whenReached;
  table.is_capturing = isCapturing;
  table.has_reduce = hasReduce;
  table.pack = pack;
  table.unpack = unpack;
  table.write_exponent = writeExponent;
  table.reduce = reduce;
  table.encode = encode;
  table.decode = decode;
  return table;
}

} // namespace
} // namespace pycomm::cuda

const pycomm::cuda::CudaTable* pycomm_cuda_table() {
  static const pycomm::cuda::CudaTable table = pycomm::cuda::makeTable();
  return &table;
}
