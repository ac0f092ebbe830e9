#pragma once

#include <cstddef>
#include <cstdint>

#include "numeric/elements.h"
#include "numeric/kernels.h"

// One value as an int8 code times a scale, and the summary of a block that its encoder needs: the reference that every
// SIMD path is compared with. Codes: -126 ... 126 are numbers, +-127 the infinities, -128 is NaN.

namespace pycomm::numeric {

inline constexpr uint32_t kInfinityBits = 0x7f800000U;
inline constexpr int32_t kCodeInfinity = 127;
inline constexpr int32_t kCodeNan = -128;
/// 1.5 * 2^23: fp32 numbers around it have a step of 1. Adding it rounds to a whole number, to nearest even, and leaves
/// that number in the low bits of the sum, also if it is negative.
inline constexpr float kRounder = 12582912.0F;
inline constexpr uint32_t kRounderBits = 0x4b400000U;

/// |value / scale| is at most 126, or value is not finite.
[[gnu::always_inline]] inline int32_t quantizeOne(float value, float scale) noexcept {
  const uint32_t bits = bitCast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const auto code = static_cast<int32_t>(bitCast<uint32_t>(value / scale + kRounder) - kRounderBits);
  const int32_t infinite = (bits >> 31) != 0 ? -kCodeInfinity : kCodeInfinity;
  return magnitude > kInfinityBits ? kCodeNan : (magnitude == kInfinityBits ? infinite : code);
}

[[gnu::always_inline]] inline float dequantizeOne(int32_t code, float scale) noexcept {
  const uint32_t sign = code < 0 ? 0x80000000U : 0U;
  const float infinite = bitCast<float>(kInfinityBits | sign);
  const float finite = static_cast<float>(code) * scale;
  const bool big = code == kCodeInfinity || code == -kCodeInfinity;
  return code == kCodeNan ? bitCast<float>(kFloatNan) : (big ? infinite : finite);
}

inline void quantizeScalar(void* dst, const void* src, size_t numel, float scale) {
  for (size_t i = 0; i < numel; ++i) {
    storeAt<Number<int8_t>>(dst, i, static_cast<int8_t>(quantizeOne(loadAt<Number<float>>(src, i), scale)));
  }
}

inline void dequantizeScalar(void* dst, const void* src, size_t numel, float scale) {
  for (size_t i = 0; i < numel; ++i) {
    storeAt<Number<float>>(dst, i, dequantizeOne(loadAt<Number<int8_t>>(src, i), scale));
  }
}

inline BlockSummary summarizeScalar(const void* src, size_t numel) {
  BlockSummary summary;
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t magnitude = loadAt<Number<uint32_t>>(src, i) & 0x7fffffffU;
    const bool finite = magnitude < kInfinityBits;
    summary.max_bits = finite && magnitude > summary.max_bits ? magnitude : summary.max_bits;
    summary.special = summary.special || !finite;
  }
  return summary;
}

} // namespace pycomm::numeric
