#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ddp/bucket.h"

namespace pycomm {

/// The order in which the gradients of the first reduction came on this rank. The expected order, which ranks share, is in SharedValues.
class GradientOrder {
 public:
  /// A gradient came. May be called several times for one parameter.
  void came(size_t param) {
    came_.push_back(param);
  }
  void clear() noexcept {
    came_.clear();
  }

  /// `expected` in the order of came(): the last time counts. Parameters without a gradient (frozen, or this rank had no
  /// data) go to the end in their present order.
  [[nodiscard]] std::vector<size_t> seen(const std::vector<size_t>& expected) const;

 private:
  std::vector<size_t> came_;
};

/// Throws unless rank 0's `order` is a permutation of `count` parameters.
void checkOrder(std::vector<size_t> order, size_t count);

/// All buckets of a reducer, and the place of each parameter in them.
///
/// They are cut again while training goes on. The state of a bucket's wire follows its parameters: a new bucket begins with the least
/// scale of the buckets that its parameters come from, and with their residuals. That of a parameter without a bucket, which has left the
/// buckets or is frozen when a checkpoint is loaded, is kept aside until it has one.
///
/// Gradients of one kind share buckets: of one dtype and device, which travel alike. Each kind is cut in the order in which its gradients come.
/// The first bucket is small, so that the network has something to do early. The last one is small, because backward is over when it leaves:
/// all of it is exposed. A sparse gradient has a bucket of its own. Buckets are launched in the order in which they will be complete.
///
/// Example: caps 1 MiB then 4, last 1; sizes 0.5 0.5 2 2 2 2 0.5 0.25 give {0.5 0.5} {2 2} {2 2} {0.5 0.25}.
class BucketSet {
 public:
  /// `params`: the reducer's, which outlive this.
  explicit BucketSet(const std::vector<ReducedParam>& params) : params_(params) {}

  struct Place {
    size_t bucket;
    size_t slot;
  };

  /// Leaves no bucket, and no state of a wire.
  void clear() noexcept {
    buckets_.clear();
    aside_.clear();
  }

  /// `memory`: outlives the buckets. `order`: the parameters that have a bucket, as their gradients are expected. `exponents`: see SharedValues.
  void cut(
      const WireContext& context,
      FlatMemory& memory,
      const std::vector<size_t>& order,
      const std::vector<int>& exponents);

  /// The step is over: writes the exponents of the next one.
  void commit(std::vector<int>& exponents) noexcept;

  /// In launch order.
  [[nodiscard]] std::vector<Bucket>& all() noexcept {
    return buckets_;
  }
  [[nodiscard]] const std::vector<Bucket>& all() const noexcept {
    return buckets_;
  }
  /// Of a parameter that has a bucket.
  [[nodiscard]] Place placeOf(size_t param) const {
    return places_[param];
  }

  /// Names of each bucket's parameters.
  [[nodiscard]] std::vector<std::vector<std::string>> names() const;
  /// Bytes of each bucket's gradients in their own dtype.
  [[nodiscard]] std::vector<size_t> gradientNbytes() const;
  /// Bytes of all buckets that other ranks reach in place.
  [[nodiscard]] size_t sharedNbytes() const;

  /// Copies of the values that error feedback keeps, by parameter name, in the parameters' shapes.
  [[nodiscard]] std::map<std::string, at::Tensor> copyResiduals() const;
  /// Throws a ValueError unless these are of the form of copyResiduals(): whose names and shapes are known here.
  void checkResiduals(const std::map<std::string, at::Tensor>& values) const;
  /// Takes values that checkResiduals() lets pass; parameters that they lack get zeros.
  void setResiduals(const std::map<std::string, at::Tensor>& values);
  /// Multiplies what error feedback keeps, also aside; 0 forgets it, also if it is not finite.
  void scaleResiduals(double factor);
  /// The program drops a step with an average that is not finite. False if error feedback keeps nothing here.
  bool forgetResiduals();
  /// Whether a parameter has error feedback here, frozen ones included.
  [[nodiscard]] bool keepsResiduals() const;

 private:
  [[nodiscard]] bool keepsResidualOf(const ReducedParam& param) const;
  /// The wires' own memory.
  [[nodiscard]] std::map<std::string, at::Tensor> residuals() const;

  const std::vector<ReducedParam>& params_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_; ///< by parameter
  bool feeds_back_ = false; ///< residuals are kept
  std::map<std::string, at::Tensor> aside_; ///< residuals of parameters without a bucket
};

} // namespace pycomm
