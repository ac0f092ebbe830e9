#pragma once

namespace pycomm {

/// Inside this scope the thread's sums travel in their own dtype, whatever the codec of their group or chain. For averages whose
/// own options say how they travel: those of DDP, LocalSGD and the like. Every rank must issue the same operations inside it.
class ExactSums {
 public:
  ExactSums() noexcept;
  ~ExactSums();
  ExactSums(const ExactSums&) = delete;
  ExactSums& operator=(const ExactSums&) = delete;

  /// Whether the calling thread is inside such a scope.
  [[nodiscard]] static bool here() noexcept;
};

} // namespace pycomm
