#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "c10d/call_tag.h"
#include "c10d/raising.h"

namespace pycomm {
namespace {

/// Parameters of one kind share buckets.
int kindOf(const ReducedParam& param) {
  const int wire = param.wire_dtype.has_value() ? static_cast<int>(*param.wire_dtype) + 1 : 0;
  const int kind = (static_cast<int>(param.tensor.scalar_type()) * 1000 + wire) * 16 + static_cast<int>(param.codec);
  return kind * 128 + (param.tensor.is_cpu() ? 0 : param.tensor.device().index() + 1);
}

} // namespace

Reducer::Reducer(
    std::vector<ReducedParam> params,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    ReducerOptions options,
    const c10::intrusive_ptr<c10d::Backend>& backend,
    c10::intrusive_ptr<c10d::Store> store)
    : params_(std::move(params)), group_(std::move(group)), options_(std::move(options)) {
  findBackend(backend);
  TORCH_CHECK_VALUE(!options_.caps.nbytes.empty(), "one bucket cap at least");
  TORCH_CHECK_VALUE(options_.accumulate >= 1, "accumulate is 1 or more");
  for (size_t index = params_.size(); index-- > 0;) {
    order_.push_back(index); // backward comes to the last registered parameter first, more or less
  }
  used_ = at::zeros({static_cast<int64_t>(params_.size())}, at::kInt);
  arrivals_.assign(params_.size(), 0);
  adoptTrainable();
  trained_set_.emplace(std::move(store), group_->getRank(), trainable_);
}

void Reducer::findBackend(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const bool encodes =
      std::any_of(params_.begin(), params_.end(), [](const ReducedParam& param) { return param.codec != Codec::None; });
  auto* ours = dynamic_cast<PycommBackend*>(backend.get());
  TORCH_CHECK_VALUE(!encodes || ours != nullptr, "int8 and fp8 on the wire need a process group of pycomm");
  reachable_ = ours != nullptr && ours->supportsTensorAlloc(-1);
  codec_backend_ = encodes ? c10::intrusive_ptr<PycommBackend>::reclaim_copy(ours) : nullptr;
}

// Where tensors of the reducer's own are reduced and broadcast: on the CPU, so that reading them waits for no device, unless
// the group serves only the parameters' device.
c10::Device Reducer::ownDevice(c10d::ProcessGroup& group) const {
  const std::vector<c10::Device> served = group.getDeviceTypes();
  const bool on_cpu = params_.empty() ||
      std::any_of(served.begin(), served.end(), [](const c10::Device& device) { return device.is_cpu(); });
  return on_cpu ? c10::Device(c10::DeviceType::CPU) : params_[0].tensor.device();
}

void Reducer::adoptTrainable() {
  trainable_.clear();
  for (const ReducedParam& param : params_) {
    trainable_.push_back(param.tensor.requires_grad());
  }
  buildBuckets();
  std::vector<std::pair<size_t, at::Tensor>> hooked;
  for (size_t index = 0; index < params_.size(); ++index) {
    if (trainable_[index]) {
      hooked.emplace_back(index, params_[index].tensor);
    }
  }
  grad_hooks_.reset();
  grad_hooks_.emplace(hooked, [this](size_t index) { onGradient(index); });
}

void Reducer::buildBuckets() {
  std::vector<at::Tensor> tensors;
  std::vector<BucketMember> members;
  for (const ReducedParam& param : params_) {
    tensors.push_back(param.tensor);
    members.push_back({param.tensor.nbytes(), kindOf(param), param.sparse});
  }
  std::vector<size_t> order;
  for (const size_t index : order_) {
    if (trainable_[index]) {
      order.push_back(index);
    }
  }
  // What a parameter's fp16 scale was, and what its codec had lost, for the bucket that it comes to.
  std::map<size_t, int> exponents;
  std::map<size_t, at::Tensor> lost;
  for (const Bucket& bucket : buckets_) {
    for (const Bucket::Slot& slot : bucket.slots()) {
      exponents[slot.index] = bucket.scaleExponent();
      if (bucket.lost().defined()) {
        lost[slot.index] = bucket.lostOf(slot);
      }
    }
  }
  bucket_indices_ = planBuckets(order, members, options_.caps);
  buckets_.clear();
  buckets_.reserve(bucket_indices_.size());
  places_.assign(params_.size(), Place{bucket_indices_.size(), 0});
  for (size_t b = 0; b < bucket_indices_.size(); ++b) {
    const std::vector<size_t>& indices = bucket_indices_[b];
    BucketLayout layout;
    layout.rank = group_->getRank();
    layout.world_size = group_->getSize();
    if (hook_ == nullptr) {
      layout.wire_dtype = params_[indices[0]].wire_dtype;
      layout.codec = params_[indices[0]].codec;
      layout.error_feedback = options_.error_feedback;
    }
    layout.grads_are_views = options_.gradient_as_bucket_view;
    layout.hook_averages = hook_ != nullptr;
    layout.sparse = params_[indices[0]].sparse;
    layout.reachable = reachable_;
    layout.cuda_library = options_.cuda_library;
    std::optional<int> exponent;
    for (size_t slot = 0; slot < indices.size(); ++slot) {
      places_[indices[slot]] = {b, slot};
      const auto known = exponents.find(indices[slot]);
      if (known != exponents.end()) {
        exponent = std::min(exponent.value_or(known->second), known->second);
      }
    }
    layout.scale_exponent = exponent.value_or(0);
    buckets_.emplace_back(tensors, indices, layout);
    const Bucket& bucket = buckets_.back();
    reachable_ = bucket.reachable(); // the next ones would find no room either, and once is enough to say so
    for (const Bucket::Slot& slot : bucket.slots()) {
      const auto known = lost.find(slot.index);
      if (bucket.lost().defined() && known != lost.end()) {
        bucket.lostOf(slot).copy_(known->second);
      }
    }
  }
  launched_.assign(buckets_.size(), {});
  tags_.clear();
  for (size_t b = 0; b < bucket_indices_.size(); ++b) {
    uint32_t tag = CallTag::of("bucket " + std::to_string(b));
    for (const size_t index : bucket_indices_[b]) {
      tag = CallTag::of(params_[index].name, tag);
    }
    tags_.push_back(tag);
  }
  resetStep();
}

void Reducer::resetStep() {
  divisor_ = group_->getSize();
  for (Bucket& bucket : buckets_) {
    bucket.beginStep(divisor_);
  }
  ready_.assign(params_.size(), false);
  next_bucket_ = 0;
  finished_ = 0;
  pass_ = Pass::Idle;
}

void Reducer::prepareForForward() {
  const std::lock_guard lock(mutex_);
  throwIfUnfinished();
  for (size_t index = 0; index < params_.size(); ++index) {
    if (params_[index].tensor.requires_grad() != trainable_[index]) {
      TORCH_CHECK(
          !static_graph_ || stats_.passes == 0,
          "parameter '",
          params_[index].name,
          "' was ",
          trainable_[index] ? "frozen" : "thawed",
          " after the first backward pass, which static_graph=True does not allow: leave it out");
      adoptTrainable();
      trained_set_->change(trainable_);
      return;
    }
  }
}

void Reducer::prepareForBackward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  throwIfUnfinished();
  resetStep();
  if (!static_graph_) {
    unreachable_.clear();
    if (options_.find_unused_parameters && grad_hooks_.has_value()) {
      unreachable_ = grad_hooks_->unreachableFrom(outputs);
    }
  }
  record_ = records_ ? std::make_shared<StepRecord>(buckets_.size()) : nullptr;
  if (record_ != nullptr) {
    record_->began_ns = nowNs();
  }
  pass_ = buckets_.empty() ? Pass::Idle : Pass::Armed;
}

bool Reducer::rebuildBuckets() {
  return raising([&] {
    const std::lock_guard lock(mutex_);
    // With unused parameters the order may be another one in every pass.
    const bool stable = !options_.find_unused_parameters || static_graph_;
    const bool idle = pass_ != Pass::Reducing && failure_.empty();
    if (rebuilt_ || !reduced_once_ || !stable || !idle) {
      return false;
    }
    // Where a gradient came several times (a static graph), the last time counts. What did not come, because it is
    // frozen or this rank had no data, goes to the end as it stood.
    std::vector<size_t> seen;
    std::vector<bool> came(params_.size(), false);
    for (size_t i = arrival_.size(); i-- > 0;) {
      if (!came[arrival_[i]]) {
        came[arrival_[i]] = true;
        seen.push_back(arrival_[i]);
      }
    }
    std::reverse(seen.begin(), seen.end());
    std::copy_if(order_.begin(), order_.end(), std::back_inserter(seen), [&](size_t index) { return !came[index]; });
    at::Tensor order = at::empty({static_cast<int64_t>(params_.size())}, at::kLong);
    std::copy(seen.begin(), seen.end(), order.mutable_data_ptr<int64_t>());
    std::vector<at::Tensor> tensors{order.to(ownDevice(*group_))};
    group_->broadcast(tensors)->wait();
    order = tensors[0].cpu();
    const auto* agreed = order.const_data_ptr<int64_t>();
    std::vector<size_t> sorted(agreed, agreed + params_.size());
    order_ = sorted;
    std::sort(sorted.begin(), sorted.end());
    for (size_t index = 0; index < sorted.size(); ++index) {
      TORCH_CHECK(sorted[index] == index, "rank 0 has sent an order of buckets that is none");
    }
    arrival_.clear();
    rebuilt_ = true;
    buildBuckets();
    return true;
  });
}

void Reducer::setStaticGraph() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(stats_.passes == 0 && pass_ == Pass::Idle, "static_graph must be set before the first backward pass");
  static_graph_ = true;
}

void Reducer::setForwardPassWork(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial_world_size) {
  const std::lock_guard lock(mutex_);
  join_work_ = divide_by_initial_world_size ? nullptr : std::move(work);
}

void Reducer::registerCommHook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const std::lock_guard lock(mutex_);
  checkHookMayBeSet();
  hook_ = std::move(hook);
  buildBuckets();
}

void Reducer::compressToFp16() {
  const std::lock_guard lock(mutex_);
  checkHookMayBeSet();
  for (const ReducedParam& param : params_) {
    TORCH_CHECK(
        !param.wire_dtype.has_value(),
        "FP16_COMPRESS is wire_dtype=\"fp16\", and wire_dtype has been given: leave one of them out");
  }
  for (ReducedParam& param : params_) {
    param.wire_dtype = at::kHalf;
  }
  buildBuckets();
}

void Reducer::installPostBackwardFutures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures) {
  const std::lock_guard lock(mutex_);
  post_backward_ = std::move(futures);
}

void Reducer::removeAutogradHooks() {
  const std::lock_guard lock(mutex_);
  if (grad_hooks_.has_value()) {
    grad_hooks_->remove();
  }
}

void Reducer::checkFinalized() {
  const std::lock_guard lock(mutex_);
  throwIfUnfinished();
}

void Reducer::resetState() {
  const std::lock_guard lock(mutex_);
  failure_.clear();
  used_work_.reset();
  join_work_.reset();
  post_backward_.clear();
  arrival_.clear();
  stats_.accumulated = 0;
  if (!used_known_) {
    used_.zero_();
  }
  for (const Bucket& bucket : buckets_) {
    if (bucket.lost().defined()) {
      bucket.lost().zero_(); // a failed operation may have left anything in it
    }
  }
  buildBuckets();
}

void Reducer::updateProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(pass_ != Pass::Reducing, "the process group cannot change in the middle of a backward pass");
  findBackend(group->getBackend(ownDevice(*group).type()));
  group_ = std::move(group);
  trained_set_.emplace(nullptr, group_->getRank(), trainable_); // other ranks, and no store of theirs
  buildBuckets();
}

void Reducer::recordSteps(bool on) {
  const std::lock_guard lock(mutex_);
  records_ = on;
}

std::shared_ptr<const StepRecord> Reducer::lastStep() {
  const std::lock_guard lock(mutex_);
  return last_step_;
}

void Reducer::setAccumulated(int64_t passes) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(passes >= 0 && passes < options_.accumulate, "accumulated is less than accumulate");
  stats_.accumulated = passes;
}

std::map<std::string, at::Tensor> Reducer::lost() {
  const std::lock_guard lock(mutex_);
  std::map<std::string, at::Tensor> kept;
  for (const Bucket& bucket : buckets_) {
    for (size_t slot = 0; bucket.lost().defined() && slot < bucket.slots().size(); ++slot) {
      const Bucket::Slot& of = bucket.slots()[slot];
      kept[params_[of.index].name] = bucket.lostOf(of).clone(at::MemoryFormat::Contiguous);
    }
  }
  return kept;
}

bool Reducer::setLost(const std::map<std::string, at::Tensor>& lost, std::string& why) {
  const std::lock_guard lock(mutex_);
  std::map<std::string, at::Tensor> rooms;
  for (const Bucket& bucket : buckets_) {
    for (size_t slot = 0; bucket.lost().defined() && slot < bucket.slots().size(); ++slot) {
      rooms[params_[bucket.slots()[slot].index].name] = bucket.lostOf(bucket.slots()[slot]);
    }
  }
  for (const auto& [name, tensor] : lost) {
    const auto room = rooms.find(name);
    if (room == rooms.end() || room->second.sizes() != tensor.sizes()) {
      why = room == rooms.end() ? "no parameter '" + name + "' has error feedback here"
                                : "what parameter '" + name + "' has lost is of another shape here";
      return false;
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, room] : rooms) {
    const auto found = lost.find(name);
    found == lost.end() ? room.zero_() : room.copy_(found->second);
  }
  return true;
}

ReducerStats Reducer::stats() {
  const std::lock_guard lock(mutex_);
  stats_.shared_nbytes = 0;
  for (const Bucket& bucket : buckets_) {
    stats_.shared_nbytes += static_cast<int64_t>(bucket.sharedNbytes());
  }
  return stats_;
}

std::vector<std::vector<std::string>> Reducer::bucketNames() {
  const std::lock_guard lock(mutex_);
  std::vector<std::vector<std::string>> names;
  for (const auto& indices : bucket_indices_) {
    names.emplace_back();
    for (const size_t index : indices) {
      names.back().push_back(params_[index].name);
    }
  }
  return names;
}

std::vector<size_t> Reducer::bucketNbytes() {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> sizes;
  for (const Bucket& bucket : buckets_) {
    sizes.push_back(bucket.gradientNbytes());
  }
  return sizes;
}

} // namespace pycomm
