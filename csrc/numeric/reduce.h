#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycomm {

/// Elementwise dst[i] = op(a[i], b[i]) for numel elements.
///
/// `a` is the operand of the lower rank, `b` of the higher. Each operation is commutative to the bit, so only the
/// grouping of a fold can change its rounding. `dst` may be `a` or `b` itself, else it does not overlap them.
///
/// fp16, bf16 and fp8 are computed in fp32 and rounded once (to nearest even). Avg and PremulSum reduce like Sum;
/// `scale` and `divide` apply their factors. Integers wrap around. A bool is true if its byte is not zero; its Sum is
/// "any" and its Product "all", as in torch. A NaN result is the positive quiet NaN without payload (0x7fc00000 in
/// fp32, 0x7f in both fp8), independent of the operands' NaNs. Min and Max return NaN if either operand is NaN, and
/// order -0 below +0. A complex product is the plain formula, without C's repair of infinities.
///
/// Throws Error(Unsupported) if whyUnsupported(op, dtype) gives a reason, Error(InvalidArgument) for None. Otherwise
/// pure, and independent of the thread's rounding and flush-to-zero settings; any thread; any alignment. SIMD is picked
/// at run time and gives the same bits as the scalar reference (reduceScalar).
void reduce(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, size_t numel);

/// The reference that every SIMD path is compared with.
void reduceScalar(DType dtype, ReduceOp op, void* dst, const void* a, const void* b, size_t numel);

/// dst[i] = op over k of sources[k][i], folded from k = 0 up (rank order) in the accumulation type (fp32 for the small
/// floats, else the dtype itself), with one rounding at the end. For Avg the sum is divided by `divisor` before that
/// rounding; for other ops `divisor` must be 1. `dst` may be one of the sources. source_count >= 1; one source is
/// copied (divided for Avg, NaNs made canonical, bools 0 or 1). Throws like `reduce`, and Error(InvalidArgument) for
/// bad counts.
void reduceMany(
    DType dtype,
    ReduceOp op,
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    int64_t divisor = 1);

/// scale: dst[i] = src[i] * factor, for PremulSum's inputs. divide: dst[i] = src[i] / divisor, for Avg's results, with
/// divisor >= 1. In fp32 for the small floats and in the dtype itself otherwise (fp32 takes the factor as float;
/// complex numbers by their parts); NaN as in `reduce`. dst may be src. Integers and bool: Error(Unsupported).
void scale(DType dtype, void* dst, const void* src, size_t numel, double factor);
void divide(DType dtype, void* dst, const void* src, size_t numel, int64_t divisor);

} // namespace pycomm
