#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"

// The kernels of one instruction set: loops over elements, found by dtype and op. The public functions validate, set up
// the floating-point environment and call one of these.

namespace pycomm::numeric {

using ReduceKernel = void (*)(void* dst, const void* a, const void* b, size_t numel);

/// The accumulator is divided by `divisor` if that is not 1; only float kernels use it.
using ReduceManyKernel =
    void (*)(void* dst, const void* const* sources, size_t source_count, size_t numel, double divisor);

using ScaleKernel = void (*)(void* dst, const void* src, size_t numel, double factor);
using ConvertKernel = void (*)(void* dst, const void* src, size_t numel, float factor);

/// The summary of a block of fp32 values that an encoder needs before it begins.
struct BlockSummary {
  uint32_t max_bits = 0; ///< bits of the largest finite magnitude
  bool special = false; ///< the block has a NaN or an infinity
};
using SummarizeKernel = BlockSummary (*)(const void* src, size_t numel);

/// Each find function may return nullptr. From a SIMD set this means that the set has nothing better than the scalar
/// loop; from the scalar set, that the combination is undefined. `op` is never Avg or PremulSum, which add like Sum.
/// `dtype` is complex only for Product: for other ops a complex number is two reals.
struct KernelSet {
  ReduceKernel (*reduce)(DType dtype, ReduceOp op);
  ReduceManyKernel (*reduceMany)(DType dtype, ReduceOp op);
  ScaleKernel (*scale)(DType dtype);
  ScaleKernel (*divide)(DType dtype);
  ConvertKernel (*convert)(DType to, DType from);
  SummarizeKernel summarize; ///< fp32 and int8 codes; every set has these three
  ConvertKernel quantize; ///< code = src / factor
  ConvertKernel dequantize; ///< dst = code * factor
};

extern const KernelSet kScalarKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
#elif defined(__aarch64__)
extern const KernelSet kNeonKernels;
#endif

/// The kernels for simdLevel() (simd_level.cc).
[[nodiscard]] const KernelSet& activeKernels() noexcept;

} // namespace pycomm::numeric
