// No #pragma once: the body of each instruction set's file, which first defines PYCOMM_SIMD_TARGET (the attribute that
// lets a function use the set), kVectorBytes, the vector types, loadHalf, storeHalf and the loads and stores of the low bits of 32-bit lanes.
//
// Written with the vector types of GCC and Clang, so one text serves AVX2, AVX-512 and NEON. Everything is in an unnamed
// namespace and carries the target itself: code for a newer processor can never be what the linker picks for an inline
// function that an older one runs.
//
// Bit-equality with the scalar loops: IEEE fixes every result except which NaN, and each store writes the one NaN of
// small_float.h. So loads may leave NaNs as they are.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numeric/elements.h"
#include "numeric/kernels.h"

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

/// SmallFloat's steps, as small_float.h explains them, on all lanes at once. Compared as signed numbers, which is one
/// instruction where unsigned is three; nothing compared has its top bit set.
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
    const U32 special = Format::kHasInfinity ? (asSigned(magnitude) > asSigned(Format::kInfinity)
                                                    ? U32{} + kFloatNan
                                                    : (magnitude == Format::kInfinity ? U32{} + 0x7f800000U : finite))
                                             : (magnitude == kFloat8Nan ? U32{} + kFloatNan : finite);
    return reinterpret_cast<F32>(special | ((bits & 0x80U) << 24));
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

// As in elements.h: or-ed or and-ed bits where neither is less, which settles the sign of zeros. NaNs come there too:
// a | b of two NaNs is one, but a NaN with a number must be found by itself.
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

template <class Lanes>
struct Shape {
  using Scalar = typename Lanes::Element::Acc;
  static constexpr size_t kStride = sizeof(typename Lanes::Element::Stored);
  static constexpr size_t kWidth = sizeof(typename Lanes::Acc) / sizeof(Scalar);
  static constexpr size_t kVectorStride = kWidth * kStride;
};

// The last elements of a row, fewer than a vector, go through a vector with zeros behind them.
template <class Lanes>
PYCOMM_SIMD_TARGET typename Lanes::Acc loadPart(const std::byte* from, size_t count) {
  std::byte padded[Shape<Lanes>::kVectorStride] = {};
  std::memcpy(padded, from, count * Shape<Lanes>::kStride);
  return Lanes::load(padded);
}

template <class Lanes>
PYCOMM_SIMD_TARGET void storePart(std::byte* to, typename Lanes::Acc value, size_t count) {
  std::byte padded[Shape<Lanes>::kVectorStride];
  Lanes::store(padded, value);
  std::memcpy(to, padded, count * Shape<Lanes>::kStride);
}

template <class Lanes, class Op>
PYCOMM_SIMD_TARGET void reduceVectors(void* dst, const void* a, const void* b, size_t numel) {
  using S = Shape<Lanes>;
  auto* out = static_cast<std::byte*>(dst);
  const auto* left = static_cast<const std::byte*>(a);
  const auto* right = static_cast<const std::byte*>(b);
  for (; numel >= S::kWidth; numel -= S::kWidth) {
    Lanes::store(out, Op::apply(Lanes::load(left), Lanes::load(right)));
    out += S::kVectorStride;
    left += S::kVectorStride;
    right += S::kVectorStride;
  }
  if (numel != 0) {
    storePart<Lanes>(out, Op::apply(loadPart<Lanes>(left, numel), loadPart<Lanes>(right, numel)), numel);
  }
}

// Four vectors at a time, so that the chain of one vector's additions hides behind the others'. All sources of a group
// are read before it is written, since dst may be one of them.
template <class Lanes, class Op>
PYCOMM_SIMD_TARGET void reduceManyVectors(
    void* dst,
    const void* const* sources,
    size_t source_count,
    size_t numel,
    double divisor) {
  using S = Shape<Lanes>;
  using Acc = typename Lanes::Acc;
  constexpr size_t kNext = S::kVectorStride;
  auto* out = static_cast<std::byte*>(dst);
  const bool divides = divisor != 1;
  const auto by = static_cast<typename S::Scalar>(divisor);
  size_t at = 0; // bytes
  for (; numel >= 4 * S::kWidth; numel -= 4 * S::kWidth) {
    const auto* first = static_cast<const std::byte*>(sources[0]) + at;
    Acc acc0 = Lanes::load(first);
    Acc acc1 = Lanes::load(first + kNext);
    Acc acc2 = Lanes::load(first + 2 * kNext);
    Acc acc3 = Lanes::load(first + 3 * kNext);
    for (size_t k = 1; k < source_count; ++k) {
      const auto* next = static_cast<const std::byte*>(sources[k]) + at;
      acc0 = Op::apply(acc0, Lanes::load(next));
      acc1 = Op::apply(acc1, Lanes::load(next + kNext));
      acc2 = Op::apply(acc2, Lanes::load(next + 2 * kNext));
      acc3 = Op::apply(acc3, Lanes::load(next + 3 * kNext));
    }
    if (divides) {
      acc0 /= by;
      acc1 /= by;
      acc2 /= by;
      acc3 /= by;
    }
    Lanes::store(out + at, acc0);
    Lanes::store(out + at + kNext, acc1);
    Lanes::store(out + at + 2 * kNext, acc2);
    Lanes::store(out + at + 3 * kNext, acc3);
    at += 4 * kNext;
  }
  while (numel != 0) {
    const size_t count = numel < S::kWidth ? numel : S::kWidth;
    Acc acc = loadPart<Lanes>(static_cast<const std::byte*>(sources[0]) + at, count);
    for (size_t k = 1; k < source_count; ++k) {
      acc = Op::apply(acc, loadPart<Lanes>(static_cast<const std::byte*>(sources[k]) + at, count));
    }
    storePart<Lanes>(out + at, divides ? acc / by : acc, count);
    at += kNext;
    numel -= count;
  }
}

struct TimesLanes {
  template <class V, class Scalar>
  PYCOMM_LANES V apply(V value, Scalar by) {
    return value * by;
  }
};

struct OverLanes {
  template <class V, class Scalar>
  PYCOMM_LANES V apply(V value, Scalar by) {
    return value / by;
  }
};

/// Scaling, division and conversion are one loop. `Op` is TimesLanes or OverLanes.
template <class To, class From, class Op, class Factor>
PYCOMM_SIMD_TARGET void mapVectors(void* dst, const void* src, size_t numel, Factor factor) {
  constexpr size_t kWidth = Shape<To>::kWidth;
  auto* out = static_cast<std::byte*>(dst);
  const auto* in = static_cast<const std::byte*>(src);
  const auto by = static_cast<typename Shape<From>::Scalar>(factor);
  for (; numel >= kWidth; numel -= kWidth) {
    To::store(out, Op::apply(From::load(in), by));
    out += Shape<To>::kVectorStride;
    in += Shape<From>::kVectorStride;
  }
  if (numel != 0) {
    storePart<To>(out, Op::apply(loadPart<From>(in, numel), by), numel);
  }
}

} // namespace
} // namespace pycomm::numeric

#include "numeric/simd_pick.h"
