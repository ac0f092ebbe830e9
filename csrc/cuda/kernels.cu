// The kernels: what bucket_kernel.h, reduce_kernel.h and codec_kernel.h say of one thread, for all threads of a launch.
#include "cuda/kernels.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/bucket_kernel.h"
#include "cuda/codec_kernel.h"
#include "cuda/dispatch.h"
#include "cuda/reduce_kernel.h"

namespace pycomm::cuda {
namespace {

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
  const uint32_t non_finite = __reduce_or_sync(0xffffffffU, packer.non_finite);
  if (threadIdx.x % warpSize == 0) {
    if (overflows != 0) {
      atomicAdd(&args.stats->overflows, static_cast<unsigned long long>(overflows));
    }
    if (non_finite != 0) {
      atomicOr(&args.stats->non_finite, non_finite);
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

__global__ void __launch_bounds__(kBlockThreads) exponentKernel(const __grid_constant__ ExponentArgs args) {
  writeExponentShare(args, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
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

unsigned codecBlocks(const CodecArgs& args) {
  return blocksFor((blocksOfPart(args.numel) * args.parts * kWarp + kBlockThreads - 1) / kBlockThreads);
}

cudaStream_t native(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

} // namespace

bool launchPack(DType grad, DType wire, const BucketArgs& args, void* stream) {
  return withCast(grad, wire, [&](auto pair) {
    using Pair = decltype(pair);
    packKernel<typename Pair::GradElement, typename Pair::WireElement>
        <<<blocksFor(tileCount(args.numel)), kBlockThreads, 0, native(stream)>>>(args);
  });
}

bool launchUnpack(DType grad, DType wire, const BucketArgs& args, void* stream) {
  return withCast(grad, wire, [&](auto pair) {
    using Pair = decltype(pair);
    unpackKernel<typename Pair::GradElement, typename Pair::WireElement>
        <<<blocksFor(tileCount(args.numel)), kBlockThreads, 0, native(stream)>>>(args);
  });
}

void launchExponent(const ExponentArgs& args, void* stream) {
  const unsigned blocks = blocksFor((args.numel + kBlockThreads - 1) / kBlockThreads);
  exponentKernel<<<blocks, kBlockThreads, 0, native(stream)>>>(args);
}

bool launchReduce(DType dtype, ReduceOp op, const ReduceArgs& args, void* stream) {
  return withFold(dtype, op, [&](auto fold) {
    using Chosen = decltype(fold);
    constexpr size_t kElement = sizeof(typename Chosen::ElementType::Stored);
    ReduceArgs split = args;
    splitForVectors(split, kElement);
    const uint64_t work = std::max(split.vectors, split.numel - split.vectors * (16 / kElement));
    reduceKernel<typename Chosen::ElementType, typename Chosen::OpType>
        <<<blocksFor((work + kBlockThreads - 1) / kBlockThreads), kBlockThreads, 0, native(stream)>>>(split);
  });
}

void launchEncode(const CodecArgs& args, void* stream) {
  encodeKernel<<<codecBlocks(args), kBlockThreads, 0, native(stream)>>>(args);
}

void launchDecode(const CodecArgs& args, void* stream) {
  decodeKernel<<<codecBlocks(args), kBlockThreads, 0, native(stream)>>>(args);
}

bool deviceRunsKernels() {
  cudaFuncAttributes attributes;
  const cudaError_t result = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&decodeKernel));
  static_cast<void>(cudaGetLastError());
  return result != cudaErrorNoKernelImageForDevice && result != cudaErrorInvalidDeviceFunction &&
      result != cudaErrorUnsupportedPtxVersion;
}

} // namespace pycomm::cuda
