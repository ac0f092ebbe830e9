#include <algorithm>

#include "numeric/elements.h"
#include "numeric/int8_code.h"
#include "numeric/kernels.h"
#include "numeric/pick.h"

// Loops for any processor, and the definition of every result. Simple enough for the compiler to vectorise with the
// base instruction set.

// dst may be one of the sources, but element i depends only on itself: iterations are independent.
#if defined(__clang__)
#define PYCOMM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PYCOMM_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace pycomm::numeric {
namespace {

template <class Element, class Op>
void reduceLoop(void* dst, const void* a, const void* b, size_t numel) {
  PYCOMM_INDEPENDENT
  for (size_t i = 0; i < numel; ++i) {
    storeAt<Element>(dst, i, Op::apply(loadAt<Element>(a, i), loadAt<Element>(b, i)));
  }
}

// A function by itself, since GCC otherwise interleaves two sources and then no longer vectorises.
template <class Element, class Op>
[[gnu::noinline]] void foldBlock(typename Element::Acc* acc, const std::byte* source, size_t numel) {
  PYCOMM_INDEPENDENT
  for (size_t i = 0; i < numel; ++i) {
    acc[i] = Op::apply(acc[i], loadAt<Element>(source, i));
  }
}

// In blocks that stay in the first-level cache: all sources of a block are read before it is written, since dst may be
// one of them.
template <class Element, class Op>
void reduceManyLoop(void* dst, const void* const* sources, size_t source_count, size_t numel, double divisor) {
  using Acc = typename Element::Acc;
  constexpr size_t kBlock = 512;
  Acc acc[kBlock];
  for (size_t start = 0; start < numel; start += kBlock) {
    const size_t count = std::min(kBlock, numel - start);
    const size_t at = start * sizeof(typename Element::Stored);
    for (size_t i = 0; i < count; ++i) {
      acc[i] = loadAt<Element>(sources[0], start + i);
    }
    for (size_t k = 1; k < source_count; ++k) {
      foldBlock<Element, Op>(acc, static_cast<const std::byte*>(sources[k]) + at, count);
    }
    if constexpr (std::is_floating_point_v<Acc>) {
      for (size_t i = 0; i < count && divisor != 1; ++i) {
        acc[i] /= static_cast<Acc>(divisor);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      storeAt<Element>(dst, start + i, acc[i]);
    }
  }
}

template <class Element>
void scaleLoop(void* dst, const void* src, size_t numel, double factor) {
  const auto by = static_cast<typename Element::Acc>(factor);
  PYCOMM_INDEPENDENT
  for (size_t i = 0; i < numel; ++i) {
    storeAt<Element>(dst, i, loadAt<Element>(src, i) * by);
  }
}

template <class Element>
void divideLoop(void* dst, const void* src, size_t numel, double divisor) {
  const auto by = static_cast<typename Element::Acc>(divisor);
  PYCOMM_INDEPENDENT
  for (size_t i = 0; i < numel; ++i) {
    storeAt<Element>(dst, i, loadAt<Element>(src, i) / by);
  }
}

template <class To, class From>
void convertLoop(void* dst, const void* src, size_t numel, float factor) {
  PYCOMM_INDEPENDENT
  for (size_t i = 0; i < numel; ++i) {
    storeAt<To>(dst, i, loadAt<From>(src, i) * factor);
  }
}

// One kernel of each kind for an (element, op) pair.
template <class Element, class Op>
struct ReducePick {
  static constexpr ReduceKernel value = reduceLoop<Element, Op>;
};
template <class Element, class Op>
struct ReduceManyPick {
  static constexpr ReduceManyKernel value = reduceManyLoop<Element, Op>;
};
template <class To, class From>
struct ConvertPick {
  static constexpr ConvertKernel value = convertLoop<To, From>;
};

struct Ops {
  using Sum = Add;
  using Product = Multiply;
  using Min = Minimum;
  using Max = Maximum;
};

struct Floats {
  using Float16 = Half;
  using BFloat16 = Bfloat16;
  using Float32 = Number<float>;
  using Float64 = Number<double>;
  using Float8E4M3 = E4m3;
  using Float8E5M2 = E5m2;
};

template <template <class, class> class Pick, class Element>
auto integer(ReduceOp op) -> std::decay_t<decltype(Pick<Element, Add>::value)> {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::Max:
      return pickArithmetic<Pick, Element, Ops>(op);
    case ReduceOp::Band:
      return Pick<Element, BitAnd>::value;
    case ReduceOp::Bor:
      return Pick<Element, BitOr>::value;
    case ReduceOp::Bxor:
      return Pick<Element, BitXor>::value;
    case ReduceOp::None:
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
      return nullptr;
  }
  return nullptr;
}

// A sum of bools is "any", as in torch; so Sum and Max are or, Product and Min are and.
template <template <class, class> class Pick>
auto boolean(ReduceOp op) -> std::decay_t<decltype(Pick<Boolean, BitOr>::value)> {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::Bor:
      return Pick<Boolean, BitOr>::value;
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::Band:
      return Pick<Boolean, BitAnd>::value;
    case ReduceOp::Bxor:
      return Pick<Boolean, BitXor>::value;
    case ReduceOp::None:
    case ReduceOp::Avg:
    case ReduceOp::PremulSum:
      return nullptr;
  }
  return nullptr;
}

template <template <class, class> class Pick>
auto pick(DType dtype, ReduceOp op) -> std::decay_t<decltype(Pick<Boolean, BitOr>::value)> {
  switch (dtype) {
    case DType::UInt8:
      return integer<Pick, Number<uint8_t>>(op);
    case DType::Int8:
      return integer<Pick, Number<int8_t>>(op);
    case DType::UInt16:
      return integer<Pick, Number<uint16_t>>(op);
    case DType::Int16:
      return integer<Pick, Number<int16_t>>(op);
    case DType::UInt32:
      return integer<Pick, Number<uint32_t>>(op);
    case DType::Int32:
      return integer<Pick, Number<int32_t>>(op);
    case DType::UInt64:
      return integer<Pick, Number<uint64_t>>(op);
    case DType::Int64:
      return integer<Pick, Number<int64_t>>(op);
    case DType::Bool:
      return boolean<Pick>(op);
    case DType::Complex64:
      return op == ReduceOp::Product ? Pick<Complex<float>, Multiply>::value : nullptr;
    case DType::Complex128:
      return op == ReduceOp::Product ? Pick<Complex<double>, Multiply>::value : nullptr;
    case DType::Float16:
    case DType::BFloat16:
    case DType::Float32:
    case DType::Float64:
    case DType::Float8E4M3:
    case DType::Float8E5M2:
      return visitFloat<Floats>(dtype, [op](auto element) { return pickArithmetic<Pick, decltype(element), Ops>(op); });
  }
  return nullptr;
}

ScaleKernel findScale(DType dtype) {
  return visitFloat<Floats>(dtype, [](auto element) -> ScaleKernel { return scaleLoop<decltype(element)>; });
}

ScaleKernel findDivide(DType dtype) {
  return visitFloat<Floats>(dtype, [](auto element) -> ScaleKernel { return divideLoop<decltype(element)>; });
}

} // namespace

const KernelSet kScalarKernels = {
    pick<ReducePick>,
    pick<ReduceManyPick>,
    findScale,
    findDivide,
    pickConvert<Floats, ConvertPick>,
    summarizeScalar,
    quantizeScalar,
    dequantizeScalar};

} // namespace pycomm::numeric
