#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycomm {

/// Elementwise dst[i] = op(a[i], b[i]) for numel elements.
///
/// `a` is the operand of the lower rank, `b` of the higher: the order decides which NaN payload and which zero
/// survives, so that every rank folds to the same bits. `dst` may be `a` or `b` itself, else it does not overlap them.
/// fp16, bf16 and fp8 are added in fp32 and rounded once (to nearest even). Avg and PremulSum reduce like Sum; their
/// factors are applied by `scale`. Integers wrap around. Min and Max return NaN when either operand is NaN.
/// Throws Error(Unsupported) where whyUnsupported(op, dtype) says so. Pure apart from that; any thread; any alignment.
/// SIMD is picked at run time and gives the same bits as the scalar reference (reduceScalar).
void reduce(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, size_t numel);

/// The reference that every SIMD path is compared with.
void reduceScalar(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, size_t numel);

/// dst[i] = op over k of sources[k][i], folded from k = 0 up (rank order) in the accumulation type (fp32 for the small
/// floats, else the dtype itself), with one rounding at the end. For Avg the sum is divided by `divisor` before that
/// rounding; otherwise `divisor` is 1. `dst` may be one of the sources. source_count >= 1.
void reduceMany(
    DType dtype,
    ReduceOp op,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor = 1);

/// dst[i] = src[i] * factor (PremulSum's inputs) or, where `divisor` != 1, src[i] / divisor (Avg's results), computed
/// in fp32 for the small floats and in the dtype itself otherwise; fp32 takes the factor as float. dst may be src.
void scale(DType dtype, void* dst, const void* src, size_t numel, double factor);
void divide(DType dtype, void* dst, const void* src, size_t numel, int64_t divisor);

} // namespace pycomm
