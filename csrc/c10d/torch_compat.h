#pragma once

// The only place that knows the differences between the torch minors that pycomm builds against, by torch's own
// macros. pycomm/_torch_range.py lists those minors; setup.py refuses the others before it starts a compiler.
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/version.h>

#include <utility>

namespace pycomm {

/// The factor of a PREMUL_SUM.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#endif

/// Holds a node of the autograd graph: a shared_ptr up to torch 2.12, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// Whether the weak pointer is one to this node, which lives. Without counting a reference.
template <typename Weak, typename Pointer>
[[nodiscard]] bool refersTo(const Weak& weak, const Pointer& node) {
  if constexpr (requires { weak._unsafe_get_target(); }) {
    return weak._unsafe_get_target() == node.get();
  } else {
    return !weak.owner_before(node) && !node.owner_before(weak);
  }
}

} // namespace pycomm
