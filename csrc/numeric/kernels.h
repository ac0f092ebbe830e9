#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"

// What an instruction set offers: loops over elements, found by dtype and op. The public functions validate, set up the
// floating-point environment and call one of these.

namespace pycomm::numeric {

using ReduceKernel = void (*)(void* dst, const void* a, const void* b, size_t numel);

/// `divisor` is applied to the accumulator when it is not 1; only float kernels look at it.
using ReduceManyKernel =
    void (*)(void* dst, const void* const* sources, size_t source_count, size_t numel, double divisor);

using ScaleKernel = void (*)(void* dst, const void* src, size_t numel, double factor);
using ConvertKernel = void (*)(void* dst, const void* src, size_t numel, float factor);

/// What an encoder must know of a block of fp32 values before it begins.
struct BlockSummary {
  uint32_t max_bits = 0; ///< bits of the largest finite magnitude
  bool special = false; ///< there is a NaN or an infinity
};
using SummarizeKernel = BlockSummary (*)(const void* src, size_t numel);

/// Each may return nullptr: this instruction set has nothing better than the scalar loop, or, from the scalar set, the
/// combination is undefined. `op` is never Avg or PremulSum, which add like Sum, and `dtype` is complex only for
/// Product: the rest treats a complex number as two reals.
struct KernelSet {
  ReduceKernel (*reduce)(DType dtype, ReduceOp op);
  ReduceManyKernel (*reduceMany)(DType dtype, ReduceOp op);
  ScaleKernel (*scale)(DType dtype);
  ScaleKernel (*divide)(DType dtype);
  ConvertKernel (*convert)(DType to, DType from);
  SummarizeKernel summarize; ///< these three are in every set; fp32 and int8 codes
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

/// The set for simdLevel().
[[nodiscard]] const KernelSet& activeKernels() noexcept;

} // namespace pycomm::numeric
