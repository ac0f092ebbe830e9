#include "c10d/tensor_checks.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBody.h>

#include <string>

#include "base/error.h"
#include "c10d/dtypes.h"

namespace pycomm {
namespace {

[[noreturn]] void refuse(
    ErrorCode code,
    const at::Tensor& tensor,
    const char* op,
    const char* role,
    const std::string& why,
    const char* hint) {
  ErrorRecord record;
  record.code = code;
  record.op = op;
  record.dtype = c10::toString(tensor.scalar_type());
  record.numel = tensor.numel();
  record.summary = std::string(op) + ": the " + role + " tensor " + why + ".";
  record.hint = hint;
  throw Error(record);
}

} // namespace

void checkTensor(const at::Tensor& tensor, const char* op, const char* role) {
  if (!tensor.defined()) {
    throw Error(ErrorCode::InvalidArgument, std::string(op) + ": the " + role + " tensor is undefined.");
  }
  if (tensor.layout() != c10::kStrided) {
    refuse(
        ErrorCode::Unsupported,
        tensor,
        op,
        role,
        "is not dense (layout " + c10::str(tensor.layout()) + ")",
        "tensor.to_dense()");
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    refuse(
        ErrorCode::Unsupported,
        tensor,
        op,
        role,
        "is on " + tensor.device().str() + ", which pycomm does not serve",
        "tensor.cpu(), or a process group of another backend for that device");
  }
  static_cast<void>(toDType(tensor.scalar_type()));
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) {
    refuse(
        ErrorCode::InvalidArgument,
        tensor,
        op,
        role,
        "needs " + std::to_string(needed) + " bytes, and its storage has " + std::to_string(tensor.storage().nbytes()),
        "give its storage back the size that it had, as by untyped_storage().resize_()");
  }
}

void checkTensors(const std::vector<at::Tensor>& tensors, const char* op, const char* role) {
  for (const at::Tensor& tensor : tensors) {
    checkTensor(tensor, op, role);
    if (tensor.scalar_type() != tensors.front().scalar_type()) {
      refuse(
          ErrorCode::InvalidArgument,
          tensor,
          op,
          role,
          std::string("has another dtype than the first one (") + c10::toString(tensors.front().scalar_type()) + ")",
          "convert all to one dtype");
    }
  }
}

at::Tensor& onlyTensor(std::vector<at::Tensor>& tensors, const char* op) {
  checkCount(tensors.size(), 1, op, "tensors");
  return tensors.front();
}

void checkCount(size_t count, int size, const char* op, const char* what) {
  if (count != static_cast<size_t>(size)) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": " + std::to_string(count) + " " + what + " were given where " + std::to_string(size) +
            " are needed.",
        "pass one for each rank of the group");
  }
}

void checkSameDtype(const at::Tensor& input, const at::Tensor& output, const char* op) {
  if (input.scalar_type() != output.scalar_type()) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": input and output have different dtypes (" + c10::toString(input.scalar_type()) + " and " +
            c10::toString(output.scalar_type()) + ").");
  }
}

void checkTimes(const at::Tensor& large, const at::Tensor& small, int size, const char* op, const char* what) {
  if (large.numel() != small.numel() * size) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(op) + ": the " + what + " needs " + std::to_string(small.numel() * size) + " elements for " +
            std::to_string(size) + " ranks and has " + std::to_string(large.numel()) + ".");
  }
}

} // namespace pycomm
