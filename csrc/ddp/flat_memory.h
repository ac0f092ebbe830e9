#pragma once

#include <ATen/core/Tensor.h>

namespace pycomm {

/// Allocates the memory of buckets. Every tensor is flat and zero.
class FlatMemory {
 public:
  struct Flat {
    at::Tensor tensor;
    bool shared = false; ///< the other ranks can reach it
  };

  /// `reachable`: the ranks share a host and reach each other's tensors in place. See SharedHeap.
  explicit FlatMemory(bool reachable) : reachable_(reachable) {}

  [[nodiscard]] at::Tensor zeros(size_t numel, const at::TensorOptions& options) const;
  /// Memory that the ranks share if they can: for a tensor on the CPU that the all-reduce reads and writes as it is. If there is no
  /// room, this logs a warning once and returns ordinary memory from then on.
  [[nodiscard]] Flat zerosToShare(size_t numel, const at::TensorOptions& options);

  /// On the CPU, in pages of their own, which exist from the first write on and go back to the system when the tensor is freed. Small
  /// tensors, and all if the system has no more mappings, are torch's own.
  ///
  /// Buckets are as large as the gradients and are freed while training goes on, when their order becomes known. Freeing one block of
  /// malloc's raises its dynamic mmap threshold; later gradients then come from the heap and fragment it: 284 MB of holes beside
  /// 101 MB of gradients after 14 steps.
  [[nodiscard]] static at::Tensor zerosInPages(size_t numel, at::ScalarType dtype);

 private:
  bool reachable_;
};

} // namespace pycomm
