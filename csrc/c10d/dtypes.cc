#include "c10d/dtypes.h"

#include "base/error.h"
#include "c10d/torch_compat.h"

namespace pycomm {

DType toDType(c10::ScalarType type) {
  // Not a switch without default: torch adds scalar types that pycomm need not know.
  switch (type) {
    case c10::ScalarType::Byte:
      return DType::UInt8;
    case c10::ScalarType::Char:
      return DType::Int8;
    case c10::ScalarType::UInt16:
      return DType::UInt16;
    case c10::ScalarType::Short:
      return DType::Int16;
    case c10::ScalarType::UInt32:
      return DType::UInt32;
    case c10::ScalarType::Int:
      return DType::Int32;
    case c10::ScalarType::UInt64:
      return DType::UInt64;
    case c10::ScalarType::Long:
      return DType::Int64;
    case c10::ScalarType::Bool:
      return DType::Bool;
    case c10::ScalarType::Half:
      return DType::Float16;
    case c10::ScalarType::BFloat16:
      return DType::BFloat16;
    case c10::ScalarType::Float:
      return DType::Float32;
    case c10::ScalarType::Double:
      return DType::Float64;
    case c10::ScalarType::ComplexFloat:
      return DType::Complex64;
    case c10::ScalarType::ComplexDouble:
      return DType::Complex128;
    case c10::ScalarType::Float8_e4m3fn:
      return DType::Float8E4M3;
    case c10::ScalarType::Float8_e5m2:
      return DType::Float8E5M2;
    default:
      throw Error(
          ErrorCode::Unsupported,
          std::string("Tensors of dtype ") + c10::toString(type) + " cannot be sent.",
          "convert the tensor to a dtype that pycomm knows, or view it as bytes (tensor.view(torch.uint8))");
  }
}

ReduceOp toReduceOp(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::Sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::Avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::Product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::Min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::Max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::Band;
    case c10d::ReduceOp::BOR:
      return ReduceOp::Bor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::Bxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::PremulSum;
    case c10d::ReduceOp::UNUSED:
      break;
  }
  throw Error(
      ErrorCode::Unsupported, "This reduce op is not one that torch defines.", "use torch.distributed.ReduceOp");
}

double premulFactor(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
    return 1.0;
  }
  const auto* supplement = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) {
    throw Error(
        ErrorCode::InvalidArgument, "PREMUL_SUM came without its factor.", "use dist._make_nccl_premul_sum(factor)");
  }
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

} // namespace pycomm
