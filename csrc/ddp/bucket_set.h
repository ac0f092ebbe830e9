#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ddp/bucket.h"
#include "ddp/bucket_plan.h"

namespace pycomm {

/// One parameter of the model, trainable or frozen.
struct ReducedParam {
  at::Tensor tensor;
  std::string name; ///< for errors
  std::optional<at::ScalarType> wire_dtype; ///< none: its own
  Codec codec = Codec::None; ///< with a comm hook what the hook's sums travel as, else with a wire dtype of fp32
  bool sparse = false; ///< its gradients are sparse
};

/// All buckets of a reducer, and which parameter lies where.
///
/// They are cut again while training goes on. What a bucket's wire keeps from step to step follows its parameters: a new bucket
/// begins with the least scale of those that its parameters come from, and with what their codec had lost.
class BucketSet {
 public:
  struct Place {
    size_t bucket;
    size_t slot;
  };

  /// Where buckets that are cut from now on get their memory.
  void setSource(FlatMemory source) {
    source_ = source;
  }

  /// `order`: the parameters that have a bucket, as their gradients are expected. `common`: what all buckets share; each bucket's
  /// wire dtype, codec and kind of gradient are its parameters'.
  void cut(
      const std::vector<ReducedParam>& params,
      const std::vector<size_t>& order,
      const BucketCaps& caps,
      const BucketOptions& common);

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

  /// What error feedback holds, by parameter, in its shape: the wires' own memory.
  [[nodiscard]] std::map<size_t, at::Tensor> lost() const;

 private:
  FlatMemory source_{false}; ///< before buckets_, which point to it
  std::vector<Bucket> buckets_;
  std::vector<Place> places_; ///< by parameter
};

} // namespace pycomm
