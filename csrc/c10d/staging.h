#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

#include "base/buffer_view.h"

namespace pycomm {

/// The contiguous memory that the engine works in for the tensors of one call: a tensor's own, or a temporary.
///
/// Elements travel in logical (row-major) order whatever the strides, since ranks cannot know each other's. So a tensor whose memory
/// is not in that order (a transposed or channels-last one) costs a temporary of its size, a copy into it if it is read and a copy
/// out of it if it is written. A list with a tensor a rank costs the same, unless its tensors lie one behind the other in memory, as
/// those of torch.split() do.
class Staging {
 public:
  /// Of a tensor that is only read.
  [[nodiscard]] BufferView in(const at::Tensor& tensor);
  /// Of a tensor that is only written.
  [[nodiscard]] BufferView out(const at::Tensor& tensor);
  /// Of a tensor that is read and written.
  [[nodiscard]] BufferView inOut(const at::Tensor& tensor);
  [[nodiscard]] ConstBufferView in(const std::vector<at::Tensor>& parts);
  [[nodiscard]] BufferView out(const std::vector<at::Tensor>& parts);

  /// A view of each part's own memory, in order; none where a part is not plain, or where one view of all parts is to be had.
  [[nodiscard]] static std::vector<BufferView> apart(const std::vector<at::Tensor>& parts);

  /// What has to live as long as the views.
  [[nodiscard]] std::vector<at::Tensor> takeTemporaries() {
    return std::move(temporaries_);
  }
  /// Copies from temporaries to outputs, once the engine has written; empty if there is nothing to copy.
  [[nodiscard]] std::function<void()> takeUnpack();

 private:
  struct CopyBack {
    at::Tensor from; ///< flat
    std::vector<at::Tensor> to;
  };

  [[nodiscard]] at::Tensor temporary(const at::Tensor& like, int64_t numel);

  std::vector<at::Tensor> temporaries_;
  std::vector<CopyBack> copies_;
};

} // namespace pycomm
