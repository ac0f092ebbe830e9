#pragma once

// The only place that knows the differences between the torch minors that pycomm builds against, by torch's own
// macros. pycomm/_torch_range.py lists those minors; setup.py refuses the others before it starts a compiler.
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/version.h>

#include <memory>
#include <utility>

namespace pycomm {

/// The factor of a PREMUL_SUM.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#endif

/// Gives an int that is a member of one of torch's objects another value. Up to torch 2.13 a rank and a size are `const` there: a new object
/// takes the place of the old one, as C++20 allows for a const member (not for a const variable; [basic.life], 8).
inline void renumber(const int& member, int value) {
  std::construct_at(const_cast<int*>(&member), value);
}

/// torch 2.14 changes the rank and the size of a ProcessGroup itself, but only in its own reconfigure().
struct NumbersOfProcessGroup final : c10d::ProcessGroup {
  static void set(c10d::ProcessGroup& group, int rank, int size) {
    renumber(group.*(&NumbersOfProcessGroup::rank_), rank);
    renumber(group.*(&NumbersOfProcessGroup::size_), size);
  }
};

/// Holds a node of the autograd graph: a shared_ptr up to torch 2.12, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

template <typename T, typename... Args>
[[nodiscard]] NodePtr makeNode(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  } else {
    return std::make_shared<T>(std::forward<Args>(args)...);
  }
}

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
