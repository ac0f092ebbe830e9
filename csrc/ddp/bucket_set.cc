#include "ddp/bucket_set.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

#include "c10d/call_tag.h"
#include "ddp/shared_state.h"

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
    const BucketOptions& common,
    const std::vector<int>& exponents) {
  std::vector<at::Tensor> tensors;
  std::vector<BucketMember> members;
  const std::map<std::string, at::Tensor> residuals_before = residuals();
  names_.clear();
  encoded_.clear();
  for (const ReducedParam& param : params) {
    names_.push_back(param.name);
    if (param.codec != Codec::None && common.wire.error_feedback && !common.wire.hook_averages && !param.sparse) {
      encoded_[param.name] = param.tensor.sizes().vec();
    }
    tensors.push_back(param.tensor);
    members.push_back({param.tensor.nbytes(), kindOf(param), param.sparse});
  }
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
    int exponent = SharedValues::kUnscaled;
    for (size_t slot = 0; slot < indices.size(); ++slot) {
      places_[indices[slot]] = {buckets_.size(), slot};
      exponent = std::min(exponent, exponents[indices[slot]]);
    }
    options.wire.exponent = exponent == SharedValues::kUnscaled ? 0 : exponent;
    buckets_.emplace_back(tensors, indices, options, source_);
  }
  std::map<std::string, at::Tensor> rooms = residuals();
  for (const auto& [name, kept] : residuals_before) {
    if (rooms.find(name) == rooms.end()) {
      aside_[name] = kept.clone();
    }
  }
  for (auto& [name, room] : rooms) {
    const auto before = residuals_before.find(name);
    if (before != residuals_before.end()) {
      room.copy_(before->second);
    } else if (const auto aside = aside_.extract(name)) {
      room.copy_(aside.mapped());
    }
  }
}

void BucketSet::commit(std::vector<int>& exponents) noexcept {
  for (Bucket& bucket : buckets_) {
    const std::optional<int> exponent = bucket.commit();
    for (const Slot& slot : bucket.slots()) {
      if (exponent.has_value()) {
        exponents[slot.index] = *exponent;
      }
    }
  }
}

std::vector<std::vector<std::string>> BucketSet::names() const {
  std::vector<std::vector<std::string>> names;
  for (const Bucket& bucket : buckets_) {
    names.emplace_back();
    for (const Slot& slot : bucket.slots()) {
      names.back().push_back(names_[slot.index]);
    }
  }
  return names;
}

std::vector<size_t> BucketSet::gradientNbytes() const {
  std::vector<size_t> sizes;
  for (const Bucket& bucket : buckets_) {
    sizes.push_back(bucket.memory().gradientNbytes());
  }
  return sizes;
}

size_t BucketSet::sharedNbytes() const {
  size_t nbytes = 0;
  for (const Bucket& bucket : buckets_) {
    nbytes += bucket.memory().sharedNbytes();
  }
  return nbytes;
}

std::vector<uint32_t> BucketSet::tags() const {
  std::vector<uint32_t> tags;
  for (const std::vector<std::string>& names : names()) {
    uint32_t tag = CallTag::of("bucket " + std::to_string(tags.size()));
    for (const std::string& name : names) {
      tag = CallTag::of(name, tag);
    }
    tags.push_back(tag);
  }
  return tags;
}

std::map<std::string, at::Tensor> BucketSet::residuals() const {
  std::map<std::string, at::Tensor> found;
  for (const Bucket& bucket : buckets_) {
    if (!bucket.wire().residual().defined()) {
      continue;
    }
    for (const Slot& slot : bucket.slots()) {
      found[names_[slot.index]] = bucket.residualOf(slot);
    }
  }
  return found;
}

std::map<std::string, at::Tensor> BucketSet::copyResiduals() const {
  std::map<std::string, at::Tensor> copies = residuals();
  copies.insert(aside_.begin(), aside_.end());
  for (auto& [name, tensor] : copies) {
    tensor = tensor.clone(at::MemoryFormat::Contiguous);
  }
  return copies;
}

void BucketSet::scaleResiduals(double factor) {
  const at::NoGradGuard no_grad;
  for (const Bucket& bucket : buckets_) {
    at::Tensor residual = bucket.wire().residual();
    if (residual.defined()) {
      factor == 0 ? residual.zero_() : residual.mul_(factor);
    }
  }
  for (auto& [name, residual] : aside_) {
    factor == 0 ? residual.zero_() : residual.mul_(factor);
  }
}

bool BucketSet::keepsResiduals() const {
  return std::any_of(
      buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return bucket.wire().residual().defined(); });
}

bool BucketSet::setResiduals(const std::map<std::string, at::Tensor>& values, std::string& why) {
  for (const auto& [name, tensor] : values) {
    const auto shape = encoded_.find(name);
    if (shape == encoded_.end() || tensor.sizes() != shape->second) {
      why = shape == encoded_.end() ? "no parameter '" + name + "' has error feedback here"
                                    : "the residual of parameter '" + name + "' is of another shape here";
      return false;
    }
  }
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> rooms = residuals();
  aside_.clear();
  for (auto& [name, room] : rooms) {
    const auto found = values.find(name);
    found == values.end() ? room.zero_() : room.copy_(found->second);
  }
  for (const auto& [name, tensor] : values) {
    if (rooms.find(name) == rooms.end()) { // it is frozen now
      aside_[name] = tensor.to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    }
  }
  return true;
}

} // namespace pycomm
