#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pycomm {

// The interpreter's arithmetic: plain loops, written independently of numeric/ so that each can reveal the other's
// mistakes. float16 and bfloat16 are computed in float32 and rounded once, to nearest even. Integers wrap. Min and Max
// return NaN if an operand is one. Throws Error(Unsupported) for other dtypes and if whyUnsupported() gives a reason.

/// dst[i] = op over sources[k][i], folded from k = 0 up in the accumulation type, divided by `divisor` unless it is 1,
/// rounded once. dst may be one of the sources.
void foldElements(
    DType dtype,
    ReduceOp op,
    std::byte* dst,
    const std::vector<const std::byte*>& sources,
    size_t numel,
    int64_t divisor);

/// dst[i] = src[i] * factor, in the accumulation type.
void scaleElements(DType dtype, std::byte* dst, const std::byte* src, size_t numel, double factor);

/// dst[i] = src[i] converted, rounding to nearest even. Between floating-point dtypes.
void castElements(DType to, std::byte* dst, DType from, const std::byte* src, size_t numel);

} // namespace pycomm
