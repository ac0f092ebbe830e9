#include "ddp/bucket_set.h"

#include <ATen/core/TensorBody.h>

#include <algorithm>

namespace pycomm {
namespace {

/// Parameters of one kind share buckets.
int kindOf(const ReducedParam& param) {
  const int wire = param.wire_dtype.has_value() ? static_cast<int>(*param.wire_dtype) + 1 : 0;
  const int kind = (static_cast<int>(param.tensor.scalar_type()) * 1000 + wire) * 16 + static_cast<int>(param.codec);
  return kind * 128 + (param.tensor.is_cpu() ? 0 : param.tensor.device().index() + 1);
}

} // namespace

void BucketSet::cut(
    const std::vector<ReducedParam>& params,
    const std::vector<size_t>& order,
    const BucketCaps& caps,
    const BucketOptions& common) {
  std::vector<at::Tensor> tensors;
  std::vector<BucketMember> members;
  for (const ReducedParam& param : params) {
    tensors.push_back(param.tensor);
    members.push_back({param.tensor.nbytes(), kindOf(param), param.sparse});
  }
  std::map<size_t, int> exponents;
  for (const Bucket& bucket : buckets_) {
    for (const Slot& slot : bucket.slots()) {
      exponents[slot.index] = bucket.wire().exponent();
    }
  }
  const std::map<size_t, at::Tensor> lost_before = lost();
  const auto planned = planBuckets(order, members, caps);
  buckets_.clear();
  buckets_.reserve(planned.size());
  places_.assign(params.size(), Place{planned.size(), 0});
  for (const std::vector<size_t>& indices : planned) {
    const ReducedParam& first = params[indices[0]];
    BucketOptions options = common;
    options.wire.sparse = first.sparse;
    if (!common.wire.hook_averages) {
      options.wire.dtype = first.wire_dtype;
      options.wire.codec = first.codec;
    }
    std::optional<int> exponent;
    for (size_t slot = 0; slot < indices.size(); ++slot) {
      places_[indices[slot]] = {buckets_.size(), slot};
      const auto known = exponents.find(indices[slot]);
      if (known != exponents.end()) {
        exponent = std::min(exponent.value_or(known->second), known->second);
      }
    }
    options.wire.exponent = exponent.value_or(0);
    buckets_.emplace_back(tensors, indices, options, source_);
  }
  for (auto& [param, room] : lost()) {
    const auto known = lost_before.find(param);
    if (known != lost_before.end()) {
      room.copy_(known->second);
    }
  }
}

std::map<size_t, at::Tensor> BucketSet::lost() const {
  std::map<size_t, at::Tensor> found;
  for (const Bucket& bucket : buckets_) {
    if (!bucket.wire().lost().defined()) {
      continue;
    }
    for (const Slot& slot : bucket.slots()) {
      found[slot.index] = bucket.lostOf(slot);
    }
  }
  return found;
}

} // namespace pycomm
