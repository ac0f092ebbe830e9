#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/reducer_options.h"

namespace pycomm {

/// Allocates the memory of buckets. Every tensor is flat and zero.
class FlatMemory {
 public:
  /// `reachable`: the ranks share a host and reach each other's tensors in place. See SharedHeap.
  explicit FlatMemory(bool reachable) : reachable_(reachable) {}

  /// On the CPU, in pages of their own, which exist from the first write on and go back to the system when the tensor is freed. Small
  /// tensors, and all if the system has no more mappings, are torch's own.
  ///
  /// Buckets are as large as the gradients and are freed while training goes on, when their order becomes known. Freeing one block of
  /// malloc's raises its dynamic mmap threshold; later gradients then come from the heap and fragment it: 284 MB of holes beside
  /// 101 MB of gradients after 14 steps.
  [[nodiscard]] static at::Tensor zeros(size_t numel, const at::TensorOptions& options);
  /// Memory that the ranks share if they can: for a tensor on the CPU that the all-reduce reads and writes as it is. If there is no
  /// room, this logs a warning once and returns ordinary memory from then on.
  [[nodiscard]] at::Tensor zerosToShare(size_t numel, const at::TensorOptions& options);

 private:
  bool reachable_;
};

/// One gradient of a bucket.
struct Slot {
  at::Tensor param;
  size_t index = 0; ///< in the reducer's list of parameters
  size_t offset = 0; ///< in elements
  size_t numel = 0;
  std::vector<int64_t> strides; ///< of the gradient in memory
  at::Tensor view; ///< into home, if there is one
};

/// The slots of a bucket and its two flat tensors, either of which may be missing.
///
/// `home` has the parameters' dtype: .grad points into it if gradients are views, and comm hooks see it. `cast` has the dtype
/// that gradients travel in, if that is not their own; else home travels. Both hold each gradient in the memory order of its
/// parameter, which all ranks share.
///
/// A sparse gradient has no flat memory. Its bucket has one slot, and home is the gradient itself while it is reduced.
class BucketMemory {
 public:
  struct Options {
    std::optional<at::ScalarType> cast; ///< none: home travels
    size_t tail = 0; ///< elements that travel behind the gradients; 0 without a cast
    bool grads_are_views = false;
    bool in_place = false; ///< the all-reduce works in this memory itself, so other ranks may reach it
  };

  /// `source`: allocates flat memory; outlives this. `params`: all of the reducer's, `indices`: those of this bucket.
  BucketMemory(
      const std::vector<ReducedParam>& params,
      const std::vector<size_t>& indices,
      const Options& options,
      FlatMemory& source);

  std::vector<Slot> slots;
  at::Tensor home;
  at::Tensor cast;
  at::Tensor tail; ///< the elements behind the gradients in cast, if there are any

  [[nodiscard]] at::ScalarType dtype() const noexcept {
    return dtype_;
  }
  [[nodiscard]] bool sparse() const noexcept {
    return sparse_;
  }
  [[nodiscard]] bool gradsAreViews() const noexcept {
    return grads_are_views_;
  }
  [[nodiscard]] c10::Device device() const {
    return slots[0].param.device();
  }

  /// The tensor that travels. Complex gradients travel as pairs of reals.
  [[nodiscard]] at::Tensor travelling() const;
  /// Bytes of the gradients in their own dtype; of a sparse one, those of the step under way.
  [[nodiscard]] size_t gradientNbytes() const;
  /// Bytes that other ranks reach in place: of travelling(), or 0.
  [[nodiscard]] size_t sharedNbytes() const;

  /// Zeros travel, and no .grad is read or written. Home is replaced if it travels, since .grad may still point into the old one.
  void zero();

  /// Whether a gradient lies in memory as its slot says, in any dtype: every dimension of more than one element has the slot's stride, and
  /// no lazy negation or conjugation is pending. Autograd makes lazily negated gradients for the imaginary part of a conjugated complex
  /// number.
  [[nodiscard]] static bool isPlain(const at::Tensor& grad, const Slot& slot);
  /// Whether a gradient is the slot's part of home.
  [[nodiscard]] static bool isHome(const at::Tensor& grad, const Slot& slot);
  /// The parameter's .grad, made if there is none; a view of home if gradients are views.
  [[nodiscard]] at::Tensor& gradientOf(const Slot& slot) const;
  /// The slot's part of a flat tensor, in its parameter's shape.
  [[nodiscard]] static at::Tensor partOf(const at::Tensor& flat, const Slot& slot);
  /// Uninitialised, of the parameter's shape, in the slot's memory order.
  [[nodiscard]] static at::Tensor emptyLike(const Slot& slot, const at::TensorOptions& options);
  /// For autograd, after writing past torch's dispatcher.
  static void bumpVersion(const at::Tensor& written);

 private:
  void allocateHome();

  FlatMemory* source_; ///< the group's, which outlives the buckets
  at::ScalarType dtype_;
  bool sparse_;
  bool grads_are_views_;
  bool in_place_;
  size_t numel_ = 0; ///< of the gradients, without the tail
};

} // namespace pycomm
