#include "cuda/cudart_runtime.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "cuda/dispatch.h"

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

template <class Grad, class Wire>
__global__ void __launch_bounds__(kBlockThreads) packKernel(const __grid_constant__ BucketArgs args) {
  Packer<Grad, Wire> packer{args.factor};
  const uint64_t tiles = tileCount(args.numel);
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    packTile(args, tile, threadIdx.x, blockDim.x, packer);
  }
  if (args.stats == nullptr) {
    return;
  }
  const uint32_t overflows = __reduce_add_sync(0xffffffffU, packer.overflows);
  const uint32_t max_abs_bits = __reduce_max_sync(0xffffffffU, packer.max_abs_bits);
  if (threadIdx.x % warpSize == 0) {
    if (overflows != 0) {
      atomicAdd(&args.stats->overflows, static_cast<unsigned long long>(overflows));
    }
    atomicMax(&args.stats->max_abs_bits, max_abs_bits);
  }
}

template <class Grad, class Wire>
__global__ void __launch_bounds__(kBlockThreads) unpackKernel(const __grid_constant__ BucketArgs args) {
  const uint64_t tiles = tileCount(args.numel);
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    unpackTile<Grad, Wire>(args, tile, threadIdx.x, blockDim.x);
  }
}

template <class Element, class Op>
__global__ void __launch_bounds__(kBlockThreads) reduceKernel(const __grid_constant__ ReduceArgs args) {
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  reduceShare<Element, Op>(args, thread, static_cast<uint64_t>(gridDim.x) * blockDim.x);
}

constexpr unsigned kWarp = 32;

__global__ void __launch_bounds__(kBlockThreads) encodeKernel(const __grid_constant__ CodecArgs args) {
  const uint64_t blocks = blocksOfPart(args.numel) * args.parts;
  const unsigned lane = threadIdx.x % kWarp;
  uint32_t overflows = 0;
  for (uint64_t block = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp; block < blocks;
       block += static_cast<uint64_t>(gridDim.x) * blockDim.x / kWarp) {
    const CodecBlock at = blockAt(args, block);
    const float* const values = args.values + at.value;
    BlockSummary summary = summarizeShare(values, at.count, lane, kWarp);
    summary.max_bits = __reduce_max_sync(0xffffffffU, summary.max_bits);
    summary.special = __reduce_or_sync(0xffffffffU, summary.special);
    overflows += encodeShare(args.codec, args.encoded + at.byte, values, at.count, summary, lane, kWarp);
  }
  overflows = __reduce_add_sync(0xffffffffU, overflows);
  if (lane == 0 && overflows != 0 && args.overflows != nullptr) {
    atomicAdd(args.overflows, static_cast<unsigned long long>(overflows));
  }
}

__global__ void __launch_bounds__(kBlockThreads) decodeKernel(const __grid_constant__ CodecArgs args) {
  const uint64_t blocks = blocksOfPart(args.numel) * args.parts;
  const unsigned lane = threadIdx.x % kWarp;
  for (uint64_t block = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp; block < blocks;
       block += static_cast<uint64_t>(gridDim.x) * blockDim.x / kWarp) {
    const CodecBlock at = blockAt(args, block);
    decodeShare(args.codec, args.values + at.value, args.encoded + at.byte, at.count, lane, kWarp);
  }
}

/// Enough blocks to fill any device of today, and never more than there is work for; kernels loop over the rest.
unsigned blocksFor(uint64_t work) {
  constexpr uint64_t kMost = 4096;
  return static_cast<unsigned>(std::clamp<uint64_t>(work, 1, kMost));
}

class CudartRuntime final : public DeviceRuntime {
 public:
  int deviceCount() override {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
  }
  void setDevice(int device) override {
    check(cudaSetDevice(device), "cudaSetDevice");
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
    void* ptr = nullptr;
    check(cudaHostAlloc(&ptr, std::max<size_t>(nbytes, 1), cudaHostAllocPortable), "cudaHostAlloc");
    return ptr;
  }
  void freePinned(void* ptr) noexcept override {
    static_cast<void>(cudaFreeHost(ptr));
  }
  void* allocateDevice(size_t nbytes) override {
    void* ptr = nullptr;
    check(cudaMalloc(&ptr, std::max<size_t>(nbytes, 1)), "cudaMalloc");
    return ptr;
  }
  void freeDevice(void* ptr) noexcept override {
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
  bool eventDone(Event event) override {
    const cudaError_t result = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (result == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(result, "cudaEventQuery");
    return true;
  }
  void waitEvent(Event event) override {
    check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
  }
  bool isCapturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(native(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  void pack(DType grad, DType wire, const BucketArgs& args, Stream stream) override {
    withCast(grad, wire, [&](auto pair) {
      using Pair = decltype(pair);
      packKernel<typename Pair::GradElement, typename Pair::WireElement>
          <<<blocksFor(tileCount(args.numel)), kBlockThreads, 0, native(stream)>>>(args);
    });
    check(cudaGetLastError(), "the launch of the pack kernel");
  }
  void unpack(DType grad, DType wire, const BucketArgs& args, Stream stream) override {
    withCast(grad, wire, [&](auto pair) {
      using Pair = decltype(pair);
      unpackKernel<typename Pair::GradElement, typename Pair::WireElement>
          <<<blocksFor(tileCount(args.numel)), kBlockThreads, 0, native(stream)>>>(args);
    });
    check(cudaGetLastError(), "the launch of the unpack kernel");
  }
  void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Stream stream) override {
    const uint64_t work = std::max(args.vectors, args.numel - args.vectors * (16 / elementSize(dtype)));
    withFold(dtype, op, [&](auto fold) {
      using Chosen = decltype(fold);
      reduceKernel<typename Chosen::ElementType, typename Chosen::OpType>
          <<<blocksFor((work + kBlockThreads - 1) / kBlockThreads), kBlockThreads, 0, native(stream)>>>(args);
    });
    check(cudaGetLastError(), "the launch of the reduce kernel");
  }
  void encode(const CodecArgs& args, Stream stream) override {
    encodeKernel<<<codecBlocks(args), kBlockThreads, 0, native(stream)>>>(args);
    check(cudaGetLastError(), "the launch of the encode kernel");
  }
  void decode(const CodecArgs& args, Stream stream) override {
    decodeKernel<<<codecBlocks(args), kBlockThreads, 0, native(stream)>>>(args);
    check(cudaGetLastError(), "the launch of the decode kernel");
  }

 private:
  static unsigned codecBlocks(const CodecArgs& args) {
    return blocksFor((blocksOfPart(args.numel) * args.parts * kWarp + kBlockThreads - 1) / kBlockThreads);
  }
  static cudaStream_t native(Stream stream) {
    return static_cast<cudaStream_t>(stream);
  }
};

} // namespace

std::unique_ptr<DeviceRuntime> makeCudartRuntime() {
  return std::make_unique<CudartRuntime>();
}

} // namespace pycomm::cuda
