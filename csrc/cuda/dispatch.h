#pragma once

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "cuda/element.h"
#include "cuda/reduce_kernel.h"

// From run-time dtypes to kernels: the one list of existing kernels, for the device and for the host.

namespace pycomm::cuda {

template <class Grad, class Wire>
struct CastPair {
  using GradElement = Grad;
  using WireElement = Wire;
};

/// Calls `body(CastPair<...>{})`: gradients of fp32 to every wire dtype, of fp16 and bf16 to fp32 and to themselves. Returns false
/// for any other pair.
template <class Body>
bool withCast(DType grad, DType wire, const Body& body) {
  const auto when = [&](DType g, DType w, auto pair) {
    const bool same = grad == g && wire == w;
    if (same) {
      body(pair);
    }
    return same;
  };
  return when(DType::Float32, DType::Float32, CastPair<Float32, Float32>{}) ||
      when(DType::Float32, DType::Float16, CastPair<Float32, Half>{}) ||
      when(DType::Float32, DType::BFloat16, CastPair<Float32, Bfloat16>{}) ||
      when(DType::Float32, DType::Float8E4M3, CastPair<Float32, E4m3>{}) ||
      when(DType::Float32, DType::Float8E5M2, CastPair<Float32, E5m2>{}) ||
      when(DType::Float16, DType::Float16, CastPair<Half, Half>{}) ||
      when(DType::Float16, DType::Float32, CastPair<Half, Float32>{}) ||
      when(DType::BFloat16, DType::BFloat16, CastPair<Bfloat16, Bfloat16>{}) ||
      when(DType::BFloat16, DType::Float32, CastPair<Bfloat16, Float32>{});
}

template <class Element, class Op>
struct Fold {
  using ElementType = Element;
  using OpType = Op;
};

template <class Element, class Body>
bool withFoldOf(ReduceOp op, const Body& body) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      body(Fold<Element, SumOf>{});
      return true;
    case ReduceOp::Product:
      body(Fold<Element, ProductOf>{});
      return true;
    case ReduceOp::Min:
      body(Fold<Element, MinimumOf>{});
      return true;
    case ReduceOp::Max:
      body(Fold<Element, MaximumOf>{});
      return true;
    case ReduceOp::None:
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
    case ReduceOp::PremulSum:
      break;
  }
  return false;
}

/// Calls `body(Fold<...>{})` for the dtypes and operations that NCCL reduces, too. Returns false for any other.
template <class Body>
bool withFold(DType dtype, ReduceOp op, const Body& body) {
  switch (dtype) {
    case DType::Float16:
      return withFoldOf<Half>(op, body);
    case DType::BFloat16:
      return withFoldOf<Bfloat16>(op, body);
    case DType::Float32:
      return withFoldOf<Float32>(op, body);
    case DType::Float64:
      return withFoldOf<Float64>(op, body);
    case DType::Int8:
      return withFoldOf<Whole<int8_t>>(op, body);
    case DType::UInt8:
      return withFoldOf<Whole<uint8_t>>(op, body);
    case DType::Int32:
      return withFoldOf<Whole<int32_t>>(op, body);
    case DType::Int64:
      return withFoldOf<Whole<int64_t>>(op, body);
    case DType::Float8E4M3:
    case DType::Float8E5M2:
    case DType::UInt16:
    case DType::Int16:
    case DType::UInt32:
    case DType::UInt64:
    case DType::Bool:
    case DType::Complex64:
    case DType::Complex128:
      break;
  }
  return false;
}

inline bool hasReduceKernel(DType dtype, ReduceOp op) {
  return withFold(dtype, op, [](auto) {});
}

} // namespace pycomm::cuda
