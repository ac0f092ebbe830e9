#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace pycomm {

/// dst[i] = src[i] * factor, rounded once to nearest even; one pass that scales and casts. `factor` is a power of two in
/// the wire codecs, so it rounds nothing by itself.
///
/// from/to: any pair of Float32, Float16, BFloat16, Float8E4M3, Float8E5M2 (also equal ones); otherwise Unsupported.
/// Overflow: to Infinity for fp16, bf16 and e5m2; e4m3fn has none, so values beyond 448 become NaN as in torch.
/// NaN stays NaN. Subnormals are kept. Any thread, any alignment; dst and src do not overlap unless they are equal and the
/// element sizes are equal too. SIMD paths give the same bits as convertScalar.
void convert(DType to, void* dst, DType from, const void* src, size_t numel, float factor = 1.0F);
void convertScalar(DType to, void* dst, DType from, const void* src, size_t numel, float factor = 1.0F);

// Single values, for tests and tails.
[[nodiscard]] float halfToFloat(uint16_t bits) noexcept;
[[nodiscard]] uint16_t floatToHalf(float value) noexcept;
[[nodiscard]] float bfloat16ToFloat(uint16_t bits) noexcept;
[[nodiscard]] uint16_t floatToBfloat16(float value) noexcept;
[[nodiscard]] float e4m3ToFloat(uint8_t bits) noexcept;
[[nodiscard]] uint8_t floatToE4m3(float value) noexcept;
[[nodiscard]] float e5m2ToFloat(uint8_t bits) noexcept;
[[nodiscard]] uint8_t floatToE5m2(float value) noexcept;

} // namespace pycomm
