#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace pycomm {

/// CPU memory in this process's SharedHeap, which the other ranks of its host reach in place. Its blocks keep the heap alive. Lives as
/// long as the process: a tensor that is resized asks it again. `allocate` throws what Engine::heap and SharedHeap::allocate throw.
[[nodiscard]] c10::Allocator& heapAllocator();

/// A contiguous tensor on the CPU in this process's heap; its elements are zero. Throws what `allocate` throws.
[[nodiscard]] at::Tensor emptyShared(at::IntArrayRef sizes, at::ScalarType dtype);

} // namespace pycomm
