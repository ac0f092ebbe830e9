// No #pragma once: first part of simd_kernels.h. Reads, combines and writes vectors of each dtype, as elements.h does
// for one element.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numeric/elements.h"

namespace pycomm::numeric {
namespace {

#define PYCOMM_LANES PYCOMM_SIMD_TARGET __attribute__((always_inline)) static inline

template <class V>
PYCOMM_LANES V loadVector(const std::byte* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class V>
PYCOMM_LANES void storeVector(std::byte* to, V vector) {
  std::memcpy(to, &vector, sizeof vector);
}

PYCOMM_LANES I32 asSigned(U32 value) {
  return reinterpret_cast<I32>(value);
}

constexpr int32_t asSigned(uint32_t value) {
  return static_cast<int32_t>(value);
}

PYCOMM_LANES F32 canonicalLanes(F32 value) {
  return reinterpret_cast<F32>(value == value ? reinterpret_cast<U32>(value) : U32{} + kFloatNan);
}

PYCOMM_LANES F64 canonicalLanes(F64 value) {
  return reinterpret_cast<F64>(value == value ? reinterpret_cast<U64>(value) : U64{} + kDoubleNan);
}

struct Float32Lanes {
  using Element = Number<float>;
  using Acc = F32;
  PYCOMM_LANES Acc load(const std::byte* from) {
    return loadVector<F32>(from);
  }
  PYCOMM_LANES void store(std::byte* to, Acc value) {
    storeVector(to, canonicalLanes(value));
  }
};

struct Float64Lanes {
  using Element = Number<double>;
  using Acc = F64;
  PYCOMM_LANES Acc load(const std::byte* from) {
    return loadVector<F64>(from);
  }
  PYCOMM_LANES void store(std::byte* to, Acc value) {
    storeVector(to, canonicalLanes(value));
  }
};

struct HalfLanes {
  using Element = Half;
  using Acc = F32;
  PYCOMM_LANES Acc load(const std::byte* from) {
    return loadHalf(from);
  }
  PYCOMM_LANES void store(std::byte* to, Acc value) {
    storeHalf(to, canonicalLanes(value));
  }
};

struct Bfloat16Lanes {
  using Element = Bfloat16;
  using Acc = F32;
  PYCOMM_LANES Acc load(const std::byte* from) {
    return reinterpret_cast<F32>(loadLow16(from) << 16);
  }
  PYCOMM_LANES void store(std::byte* to, Acc value) {
    const U32 bits = reinterpret_cast<U32>(canonicalLanes(value));
    storeLow16(to, (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
  }
};

/// SmallFloat's steps (see small_float.h) on all lanes at once. Signed comparisons take one instruction, unsigned ones
/// three; no compared value has its top bit set.
template <class Format, class ScalarElement>
struct Float8Lanes {
  using Element = ScalarElement;
  using Acc = F32;

  PYCOMM_LANES Acc load(const std::byte* from) {
    const U32 bits = loadLow8(from);
    const U32 magnitude = bits & 0x7fU;
    const U32 wide = magnitude << Format::kShift;
    const F32 min_normal = reinterpret_cast<F32>(U32{} + Format::kMinNormal);
    const U32 subnormal = reinterpret_cast<U32>(reinterpret_cast<F32>(wide + Format::kMinNormal) - min_normal);
    const U32 finite = asSigned(wide) < (1 << 23) ? subnormal : wide + Format::kRebias;
    const U32 sign = (bits & 0x80U) << 24;
    if constexpr (Format::kHasInfinity) {
      const U32 infinite = magnitude == Format::kInfinity ? U32{} + 0x7f800000U : finite;
      const I32 nan = asSigned(magnitude) > asSigned(Format::kInfinity);
      return reinterpret_cast<F32>(nan ? U32{} + kFloatNan : infinite | sign);
    } else {
      return reinterpret_cast<F32>(magnitude == kFloat8Nan ? U32{} + kFloatNan : finite | sign);
    }
  }

  PYCOMM_LANES void store(std::byte* to, Acc value) {
    const U32 bits = reinterpret_cast<U32>(value);
    const U32 magnitude = bits & 0x7fffffffU;
    const F32 step = reinterpret_cast<F32>(U32{} + Format::kStep);
    const U32 low = reinterpret_cast<U32>(reinterpret_cast<F32>(magnitude) + step) - Format::kStep;
    const U32 even = (magnitude >> Format::kShift) & 1U;
    const U32 high = (magnitude + (Format::kHalfStep - Format::kRebias) + even) >> Format::kShift;
    const U32 finite = asSigned(magnitude) < asSigned(Format::kMinNormal) ? low : high;
    const U32 sign = (bits >> 24) & 0x80U;
    const U32 overflow = Format::kHasInfinity ? Format::kOverflow | sign : U32{} + Format::kOverflow;
    const U32 rounded = asSigned(finite) > asSigned(Format::kMaxFinite) ? overflow : finite | sign;
    storeLow8(to, asSigned(magnitude) > 0x7f800000 ? U32{} + kFloat8Nan : rounded);
  }
};

using E4m3Lanes = Float8Lanes<E4m3Format, E4m3>;
using E5m2Lanes = Float8Lanes<E5m2Format, E5m2>;

struct AddLanes {
  template <class V>
  PYCOMM_LANES V apply(V a, V b) {
    return a + b;
  }
};

struct MultiplyLanes {
  template <class V>
  PYCOMM_LANES V apply(V a, V b) {
    return a * b;
  }
};

PYCOMM_LANES U32 bitsOf(F32 value) {
  return reinterpret_cast<U32>(value);
}

PYCOMM_LANES U64 bitsOf(F64 value) {
  return reinterpret_cast<U64>(value);
}

// As in elements.h: if neither operand is less, the bits are or-ed or and-ed, which settles the sign of zeros. NaNs
// take this path too: a | b of two NaNs is a NaN, but a NaN with a number needs a comparison of its own.
struct MinimumLanes {
  template <class V>
  PYCOMM_LANES V apply(V a, V b) {
    const auto same = bitsOf(a) | bitsOf(b);
    const auto ordered = a < b ? bitsOf(a) : (b < a ? bitsOf(b) : same);
    return reinterpret_cast<V>(a != a ? bitsOf(a) : (b != b ? bitsOf(b) : ordered));
  }
};

struct MaximumLanes {
  template <class V>
  PYCOMM_LANES V apply(V a, V b) {
    const auto same = bitsOf(a) & bitsOf(b);
    const auto ordered = a < b ? bitsOf(b) : (b < a ? bitsOf(a) : same);
    return reinterpret_cast<V>(a != a ? bitsOf(a) : (b != b ? bitsOf(b) : ordered));
  }
};

} // namespace
} // namespace pycomm::numeric
