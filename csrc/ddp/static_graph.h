#pragma once

#include <cstddef>
#include <vector>

namespace pycomm {

/// static_graph=True: the graph is the same in every pass, so the first pass shows how often each parameter's gradient comes, and a
/// parameter is ready when its gradient has come for the last time. Whether the first pass is over is in SharedValues.
class StaticGraph {
 public:
  explicit StaticGraph(size_t param_count) : times_(param_count, 0) {}

  /// In the first pass: a gradient came.
  void count(size_t index) {
    ++times_[index];
  }
  [[nodiscard]] bool reaches(size_t index) const {
    return times_[index] > 0;
  }
  void beginPass() {
    awaited_ = times_;
  }
  /// After the first pass: whether this gradient is the parameter's last in this pass.
  [[nodiscard]] bool isLast(size_t index) {
    return awaited_[index] <= 1 || --awaited_[index] == 0;
  }

 private:
  std::vector<int> times_; ///< by parameter: its gradients per pass
  std::vector<int> awaited_; ///< by parameter: its gradients still to come in this pass
};

} // namespace pycomm
