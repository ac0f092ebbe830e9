#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <utility>

namespace pycomm {

/// Which parameters had a gradient since the last reduction, on any rank: those that had none anywhere keep their .grad.
///
/// mark() collects on this rank, launch() starts the sum over ranks, anywhere() waits for it if this rank had no gradient itself.
/// Until keep(), parameters are marked anew for each reduction.
class UsedParams {
 public:
  explicit UsedParams(size_t param_count);

  void mark(size_t index);
  /// `device`: where the group reduces. Does nothing after keep().
  void launch(c10d::ProcessGroup& group, c10::Device device);
  [[nodiscard]] bool anywhere(size_t index);
  /// Waits for the sum that launch() started, if there is one.
  void await();

  /// Forgets the marks, except after keep().
  void clear();
  /// The answer holds for all later reductions: the graph is static.
  void keep() noexcept {
    kept_ = true;
  }
  /// Whether anywhere() never waits.
  [[nodiscard]] bool kept() const noexcept {
    return kept_;
  }
  [[nodiscard]] int64_t takeWaitedNs() noexcept {
    return std::exchange(waited_ns_, 0);
  }

 private:
  at::Tensor here_; ///< int32 by parameter: 1 if a gradient came
  at::Tensor sums_; ///< of here_, over ranks
  c10::intrusive_ptr<c10d::Work> work_; ///< null unless sums_ is reduced now
  bool kept_ = false;
  int64_t waited_ns_ = 0;
};

} // namespace pycomm
