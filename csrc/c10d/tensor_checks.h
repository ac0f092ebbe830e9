#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace pycomm {

/// Throws Error(InvalidArgument | Unsupported) unless this is a dense tensor on the CPU or a CUDA device, of a known dtype, with any
/// strides. `op` and `role` ("input", "output") are for the text.
void checkTensor(const at::Tensor& tensor, const char* op, const char* role);

/// The same for each, and that all have one dtype.
void checkTensors(const std::vector<at::Tensor>& tensors, const char* op, const char* role);

/// checkTensor, and throws if two of its elements share memory (expanded tensors): writing to them is undefined.
void checkOutput(const at::Tensor& tensor, const char* op);

/// The same for each, that all have one dtype, and that no two of them share memory.
void checkOutputs(const std::vector<at::Tensor>& tensors, const char* op);

/// The only tensor of a list: torch's lists are for several devices per process, which no backend supports today.
[[nodiscard]] at::Tensor& onlyTensor(std::vector<at::Tensor>& tensors, const char* op);

/// Throws unless there is one tensor per rank.
void checkCount(size_t count, int size, const char* op, const char* what);

void checkSameDtype(const at::Tensor& input, const at::Tensor& output, const char* op);

/// Throws unless `large` has `size` times as many elements as `small`. `what` names `large`.
void checkTimes(const at::Tensor& large, const at::Tensor& small, int size, const char* op, const char* what);

// Inputs and outputs that share memory. Tensors with gaps between their elements are not checked: that would be
// expensive, and they are copied anyway.

/// Throws if `tensor` shares memory with one of `parts`, except where it is exactly `parts[own]`: in place.
void checkApart(const std::vector<at::Tensor>& parts, const at::Tensor& tensor, int own, const char* op);

/// Throws if an input shares memory with an output.
void checkDisjoint(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, const char* op);

/// Throws if `part` shares memory with `whole`, except where it is exactly its `slot`-th part: in place.
void checkPart(const at::Tensor& whole, const at::Tensor& part, int slot, const char* op);

} // namespace pycomm
