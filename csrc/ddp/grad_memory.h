#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace pycomm {

/// Where AccumulateGrad puts a gradient of this parameter: in the parameter's own memory order if that order has no
/// holes, else contiguous.
[[nodiscard]] std::vector<int64_t> gradStrides(const at::Tensor& param);

/// Whether the strides of all dimensions that have more than one element are these.
[[nodiscard]] bool hasStrides(const at::Tensor& tensor, const std::vector<int64_t>& strides);

/// Whether `grad`, with these strides, is the very memory of `view`.
[[nodiscard]] bool sameMemory(const at::Tensor& grad, const at::Tensor& view, const std::vector<int64_t>& strides);

} // namespace pycomm
