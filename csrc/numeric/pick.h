#pragma once

#include <type_traits>

#include "numeric/kernels.h"

// Finds the loop for a dtype and an op: the same tables for scalar loops and for those of each instruction set. In an unnamed namespace, so
// that no instantiation for one set serves another.

namespace pycomm::numeric {
namespace {

/// The arithmetic of a number that is ordered. `Ops` names the class for each op.
template <template <class, class> class Pick, class Element, class Ops>
auto pickArithmetic(ReduceOp op) -> std::decay_t<decltype(Pick<Element, typename Ops::Sum>::value)> {
  switch (op) {
    case ReduceOp::Sum:
      return Pick<Element, typename Ops::Sum>::value;
    case ReduceOp::Product:
      return Pick<Element, typename Ops::Product>::value;
    case ReduceOp::Min:
      return Pick<Element, typename Ops::Min>::value;
    case ReduceOp::Max:
      return Pick<Element, typename Ops::Max>::value;
    case ReduceOp::None:
    case ReduceOp::Avg:
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
    case ReduceOp::PremulSum:
      return nullptr;
  }
  return nullptr;
}

/// Calls `visit` with the class that `Floats` names for a float dtype; nullptr for any other dtype.
template <class Floats, class Visit>
auto visitFloat(DType dtype, Visit visit) -> decltype(visit(typename Floats::Float16{})) {
  switch (dtype) {
    case DType::Float16:
      return visit(typename Floats::Float16{});
    case DType::BFloat16:
      return visit(typename Floats::BFloat16{});
    case DType::Float32:
      return visit(typename Floats::Float32{});
    case DType::Float64:
      return visit(typename Floats::Float64{});
    case DType::Float8E4M3:
      return visit(typename Floats::Float8E4M3{});
    case DType::Float8E5M2:
      return visit(typename Floats::Float8E5M2{});
    case DType::UInt8:
    case DType::Int8:
    case DType::UInt16:
    case DType::Int16:
    case DType::UInt32:
    case DType::Int32:
    case DType::UInt64:
    case DType::Int64:
    case DType::Bool:
    case DType::Complex64:
    case DType::Complex128:
      return nullptr;
  }
  return nullptr;
}

/// `Convert` has the kernel for two classes of fp32 accumulators: the wire formats do not include fp64.
template <class Floats, template <class, class> class Convert, class To, class From>
ConvertKernel convertBetween() {
  using Single = typename Floats::Float32::Acc;
  if constexpr (std::is_same_v<typename To::Acc, Single> && std::is_same_v<typename From::Acc, Single>) {
    return Convert<To, From>::value;
  } else {
    return nullptr;
  }
}

template <class Floats, template <class, class> class Convert>
ConvertKernel pickConvert(DType to, DType from) {
  return visitFloat<Floats>(to, [from](auto target) {
    return visitFloat<Floats>(
        from, [](auto source) { return convertBetween<Floats, Convert, decltype(target), decltype(source)>(); });
  });
}

} // namespace
} // namespace pycomm::numeric
