#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/flat_memory.h"

namespace pycomm {

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
    size_t tail = 0; ///< elements that travel behind the gradients
    bool grads_are_views = false;
    bool sparse = false;
    bool in_place = false; ///< the all-reduce works in this memory itself, so other ranks may reach it
  };

  /// `source`: allocates flat memory; outlives this. `params`: all of the reducer's, `indices`: those of this bucket.
  BucketMemory(
      const std::vector<at::Tensor>& params,
      const std::vector<size_t>& indices,
      Options options,
      FlatMemory& source);

  std::vector<Slot> slots;
  at::Tensor home;
  at::Tensor cast;

  [[nodiscard]] at::ScalarType dtype() const noexcept {
    return dtype_;
  }
  /// Of the gradients, without the tail.
  [[nodiscard]] size_t numel() const noexcept {
    return numel_;
  }
  [[nodiscard]] bool sparse() const noexcept {
    return options_.sparse;
  }
  [[nodiscard]] bool gradsAreViews() const noexcept {
    return options_.grads_are_views;
  }
  [[nodiscard]] c10::Device device() const {
    return slots[0].param.device();
  }

  /// The tensor that travels. Complex gradients travel as pairs of reals.
  [[nodiscard]] at::Tensor travelling() const;
  /// The elements behind the gradients in cast.
  [[nodiscard]] at::Tensor tail() const;
  /// Bytes of the gradients in their own dtype; of a sparse one, those of the step under way.
  [[nodiscard]] size_t gradientNbytes() const;
  /// Bytes that other ranks reach in place: of travelling(), or 0.
  [[nodiscard]] size_t sharedNbytes() const;

  /// Zeros travel, and no .grad is read or written. Home is replaced if it travels, since .grad may still point into the old one.
  void zero();

  /// Whether a gradient lies in memory as its slot says, in any dtype.
  [[nodiscard]] static bool isPlain(const at::Tensor& grad, const Slot& slot);
  /// Whether a gradient is the slot's part of home.
  [[nodiscard]] static bool isHome(const at::Tensor& grad, const Slot& slot);
  /// The parameter's .grad, made if there is none; a view of home if gradients are views.
  [[nodiscard]] at::Tensor& gradientOf(const Slot& slot) const;
  /// Uninitialised, of the parameter's shape, in the slot's memory order.
  [[nodiscard]] static at::Tensor emptyLike(const Slot& slot, const at::TensorOptions& options);
  /// For autograd, after writing past torch's dispatcher.
  static void bumpVersion(const at::Tensor& written);

 private:
  void allocateHome();

  Options options_;
  FlatMemory* source_; ///< BucketSet's, which declares it before its buckets
  at::ScalarType dtype_;
  size_t numel_ = 0;
  bool shared_ = false; ///< travelling() lies where other ranks reach it
};

} // namespace pycomm
