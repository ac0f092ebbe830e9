#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace pycomm {

/// One call of backward(), followed by a hook that runs in it. Calls nested in it, as those of reentrant checkpoints, are part of it.
///
/// autograd destroys the callbacks queued on a call when the call ends, also by an exception. So a queued callback that does nothing tells
/// when the call is over.
class BackwardCall {
 public:
  /// Only in a hook: follows the call that runs it.
  void follow();
  void forget() noexcept {
    token_.reset();
  }
  [[nodiscard]] bool running() const noexcept {
    return !token_.expired();
  }

 private:
  std::weak_ptr<const void> token_;
};

/// What the graph of one forward pass tells the backward passes that go through it.
struct ForwardMark {
  bool reduces = true; ///< false: the forward pass was in no_sync()
  std::vector<size_t> unreachable; ///< the parameters that no path from its outputs leads to, if that was asked
};

/// Calls `on_entry` whenever a backward pass goes through one of these outputs, before any gradient behind it. Outputs without a graph are
/// left out. An output that is a view may be replaced in the graph by a write in place, so the tensor below it counts, too.
///
/// No node is added, and nothing is copied.
void markGraph(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_entry);

/// Throws: compiled autograd calls no hook of the reducer.
[[noreturn]] void raiseCompiledAutograd();

} // namespace pycomm
