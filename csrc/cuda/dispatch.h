#pragma once

#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "base/reduce_op.h"
#include "cuda/element.h"
#include "cuda/reduce_kernel.h"

// From run-time dtypes to kernels. One place decides what there is, for the device and for the host alike.

namespace pycomm::cuda {

template <class Grad, class Wire>
struct CastPair {
  using GradElement = Grad;
  using WireElement = Wire;
};

/// Calls `body(CastPair<...>{})`: gradients of fp32 to every wire dtype, of fp16 and bf16 to fp32 and to themselves.
template <class Body>
void withCast(DType grad, DType wire, const Body& body) {
  const auto is = [&](DType g, DType w) { return grad == g && wire == w; };
  if (is(DType::Float32, DType::Float32)) {
    return body(CastPair<Float32, Float32>{});
  }
  if (is(DType::Float32, DType::Float16)) {
    return body(CastPair<Float32, Half>{});
  }
  if (is(DType::Float32, DType::BFloat16)) {
    return body(CastPair<Float32, Bfloat16>{});
  }
  if (is(DType::Float32, DType::Float8E4M3)) {
    return body(CastPair<Float32, E4m3>{});
  }
  if (is(DType::Float32, DType::Float8E5M2)) {
    return body(CastPair<Float32, E5m2>{});
  }
  if (is(DType::Float16, DType::Float16)) {
    return body(CastPair<Half, Half>{});
  }
  if (is(DType::Float16, DType::Float32)) {
    return body(CastPair<Half, Float32>{});
  }
  if (is(DType::BFloat16, DType::BFloat16)) {
    return body(CastPair<Bfloat16, Bfloat16>{});
  }
  if (is(DType::BFloat16, DType::Float32)) {
    return body(CastPair<Bfloat16, Float32>{});
  }
  throw Error(
      ErrorCode::Unsupported,
      std::string("there is no kernel that packs ") + dtypeName(grad) + " gradients as " + dtypeName(wire) + ".",
      "wire_dtype of the gradients' own type");
}

template <class Element, class Op>
struct Fold {
  using ElementType = Element;
  using OpType = Op;
};

template <class Element, class Body>
void withFoldOf(ReduceOp op, const Body& body) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return body(Fold<Element, SumOf>{});
    case ReduceOp::Product:
      return body(Fold<Element, ProductOf>{});
    case ReduceOp::Min:
      return body(Fold<Element, MinimumOf>{});
    case ReduceOp::Max:
      return body(Fold<Element, MaximumOf>{});
    case ReduceOp::None:
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
    case ReduceOp::PremulSum:
      break;
  }
  throw Error(
      ErrorCode::Unsupported,
      std::string("the device's reduce kernel has no ") + reduceOpName(op) + ".",
      "cuda_mode=\"tcp\", which reduces on the CPU");
}

/// Calls `body(Fold<...>{})` for what NCCL reduces too.
template <class Body>
void withFold(DType dtype, ReduceOp op, const Body& body) {
  if (const std::string why = whyUnsupported(op, dtype); !why.empty()) {
    throw Error(ErrorCode::InvalidArgument, why);
  }
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
  throw Error(
      ErrorCode::Unsupported,
      std::string("the device's reduce kernel has no ") + dtypeName(dtype) + ".",
      "cuda_mode=\"tcp\", which reduces on the CPU");
}

} // namespace pycomm::cuda
