#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace pycomm {

/// One call of backward(), followed by a hook that runs in it. Calls nested in it, as those of reentrant checkpoints, are part of it.
///
/// autograd runs the callbacks queued on a call when its last gradient has come, and destroys them with the call, also after an exception.
/// So a queued callback tells when the call is over. Not their destruction alone, as a thread may keep the call's state for a while: a
/// device's worker, or the thread that is in a later callback of it. After an exception it is that alone, so the owner of this forgets
/// the call with the next forward pass.
class BackwardCall {
 public:
  /// Only in a hook: follows the call that runs it.
  void follow();
  void forget() noexcept {
    over_.reset();
  }
  [[nodiscard]] bool running() const noexcept {
    const auto over = over_.lock();
    return over != nullptr && !over->load(std::memory_order_acquire);
  }

 private:
  std::weak_ptr<const std::atomic<bool>> over_; ///< the queued callback has it
};

/// What the graph of one forward pass tells the backward passes that go through it.
struct ForwardMark {
  bool reduces = true; ///< false: the forward pass was in no_sync()
  double weight = 1.0; ///< see PassWeights
  std::vector<size_t> unreachable; ///< the parameters that no path from its outputs leads to, if that was asked
};

/// Calls `on_entry` whenever a backward pass goes through one of these outputs, before any gradient behind it. Outputs without a graph are
/// left out. An output that is a view may be replaced in the graph by a write in place, so the tensor below it counts, too.
/// False if none has a graph.
///
/// No node is added, and nothing is copied.
bool markGraph(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_entry);

/// Throws: compiled autograd calls no hook of the reducer.
[[noreturn]] void raiseCompiledAutograd();

} // namespace pycomm
