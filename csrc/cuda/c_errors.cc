#include "cuda/c_errors.h"

#include <algorithm>
#include <cstring>

namespace pycomm::cuda {
namespace {

template <size_t N>
void put(char (&to)[N], const std::string& text) noexcept {
  const size_t length = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

} // namespace

uint16_t tell(const ErrorRecord& record, PycommCudaError* error) noexcept {
  error->code = static_cast<uint16_t>(record.code);
  put(error->summary, record.summary);
  put(error->hint, record.hint);
  put(error->cause, record.cause);
  return error->code;
}

ErrorRecord recordOf(const PycommCudaError& error) {
  ErrorRecord record;
  record.code = static_cast<ErrorCode>(error.code);
  record.summary = error.summary;
  record.hint = error.hint;
  record.cause = error.cause;
  return record;
}

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
