#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <utility>

#include "ddp/shared_state.h"

namespace pycomm {

/// Which parameters had a gradient since the last reduction, on any rank: those that had none anywhere keep their .grad.
///
/// mark() collects on this rank, launch() starts the sum over ranks, anywhere() waits for it if this rank had no gradient itself.
/// Parameters are marked anew for each reduction, until SharedValues::knows_used: the graph is static, and the answer holds.
class UsedParams {
 public:
  /// `state`: outlives this.
  explicit UsedParams(const SharedState& state);

  void mark(size_t index);
  /// `device`: where the group reduces. Does nothing once the answer is known.
  void launch(c10d::ProcessGroup& group, c10::Device device);
  [[nodiscard]] bool anywhere(size_t index);
  /// As far as this rank knows now, without waiting.
  [[nodiscard]] bool mayBeUnused(size_t index) const;
  /// Waits for the sum that launch() started, if there is one.
  void await();

  /// Forgets the marks, unless the answer is known.
  void clear();
  /// Whether anywhere() never waits.
  [[nodiscard]] bool kept() const noexcept {
    return state_.now().knows_used;
  }
  [[nodiscard]] int64_t takeWaitedNs() noexcept {
    return std::exchange(waited_ns_, 0);
  }

 private:
  const SharedState& state_;
  at::Tensor here_; ///< int32 by parameter: 1 if a gradient came
  at::Tensor sums_; ///< of here_, over ranks
  c10::intrusive_ptr<c10d::Work> work_; ///< null unless sums_ is reduced now
  int64_t waited_ns_ = 0;
};

} // namespace pycomm
