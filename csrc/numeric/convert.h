#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace pycomm {

/// dst[i] = src[i] * factor, rounded to nearest even; one pass that scales and casts. The product is an fp32 number, so
/// with a power of two as `factor`, as in the wire codecs, there is one rounding (except in fp32's own subnormals).
///
/// from/to: any pair of Float32, Float16, BFloat16, Float8E4M3, Float8E5M2 (also equal ones); otherwise Unsupported.
/// Overflow: to infinity for fp16, bf16 and e5m2. e4m3fn has no infinity, so a value that would round beyond 448 (more
/// than 464, as in torch) becomes NaN. NaN becomes the positive quiet NaN without payload. Subnormals are kept even if
/// the thread flushes to zero. Any thread, any alignment; dst and src do not overlap unless they are equal and the
/// element sizes are equal too. SIMD paths give the same bits as convertScalar.
void convert(DType to, void* dst, DType from, const void* src, size_t numel, float factor = 1.0F);
void convertScalar(DType to, void* dst, DType from, const void* src, size_t numel, float factor = 1.0F);

/// How large some fp32 numbers are.
struct Magnitude {
  uint32_t max_bits = 0; ///< of the largest finite magnitude; without their sign, bits order like magnitudes
  bool non_finite = false; ///< one of them is infinite or NaN
};

/// Encoders choose scales by it. Any thread, any alignment.
[[nodiscard]] Magnitude magnitudeOf(const float* values, size_t numel) noexcept;

} // namespace pycomm
