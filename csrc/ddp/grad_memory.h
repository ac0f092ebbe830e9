#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pycomm {

/// Where AccumulateGrad puts a gradient of this parameter: in the parameter's own memory order if that order has no
/// holes, else contiguous.
[[nodiscard]] std::vector<int64_t> gradStrides(const at::Tensor& param);

/// Whether the tensor's memory holds its elements as they are, in this order: every dimension of more than one element has
/// its stride from `strides`, and no lazy negation or conjugation is pending. Autograd makes such gradients for the
/// imaginary part of a conjugated complex number.
[[nodiscard]] bool isPlainIn(const at::Tensor& tensor, const std::vector<int64_t>& strides);

/// Whether `grad`, plain in these strides, is the very memory of `view`.
[[nodiscard]] bool sameMemory(const at::Tensor& grad, const at::Tensor& view, const std::vector<int64_t>& strides);

} // namespace pycomm
