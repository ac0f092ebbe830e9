#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace pycomm {

/// CPU memory in this process's SharedHeap, which the other ranks of its host reach in place. Its blocks keep the heap alive. Lives as
/// long as the process: a tensor that is resized calls it again. `allocate` throws the errors of Engine::heap and SharedHeap::allocate.
[[nodiscard]] c10::Allocator& heapAllocator();

/// A contiguous tensor on the CPU in this process's heap; its elements are zero. Throws the errors of `allocate`.
[[nodiscard]] at::Tensor emptyShared(at::IntArrayRef sizes, at::ScalarType dtype);

} // namespace pycomm
