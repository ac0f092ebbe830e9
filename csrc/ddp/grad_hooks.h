#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "c10d/torch_compat.h"
#include "ddp/reducer_options.h"

namespace pycomm {

/// Calls back when autograd has accumulated a parameter's gradient, and finds parameters that a graph does not reach.
///
/// Each leaf has one gradient accumulator, a graph node that autograd itself holds only weakly. This object keeps
/// them alive; otherwise the hooks would vanish with the first graph.
class GradHooks {
 public:
  /// Called with the parameter's index on the thread that runs backward, without the GIL. It may throw: the error comes
  /// out of backward().
  using OnGradient = std::function<void(size_t index)>;

  /// `hooked`: by parameter, whether it gets a hook. If it throws, no hook is left.
  GradHooks(const std::vector<ReducedParam>& params, const std::vector<bool>& hooked, const OnGradient& on_gradient);
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;
  ~GradHooks();

  /// Whether the hooks are on the accumulators that autograd uses: it makes new ones for parameters whose `data` was of another
  /// dtype or device in between.
  /// Cost: a comparison of pointers for each parameter.
  [[nodiscard]] bool reach() const;

  /// Indices of hooked parameters that no path from `outputs` leads to, ascending. Cost: one visit to each node of the graph.
  [[nodiscard]] std::vector<size_t> unreachableFrom(const std::vector<at::Tensor>& outputs) const;

 private:
  void addHook(const at::Tensor& param, size_t index, const OnGradient& on_gradient);
  void remove();

  struct Hooked {
    at::Tensor param;
    NodePtr accumulator;
    uintptr_t key; ///< what del_post_hook() takes
  };
  std::vector<Hooked> hooked_;
  std::unordered_map<const torch::autograd::Node*, size_t> index_of_; ///< keys live as long as hooked_ holds them
};

} // namespace pycomm
