#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "ddp/reducer_group.h"

namespace pycomm {

/// What all ranks take from rank 0 of their group at the end of a step that can be summed again: the module's buffers, and once the order of
/// buckets. One broadcast, a bucket of the step like any other: nothing changes before commit().
///
///     setBuffers() -> launch() -> await() [-> launch() -> await() after Redo] -> commit()
///
/// Not thread-safe; the reducer's turn (PassLock) guards it.
class LeaderState {
 public:
  /// After a forward pass. On the CPU, of the same shapes and dtypes on all ranks.
  void setBuffers(std::vector<at::Tensor> buffers) noexcept {
    buffers_ = std::move(buffers);
  }

  /// Sends or receives the buffers as they are now. `order`: none, or what rank 0 has seen, of as many parameters on all ranks.
  void launch(const ReducerGroup& group, const std::optional<std::vector<size_t>>& order);
  /// Waits for the broadcast, if there is one. Throws its error.
  void await();
  /// Writes rank 0's values to the buffers. Returns its order of buckets, if launch() had one.
  [[nodiscard]] std::optional<std::vector<size_t>> commit();

 private:
  std::vector<at::Tensor> buffers_;
  at::Tensor bytes_; ///< uint8: the order as int64, then the buffers; undefined unless they travel
  size_t order_count_ = 0;
  c10::intrusive_ptr<c10d::Work> work_;
};

} // namespace pycomm
