// No #pragma once: this is the body of each instruction set's file. Before it the file defines the vector types,
// PYCOMM_SIMD_TARGET (the attribute that lets a function use the set), loadHalf, storeHalf, and the loads and stores of
// the low 8 and 16 bits of 32-bit lanes.
//
// Written with the vector types of GCC and Clang, so that one text serves AVX2, AVX-512 and NEON. Everything is in an
// unnamed namespace and has the target attribute itself. Otherwise the linker could pick code for a newer processor as
// the one copy of an inline function, and an older processor would run it.
//
// Bit-equality with the scalar loops: IEEE fixes every result except the choice of NaN, and each store writes the one
// NaN of small_float.h. So loads may leave NaNs as they are.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "numeric/kernels.h"
#include "numeric/pick.h"
#include "numeric/simd_lanes.h"

namespace pycomm::numeric {
namespace {

template <class Lanes>
struct Shape {
  using Scalar = typename Lanes::Element::Acc;
  static constexpr size_t kStride = sizeof(typename Lanes::Element::Stored);
  static constexpr size_t kWidth = sizeof(typename Lanes::Acc) / sizeof(Scalar);
  static constexpr size_t kVectorStride = kWidth * kStride;
};

// The last elements of a row, fewer than a vector, go through a vector that is padded with zeros.
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

// Four vectors at a time, to hide the latency of each vector's chain of additions. All sources of a group are read
// before it is written, since dst may be one of them.
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

/// The one loop for scaling, division and conversion. `Op` is TimesLanes or OverLanes.
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

#include "numeric/simd_codec.h"

namespace pycomm::numeric {
namespace {

template <class Lanes, class Op>
struct ReducePick {
  static constexpr ReduceKernel value = reduceVectors<Lanes, Op>;
};
template <class Lanes, class Op>
struct ReduceManyPick {
  static constexpr ReduceManyKernel value = reduceManyVectors<Lanes, Op>;
};
template <class To, class From>
struct ConvertPick {
  static constexpr ConvertKernel value = mapVectors<To, From, TimesLanes>;
};

struct Ops {
  using Sum = AddLanes;
  using Product = MultiplyLanes;
  using Min = MinimumLanes;
  using Max = MaximumLanes;
};

struct Floats {
  using Float16 = HalfLanes;
  using BFloat16 = Bfloat16Lanes;
  using Float32 = Float32Lanes;
  using Float64 = Float64Lanes;
  using Float8E4M3 = E4m3Lanes;
  using Float8E5M2 = E5m2Lanes;
};

template <template <class, class> class Pick>
auto pick(DType dtype, ReduceOp op) -> std::decay_t<decltype(Pick<Float32Lanes, AddLanes>::value)> {
  return visitFloat<Floats>(dtype, [op](auto lanes) { return pickArithmetic<Pick, decltype(lanes), Ops>(op); });
}

ScaleKernel findScale(DType dtype) {
  return visitFloat<Floats>(
      dtype, [](auto lanes) -> ScaleKernel { return mapVectors<decltype(lanes), decltype(lanes), TimesLanes>; });
}

ScaleKernel findDivide(DType dtype) {
  return visitFloat<Floats>(
      dtype, [](auto lanes) -> ScaleKernel { return mapVectors<decltype(lanes), decltype(lanes), OverLanes>; });
}

constexpr KernelSet kSimdKernels = {
    pick<ReducePick>,
    pick<ReduceManyPick>,
    findScale,
    findDivide,
    pickConvert<Floats, ConvertPick>,
    summarizeVectors,
    quantizeVectors,
    dequantizeVectors};

} // namespace
} // namespace pycomm::numeric
