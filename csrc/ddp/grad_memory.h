#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pycomm {

/// The strides that AccumulateGrad gives a gradient of this parameter: the parameter's own if they leave no holes, else contiguous
/// ones.
[[nodiscard]] std::vector<int64_t> gradStrides(const at::Tensor& param);

/// Whether the tensor's memory holds its elements as they are, in this order: every dimension of more than one element has
/// its stride from `strides`, and no lazy negation or conjugation is pending. Autograd makes lazily
/// negated gradients for the imaginary part of a conjugated complex number.
[[nodiscard]] bool isPlainIn(const at::Tensor& tensor, const std::vector<int64_t>& strides);

/// Whether `grad`, plain in these strides, is the very memory of `view`.
[[nodiscard]] bool sameMemory(const at::Tensor& grad, const at::Tensor& view, const std::vector<int64_t>& strides);

} // namespace pycomm
