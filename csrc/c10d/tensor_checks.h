#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "base/buffer_view.h"

namespace pycomm {

/// Throws Error(InvalidArgument | Unsupported) unless the engine can work on this tensor's memory as it lies: dense, contiguous, on the
/// CPU, of a known dtype. `op` and `role` ("input", "output") are for the text.
void checkTensor(const at::Tensor& tensor, const char* op, const char* role);

/// The same for each, and that all have one dtype.
void checkTensors(const std::vector<at::Tensor>& tensors, const char* op, const char* role);

/// The only tensor of a list: torch's lists are for several devices a process, which no backend of today serves.
[[nodiscard]] at::Tensor& onlyTensor(std::vector<at::Tensor>& tensors, const char* op);

/// Throws unless there is one tensor a rank.
void checkCount(size_t count, int size, const char* op, const char* what);

/// The memory of a checked tensor.
[[nodiscard]] BufferView viewOf(const at::Tensor& tensor);

} // namespace pycomm
