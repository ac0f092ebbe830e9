// No #pragma once: part of simd_kernels.h. int8_code.h on all lanes at once.

#include <cstddef>
#include <cstdint>

#include "numeric/int8_code.h"

namespace pycomm::numeric {
namespace {

/// Reads and writes int8 codes; the scale is applied in fp32.
struct QuantizeLanes {
  PYCOMM_LANES void store(std::byte* to, F32 value, float scale) {
    const U32 bits = reinterpret_cast<U32>(value);
    const U32 magnitude = bits & 0x7fffffffU;
    const U32 code = reinterpret_cast<U32>(value / scale + kRounder) - kRounderBits;
    const U32 infinite = asSigned(bits) < 0 ? U32{} + static_cast<uint32_t>(-kCodeInfinity)
                                            : U32{} + static_cast<uint32_t>(kCodeInfinity);
    const U32 number = magnitude == kInfinityBits ? infinite : code;
    const U32 chosen = asSigned(magnitude) > asSigned(kInfinityBits) ? U32{} + static_cast<uint32_t>(kCodeNan) : number;
    storeLow8(to, chosen & 0xffU);
  }

  PYCOMM_LANES F32 load(const std::byte* from, float scale) {
    const I32 code = asSigned((loadLow8(from) ^ 0x80U) - 0x80U);
    const U32 finite = reinterpret_cast<U32>(__builtin_convertvector(code, F32) * scale);
    const U32 infinite = (reinterpret_cast<U32>(code) & 0x80000000U) | kInfinityBits;
    const U32 number = code == kCodeInfinity || code == -kCodeInfinity ? infinite : finite;
    return reinterpret_cast<F32>(code == kCodeNan ? U32{} + kFloatNan : number);
  }
};

constexpr size_t kLanes = sizeof(F32) / sizeof(float);

PYCOMM_SIMD_TARGET void quantizeVectors(void* dst, const void* src, size_t numel, float scale) {
  auto* out = static_cast<std::byte*>(dst);
  const auto* in = static_cast<const std::byte*>(src);
  for (; numel >= kLanes; numel -= kLanes) {
    QuantizeLanes::store(out, loadVector<F32>(in), scale);
    out += kLanes;
    in += sizeof(F32);
  }
  quantizeScalar(out, in, numel, scale);
}

PYCOMM_SIMD_TARGET void dequantizeVectors(void* dst, const void* src, size_t numel, float scale) {
  auto* out = static_cast<std::byte*>(dst);
  const auto* in = static_cast<const std::byte*>(src);
  for (; numel >= kLanes; numel -= kLanes) {
    storeVector(out, QuantizeLanes::load(in, scale));
    out += sizeof(F32);
    in += kLanes;
  }
  dequantizeScalar(out, in, numel, scale);
}

// Four vectors at a time: in a single chain, each maximum would wait for the one before it.
PYCOMM_SIMD_TARGET BlockSummary summarizeVectors(const void* src, size_t numel) {
  const auto* in = static_cast<const std::byte*>(src);
  I32 largest[4] = {};
  I32 special = {};
  for (; numel >= 4 * kLanes; numel -= 4 * kLanes) {
    for (I32& max : largest) {
      const I32 magnitude = asSigned(loadVector<U32>(in) & 0x7fffffffU);
      const I32 beyond = magnitude >= asSigned(kInfinityBits);
      const I32 finite = magnitude & ~beyond;
      special |= beyond;
      max = finite > max ? finite : max;
      in += sizeof(U32);
    }
  }
  BlockSummary summary = summarizeScalar(in, numel);
  for (const I32& max : largest) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const auto bits = static_cast<uint32_t>(max[lane]);
      summary.max_bits = bits > summary.max_bits ? bits : summary.max_bits;
    }
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    summary.special = summary.special || special[lane] != 0;
  }
  return summary;
}

} // namespace
} // namespace pycomm::numeric
