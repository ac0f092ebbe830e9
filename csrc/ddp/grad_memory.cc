#include "ddp/grad_memory.h"

#include <algorithm>

namespace pycomm {

std::vector<int64_t> gradStrides(const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) {
    return param.strides().vec();
  }
  std::vector<int64_t> strides(static_cast<size_t>(param.dim()));
  int64_t step = 1;
  for (size_t d = strides.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(param.size(static_cast<int64_t>(d)), 1);
  }
  return strides;
}

bool isPlainIn(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  if (tensor.is_neg() || tensor.is_conj()) {
    return false;
  }
  for (size_t d = 0; d < strides.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    if (tensor.size(dim) != 1 && tensor.stride(dim) != strides[d]) {
      return false;
    }
  }
  return true;
}

bool sameMemory(const at::Tensor& grad, const at::Tensor& view, const std::vector<int64_t>& strides) {
  return grad.is_alias_of(view) && grad.data_ptr() == view.data_ptr() && isPlainIn(grad, strides);
}

} // namespace pycomm
