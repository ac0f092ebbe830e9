#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ddp/bucket.h"
#include "ddp/bucket_plan.h"
#include "ddp/reduced_param.h"

namespace pycomm {

/// All buckets of a reducer, and the place of each parameter in them.
///
/// They are cut again while training goes on. The state of a bucket's wire follows its parameters: a new bucket begins with the least
/// scale of the buckets that its parameters come from, and with the loss that error feedback has kept for them. The loss of a parameter that
/// has left the buckets is kept aside until it is back; one that never had a bucket has none.
class BucketSet {
 public:
  struct Place {
    size_t bucket;
    size_t slot;
  };

  /// Leaves no bucket, and no state of a wire.
  void clear() noexcept {
    buckets_.clear();
    aside_.clear();
  }

  /// Where buckets get memory from now on. Cut them again after this.
  void setSource(FlatMemory source) {
    source_ = source;
  }

  /// `order`: the parameters that have a bucket, as their gradients are expected. `common`: the options that all
  /// buckets share. Each bucket's wire dtype, codec and kind of gradient are those of its parameters. `exponents`: see SharedValues.
  void cut(
      const std::vector<ReducedParam>& params,
      const std::vector<size_t>& order,
      const BucketCaps& caps,
      const BucketOptions& common,
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
  /// Of each bucket's index and its parameters' names, the same on all ranks: see CallTag.
  [[nodiscard]] std::vector<uint32_t> tags() const;

  /// Copies of the values that error feedback keeps, by parameter name, in the parameters' shapes.
  [[nodiscard]] std::map<std::string, at::Tensor> copyResiduals() const;
  /// Takes values of the form of copyResiduals(); parameters that they lack get zeros. False if a name or shape is unknown: then
  /// nothing is done, and `why` says which.
  [[nodiscard]] bool setResiduals(const std::map<std::string, at::Tensor>& values, std::string& why);
  /// Multiplies what error feedback keeps; 0 forgets it, also if it is not finite.
  void scaleResiduals(double factor);
  /// Whether error feedback keeps anything here.
  [[nodiscard]] bool keepsResiduals() const;

 private:
  /// The wires' own memory.
  [[nodiscard]] std::map<std::string, at::Tensor> residuals() const;

  FlatMemory source_{false}; ///< before buckets_, which point to it
  std::vector<Bucket> buckets_;
  std::vector<Place> places_; ///< by parameter
  std::vector<std::string> names_; ///< by parameter
  std::map<std::string, std::vector<int64_t>>
      encoded_; ///< shapes, by name, of parameters with error feedback, frozen ones included
  std::map<std::string, at::Tensor> aside_; ///< residuals of those that have left the buckets
};

} // namespace pycomm
