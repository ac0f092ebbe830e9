#include "device/nccl_api.h"

#include <string>

#include "base/error.h"

namespace pycomm::cuda {
namespace {

// ncclDataType_t
constexpr int kInt8 = 0;
constexpr int kUint8 = 1;
constexpr int kInt32 = 2;
constexpr int kUint32 = 3;
constexpr int kInt64 = 4;
constexpr int kUint64 = 5;
constexpr int kFloat16 = 6;
constexpr int kFloat32 = 7;
constexpr int kFloat64 = 8;
constexpr int kBfloat16 = 9;

// ncclRedOp_t
constexpr int kSum = 0;
constexpr int kProd = 1;
constexpr int kMax = 2;
constexpr int kMin = 3;
constexpr int kAvg = 4;

[[noreturn]] void refuse(DType dtype, ReduceOp op) {
  throw Error(
      ErrorCode::Unsupported,
      std::string("NCCL has no ") + reduceOpName(op) + " of " + dtypeName(dtype) + ".",
      "cuda_mode=\"host\", which reduces on the CPU and has all of them");
}

int ncclOpOf(DType dtype, ReduceOp op) {
  // Of bytes that are 0 or 1, the sum as torch means it is their maximum and the product their minimum.
  const bool boolean = dtype == DType::Bool;
  switch (op) {
    case ReduceOp::Sum:
      return boolean ? kMax : kSum;
    case ReduceOp::Product:
      return boolean ? kMin : kProd;
    case ReduceOp::Min:
      return kMin;
    case ReduceOp::Max:
      return kMax;
    case ReduceOp::Avg:
      return kAvg;
    case ReduceOp::None:
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
    case ReduceOp::PremulSum:
      break;
  }
  refuse(dtype, op);
}

} // namespace

std::string ncclResultName(NcclResult result) {
  switch (result) {
    case NcclResult::Success:
      return "ncclSuccess";
    case NcclResult::UnhandledCudaError:
      return "ncclUnhandledCudaError";
    case NcclResult::SystemError:
      return "ncclSystemError";
    case NcclResult::InternalError:
      return "ncclInternalError";
    case NcclResult::InvalidArgument:
      return "ncclInvalidArgument";
    case NcclResult::InvalidUsage:
      return "ncclInvalidUsage";
    case NcclResult::RemoteError:
      return "ncclRemoteError";
    case NcclResult::InProgress:
      return "ncclInProgress";
  }
  return "ncclResult " + std::to_string(static_cast<int>(result));
}

NcclReduction ncclReduction(DType dtype, ReduceOp op) {
  if (const std::string why = whyUnsupported(op, dtype); !why.empty()) {
    throw Error(ErrorCode::InvalidArgument, why);
  }
  const int nccl_op = ncclOpOf(dtype, op);
  const bool adds = op == ReduceOp::Sum || op == ReduceOp::Avg;
  switch (dtype) {
    case DType::Bool:
    case DType::UInt8:
      return {kUint8, nccl_op, 1};
    case DType::Int8:
      return {kInt8, nccl_op, 1};
    case DType::Int32:
      return {kInt32, nccl_op, 1};
    case DType::UInt32:
      return {kUint32, nccl_op, 1};
    case DType::Int64:
      return {kInt64, nccl_op, 1};
    case DType::UInt64:
      return {kUint64, nccl_op, 1};
    case DType::Float16:
      return {kFloat16, nccl_op, 1};
    case DType::BFloat16:
      return {kBfloat16, nccl_op, 1};
    case DType::Float32:
      return {kFloat32, nccl_op, 1};
    case DType::Float64:
      return {kFloat64, nccl_op, 1};
    case DType::Complex64:
      if (adds) {
        return {kFloat32, nccl_op, 2};
      }
      break;
    case DType::Complex128:
      if (adds) {
        return {kFloat64, nccl_op, 2};
      }
      break;
    case DType::UInt16:
    case DType::Int16:
    case DType::Float8E4M3:
    case DType::Float8E5M2:
      break;
  }
  refuse(dtype, op);
}

} // namespace pycomm::cuda
