// No #pragma once: last part of simd_kernels.h. Picks the loop for a dtype and op.

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

template <template <class, class> class Pick, class Lanes>
auto pickOp(ReduceOp op) -> std::decay_t<decltype(Pick<Lanes, AddLanes>::value)> {
  switch (op) {
    case ReduceOp::Sum:
      return Pick<Lanes, AddLanes>::value;
    case ReduceOp::Product:
      return Pick<Lanes, MultiplyLanes>::value;
    case ReduceOp::Min:
      return Pick<Lanes, MinimumLanes>::value;
    case ReduceOp::Max:
      return Pick<Lanes, MaximumLanes>::value;
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

// Calls `visit` with the lanes of `dtype`, if it has any.
template <class Visit>
auto visitLanes(DType dtype, Visit visit) -> decltype(visit(HalfLanes{})) {
  switch (dtype) {
    case DType::Float16:
      return visit(HalfLanes{});
    case DType::BFloat16:
      return visit(Bfloat16Lanes{});
    case DType::Float32:
      return visit(Float32Lanes{});
    case DType::Float64:
      return visit(Float64Lanes{});
    case DType::Float8E4M3:
      return visit(E4m3Lanes{});
    case DType::Float8E5M2:
      return visit(E5m2Lanes{});
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

ReduceKernel findReduce(DType dtype, ReduceOp op) {
  return visitLanes(dtype, [op](auto lanes) { return pickOp<ReducePick, decltype(lanes)>(op); });
}

ReduceManyKernel findReduceMany(DType dtype, ReduceOp op) {
  return visitLanes(dtype, [op](auto lanes) { return pickOp<ReduceManyPick, decltype(lanes)>(op); });
}

ScaleKernel findScale(DType dtype) {
  return visitLanes(
      dtype, [](auto lanes) -> ScaleKernel { return mapVectors<decltype(lanes), decltype(lanes), TimesLanes>; });
}

ScaleKernel findDivide(DType dtype) {
  return visitLanes(
      dtype, [](auto lanes) -> ScaleKernel { return mapVectors<decltype(lanes), decltype(lanes), OverLanes>; });
}

// The wire formats do not include fp64.
template <class To, class From>
ConvertKernel convertBetween() {
  if constexpr (std::is_same_v<typename To::Acc, F32> && std::is_same_v<typename From::Acc, F32>) {
    return mapVectors<To, From, TimesLanes>;
  } else {
    return nullptr;
  }
}

ConvertKernel findConvert(DType to, DType from) {
  return visitLanes(to, [from](auto target) {
    return visitLanes(from, [](auto source) { return convertBetween<decltype(target), decltype(source)>(); });
  });
}

constexpr KernelSet kSimdKernels = {
    findReduce,
    findReduceMany,
    findScale,
    findDivide,
    findConvert,
    summarizeVectors,
    quantizeVectors,
    dequantizeVectors};

} // namespace
} // namespace pycomm::numeric
