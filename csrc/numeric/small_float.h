#pragma once

#include <cstdint>
#include <cstring>

// Converts one element of fp16, bf16 or fp8 to fp32 and back: the reference that every SIMD path is compared with.
// Written as selections between 32-bit numbers, without tables or loops, so that vectors can take the same steps.
//
// NaN rule of the numeric layer: a NaN result is always the constant below; sign and payload are not carried. x86 and
// Arm keep different operands' payloads in an addition, and compilers may swap the operands. With this rule all
// processors agree, for one compare and one blend per vector.

namespace pycomm::numeric {

inline constexpr uint32_t kFloatNan = 0x7fc00000;
inline constexpr uint64_t kDoubleNan = 0x7ff8000000000000;
inline constexpr uint16_t kHalfNan = 0x7e00;
inline constexpr uint16_t kBfloat16Nan = 0x7fc0;
inline constexpr uint8_t kFloat8Nan = 0x7f; // both formats; e4m3fn has no other except for the sign

template <class To, class From>
[[gnu::always_inline]] inline To bitCast(From from) noexcept {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

[[gnu::always_inline]] inline float canonical(float value) noexcept {
  return value == value ? value : bitCast<float>(kFloatNan);
}

[[gnu::always_inline]] inline double canonical(double value) noexcept {
  return value == value ? value : bitCast<double>(kDoubleNan);
}

/// A binary format with ExpBits exponent and ManBits mantissa bits, bias 2^(ExpBits-1) - 1. Without infinity (e4m3fn)
/// the top exponent holds ordinary numbers, except the all-ones pattern, which is NaN.
template <class Bits, int ExpBits, int ManBits, bool HasInfinity, uint32_t Nan>
struct SmallFloat {
  static constexpr bool kHasInfinity = HasInfinity;
  static constexpr int kBias = (1 << (ExpBits - 1)) - 1;
  static constexpr int kShift = 23 - ManBits; // mantissa bits of fp32 beyond this format's
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - kBias) << 23; // as fp32 bits
  static constexpr uint32_t kStep = static_cast<uint32_t>(151 - kBias - ManBits) << 23; // c below, as fp32 bits
  static constexpr uint32_t kHalfStep = (1U << (kShift - 1)) - 1U; // just less than half, in bits that are cut off
  static constexpr uint32_t kSignBit = 1U << (ExpBits + ManBits);
  static constexpr uint32_t kInfinity = ((1U << ExpBits) - 1U) << ManBits;
  static constexpr uint32_t kMaxFinite = HasInfinity ? kInfinity - 1 : Nan - 1;
  static constexpr uint32_t kOverflow = HasInfinity ? kInfinity : Nan;

  /// Subnormals come from one fp32 addition that shifts the mantissa. The format's smallest step is
  /// 2^(1 - bias - ManBits), and fp32 numbers in [c, 2c), c = 2^(24 - bias - ManBits), have just that step. So |x| + c
  /// rounds |x| to a multiple of it, to nearest even, and leaves the multiple in the low mantissa bits. Example, e4m3
  /// (step 2^-9): 1.5 * 2^-9 + 2^14 = 2^14 + 2 * 2^-9, a tie that went to the even 2. `decode` does the reverse.
  [[gnu::always_inline]] static Bits encode(float value) noexcept {
    const uint32_t bits = bitCast<uint32_t>(value);
    const uint32_t sign = (bits >> (31 - ExpBits - ManBits)) & kSignBit;
    const uint32_t magnitude = bits & 0x7fffffffU;
    const uint32_t low = bitCast<uint32_t>(bitCast<float>(magnitude) + bitCast<float>(kStep)) - kStep;
    const uint32_t even = (magnitude >> kShift) & 1U;
    const uint32_t high = (magnitude - kRebias + kHalfStep + even) >> kShift;
    const uint32_t finite = magnitude < kMinNormal ? low : high;
    const uint32_t rounded = (finite > kMaxFinite ? kOverflow : finite) | sign;
    const bool nan = magnitude > 0x7f800000U || (!HasInfinity && finite > kMaxFinite);
    return static_cast<Bits>(nan ? Nan : rounded);
  }

  [[gnu::always_inline]] static float decode(Bits encoded) noexcept {
    const uint32_t bits = encoded;
    const uint32_t sign = (bits & kSignBit) << (31 - ExpBits - ManBits);
    const uint32_t magnitude = bits & (kSignBit - 1U);
    const uint32_t normal = (magnitude << kShift) + kRebias;
    const float shifted = bitCast<float>((magnitude << kShift) + kMinNormal) - bitCast<float>(kMinNormal);
    const uint32_t subnormal = bitCast<uint32_t>(shifted);
    const uint32_t finite = magnitude < (1U << ManBits) ? subnormal : normal;
    const uint32_t infinite = HasInfinity && magnitude == kInfinity ? 0x7f800000U : finite;
    const bool nan = HasInfinity ? magnitude > kInfinity : magnitude == Nan;
    return bitCast<float>(nan ? kFloatNan : infinite | sign);
  }
};

using HalfFormat = SmallFloat<uint16_t, 5, 10, true, kHalfNan>;
using E4m3Format = SmallFloat<uint8_t, 4, 3, false, kFloat8Nan>;
using E5m2Format = SmallFloat<uint8_t, 5, 2, true, kFloat8Nan>;

/// The upper half of an fp32: its subnormals are fp32's own, so nothing is rebiased and no float arithmetic is needed.
struct Bfloat16Format {
  [[gnu::always_inline]] static uint16_t encode(float value) noexcept {
    const uint32_t bits = bitCast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? kBfloat16Nan : rounded);
  }

  [[gnu::always_inline]] static float decode(uint16_t encoded) noexcept {
    const uint32_t bits = static_cast<uint32_t>(encoded) << 16;
    return bitCast<float>((bits & 0x7fffffffU) > 0x7f800000U ? kFloatNan : bits);
  }
};

} // namespace pycomm::numeric
