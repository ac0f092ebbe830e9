#include "cuda/c_errors.h"

namespace pycomm::cuda {

DType dtypeOf(uint8_t number) {
  if (number >= kDTypeCount) {
    throw Error(ErrorCode::InvalidArgument, "dtype " + std::to_string(number) + " is none of pycomm's.");
  }
  return static_cast<DType>(number);
}

ReduceOp opOf(uint8_t number) {
  if (number > static_cast<uint8_t>(ReduceOp::PremulSum)) {
    throw Error(ErrorCode::InvalidArgument, "reduce op " + std::to_string(number) + " is none of pycomm's.");
  }
  return static_cast<ReduceOp>(number);
}

} // namespace pycomm::cuda
