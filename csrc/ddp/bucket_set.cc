#include "ddp/bucket_set.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "c10d/call_tag.h"
#include "ddp/shared_state.h"

namespace pycomm {
namespace {

/// Parameters of one kind share buckets.
using Kind = std::tuple<at::ScalarType, std::optional<at::ScalarType>, Codec, int>;

Kind kindOf(const ReducedParam& param) {
  const int device = param.tensor.is_cpu() ? -1 : param.tensor.device().index();
  return {param.tensor.scalar_type(), param.wire_dtype, param.codec, device};
}

/// A bucket, and when it will be complete: the place of its last member in the order.
using Planned = std::pair<size_t, std::vector<size_t>>;

/// One kind: `places` are its members' places in `order`, ascending.
void planKind(
    const std::vector<size_t>& places,
    const std::vector<size_t>& order,
    const std::vector<ReducedParam>& params,
    const BucketCaps& caps,
    std::vector<Planned>& planned) {
  const auto nbytes = [&](size_t i) { return params[order[places[i]]].tensor.nbytes(); };
  size_t tail = places.size(); // the last bucket begins here
  for (size_t sum = 0; caps.last_nbytes > 0 && tail > 0; --tail) {
    sum += nbytes(tail - 1);
    if (sum > caps.last_nbytes && tail < places.size()) {
      break;
    }
  }
  Planned open;
  size_t filled = 0;
  size_t closed = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    open.first = places[i];
    open.second.push_back(order[places[i]]);
    filled += nbytes(i);
    const size_t cap = caps.nbytes[std::min(closed, caps.nbytes.size() - 1)];
    const bool full = i < tail && filled >= cap;
    if (full || i + 1 == tail || i + 1 == places.size()) {
      planned.push_back(std::exchange(open, {}));
      filled = 0;
      ++closed;
    }
  }
}

/// Cuts the gradients, in the order in which they come, into buckets: each entry the indices of one bucket.
std::vector<std::vector<size_t>> planBuckets(
    const std::vector<size_t>& order,
    const std::vector<ReducedParam>& params,
    const BucketCaps& caps) {
  std::map<Kind, std::vector<size_t>> kinds;
  std::vector<Planned> planned;
  for (size_t place = 0; place < order.size(); ++place) {
    const ReducedParam& param = params[order[place]];
    if (param.sparse) {
      planned.push_back({place, {order[place]}});
    } else {
      kinds[kindOf(param)].push_back(place);
    }
  }
  for (const auto& [kind, places] : kinds) {
    planKind(places, order, params, caps, planned);
  }
  std::sort(planned.begin(), planned.end(), [](const Planned& a, const Planned& b) { return a.first < b.first; });
  std::vector<std::vector<size_t>> buckets;
  buckets.reserve(planned.size());
  for (Planned& bucket : planned) {
    buckets.push_back(std::move(bucket.second));
  }
  return buckets;
}

/// Of a bucket's index and its parameters' names, the same on all ranks: see CallTag.
uint32_t tagOf(size_t bucket, const std::vector<size_t>& indices, const std::vector<ReducedParam>& params) {
  uint32_t tag = CallTag::of("bucket " + std::to_string(bucket));
  for (const size_t index : indices) {
    tag = CallTag::of(params[index].name, tag);
  }
  return tag;
}

} // namespace

// --- their order ----------------------------------------------------------------------------------

std::vector<size_t> GradientOrder::seen(const std::vector<size_t>& expected) const {
  std::vector<size_t> seen;
  std::vector<bool> listed(expected.size(), false);
  for (size_t i = came_.size(); i-- > 0;) {
    if (!listed[came_[i]]) {
      listed[came_[i]] = true;
      seen.push_back(came_[i]);
    }
  }
  std::reverse(seen.begin(), seen.end());
  std::copy_if(
      expected.begin(), expected.end(), std::back_inserter(seen), [&](size_t param) { return !listed[param]; });
  return seen;
}

void checkOrder(std::vector<size_t> order, size_t count) {
  std::sort(order.begin(), order.end());
  for (size_t param = 0; param < count; ++param) {
    TORCH_CHECK(
        order.size() == count && order[param] == param,
        "rank 0 sent an invalid order of buckets: it is not a permutation of the parameters");
  }
}

// --- buckets --------------------------------------------------------------------------------------

void BucketSet::cut(
    const WireContext& context,
    FlatMemory& memory,
    const std::vector<size_t>& order,
    const std::vector<int>& exponents) {
  const std::map<std::string, at::Tensor> residuals_before = residuals();
  feeds_back_ = context.options.error_feedback && !context.hook_averages;
  const auto planned = planBuckets(order, params_, context.options.caps);
  buckets_.clear();
  buckets_.reserve(planned.size());
  places_.assign(params_.size(), Place{planned.size(), 0});
  for (const std::vector<size_t>& indices : planned) {
    const size_t bucket = buckets_.size();
    int exponent = SharedValues::kUnscaled;
    for (size_t slot = 0; slot < indices.size(); ++slot) {
      places_[indices[slot]] = {bucket, slot};
      exponent = std::min(exponent, exponents[indices[slot]]);
    }
    buckets_.emplace_back(
        context,
        params_,
        indices,
        exponent == SharedValues::kUnscaled ? 0 : exponent,
        tagOf(bucket, indices, params_),
        memory);
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
      names.back().push_back(params_[slot.index].name);
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

std::map<std::string, at::Tensor> BucketSet::residuals() const {
  std::map<std::string, at::Tensor> found;
  for (const Bucket& bucket : buckets_) {
    const at::Tensor residual = bucket.residual();
    if (!residual.defined()) {
      continue;
    }
    for (const Slot& slot : bucket.slots()) {
      found[params_[slot.index].name] = BucketMemory::partOf(residual, slot);
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
    at::Tensor residual = bucket.residual();
    if (residual.defined()) {
      factor == 0 ? residual.zero_() : residual.mul_(factor);
    }
  }
  for (auto& [name, residual] : aside_) {
    factor == 0 ? residual.zero_() : residual.mul_(factor);
  }
}

bool BucketSet::forgetResiduals() {
  if (!keepsResiduals()) {
    return false;
  }
  scaleResiduals(0);
  return true;
}

bool BucketSet::keepsResidualOf(const ReducedParam& param) const {
  return feeds_back_ && param.codec != Codec::None && !param.sparse;
}

bool BucketSet::keepsResiduals() const {
  return std::any_of(
      params_.begin(), params_.end(), [this](const ReducedParam& param) { return keepsResidualOf(param); });
}

void BucketSet::checkResiduals(const std::map<std::string, at::Tensor>& values) const {
  std::map<std::string, at::IntArrayRef> encoded; // shapes of all parameters with error feedback, frozen ones included
  for (const ReducedParam& param : params_) {
    if (keepsResidualOf(param)) {
      encoded[param.name] = param.tensor.sizes();
    }
  }
  for (const auto& [name, tensor] : values) {
    const auto shape = encoded.find(name);
    TORCH_CHECK_VALUE(shape != encoded.end(), "no parameter '", name, "' has error feedback here");
    TORCH_CHECK_VALUE(
        tensor.layout() == at::kStrided && tensor.is_floating_point() && tensor.sizes() == shape->second,
        "the residual of parameter '",
        name,
        "' is of another shape here, or no dense tensor of floats");
  }
}

void BucketSet::setResiduals(const std::map<std::string, at::Tensor>& values) {
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
}

} // namespace pycomm
