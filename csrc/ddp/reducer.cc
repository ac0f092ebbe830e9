#include "ddp/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <utility>

#include "c10d/call_tag.h"
#include "c10d/raising.h"

namespace pycomm {

Reducer::Reducer(
    std::vector<ReducedParam> params,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    ReducerOptions options,
    const c10::intrusive_ptr<c10d::Backend>& backend,
    c10::intrusive_ptr<c10d::Store> store)
    : params_(std::move(params)), group_(std::move(group)), options_(std::move(options)), order_(params_.size()) {
  findBackend(backend);
  TORCH_CHECK_VALUE(!options_.caps.nbytes.empty(), "one bucket cap at least");
  TORCH_CHECK_VALUE(options_.accumulate >= 1, "accumulate is 1 or more");
  if (options_.find_unused_parameters) {
    used_.emplace(params_.size());
  }
  adoptTrainable();
  trained_set_.emplace(std::move(store), group_->getRank(), trainable_);
}

void Reducer::findBackend(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const bool encodes =
      std::any_of(params_.begin(), params_.end(), [](const ReducedParam& param) { return param.codec != Codec::None; });
  auto* ours = dynamic_cast<PycommBackend*>(backend.get());
  TORCH_CHECK_VALUE(!encodes || ours != nullptr, "int8 and fp8 on the wire need a process group of pycomm");
  buckets_.setSource(FlatMemory(ours != nullptr && ours->supportsTensorAlloc(-1)));
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
  std::vector<size_t> order;
  for (const size_t index : order_.expected()) {
    if (trainable_[index]) {
      order.push_back(index);
    }
  }
  BucketOptions common;
  common.wire.rank = group_->getRank();
  common.wire.world_size = group_->getSize();
  common.wire.backend = codec_backend_;
  common.wire.error_feedback = options_.error_feedback;
  common.wire.hook_averages = hook_ != nullptr;
  common.grads_are_views = options_.gradient_as_bucket_view;
  common.cuda_library = options_.cuda_library;
  buckets_.cut(params_, order, options_.caps, common);
  if (reduction_ != nullptr) { // a pass that failed has counted, too
    stats_.add(reduction_->counts());
  }
  reduction_ = hook_ != nullptr ? hookReduction(hook_, buckets_.all().size()) : allReduction(group_, bucketTags());
  resetStep();
}

// Each bucket's index and its parameters' names, the same on all ranks: see CallTag.
std::vector<uint32_t> Reducer::bucketTags() const {
  std::vector<uint32_t> tags;
  for (const Bucket& bucket : buckets_.all()) {
    uint32_t tag = CallTag::of("bucket " + std::to_string(tags.size()));
    for (const Slot& slot : bucket.slots()) {
      tag = CallTag::of(params_[slot.index].name, tag);
    }
    tags.push_back(tag);
  }
  return tags;
}

void Reducer::resetStep() {
  divisor_ = group_->getSize();
  for (Bucket& bucket : buckets_.all()) {
    bucket.beginStep(divisor_);
  }
  ready_.assign(params_.size(), false);
  first_unlaunched_ = 0;
  first_unfinished_ = 0;
  pass_ = Pass::Idle;
}

void Reducer::prepareForForward() {
  const std::lock_guard lock(mutex_);
  throwIfUnfinished();
  for (size_t index = 0; index < params_.size(); ++index) {
    if (params_[index].tensor.requires_grad() != trainable_[index]) {
      TORCH_CHECK(
          !static_graph_.has_value() || stats_.passes == 0,
          "parameter '",
          params_[index].name,
          "' was ",
          trainable_[index] ? "frozen" : "unfrozen",
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
  if (!static_graph_.has_value()) {
    unreachable_.clear();
    if (options_.find_unused_parameters && grad_hooks_.has_value()) {
      unreachable_ = grad_hooks_->unreachableFrom(outputs);
    }
  }
  recorder_.begin(buckets_.all().size());
  pass_ = buckets_.all().empty() ? Pass::Idle : Pass::Armed;
}

bool Reducer::rebuildBuckets() {
  return raising([&] {
    const std::lock_guard lock(mutex_);
    // With unused parameters the order may be another one in every pass.
    const bool stable = !options_.find_unused_parameters || static_graph_.has_value();
    const bool idle = pass_ != Pass::Reducing && failure_.empty();
    if (order_.agreed() || order_.open() || !stable || !idle) {
      return false;
    }
    const std::vector<size_t> seen = order_.seen();
    at::Tensor order = at::empty({static_cast<int64_t>(params_.size())}, at::kLong);
    std::copy(seen.begin(), seen.end(), order.mutable_data_ptr<int64_t>());
    std::vector<at::Tensor> tensors{order.to(ownDevice(*group_))};
    group_->broadcast(tensors)->wait();
    order = tensors[0].cpu();
    const auto* agreed = order.const_data_ptr<int64_t>();
    order_.agree({agreed, agreed + params_.size()});
    buildBuckets();
    return true;
  });
}

void Reducer::setStaticGraph() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(stats_.passes == 0 && pass_ == Pass::Idle, "static_graph must be set before the first backward pass");
  static_graph_.emplace(params_.size());
  used_.emplace(params_.size());
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
  join_work_.reset();
  post_backward_.clear();
  order_.forget();
  stats_.accumulated = 0;
  if (used_.has_value()) {
    used_->abandon();
  }
  for (auto& [index, lost] : buckets_.lost()) {
    lost.zero_(); // a failed operation may have left anything in it
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
  recorder_.switchOn(on);
}

std::shared_ptr<const StepRecord> Reducer::lastStep() {
  const std::lock_guard lock(mutex_);
  return recorder_.last();
}

void Reducer::setAccumulated(int64_t passes) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(passes >= 0 && passes < options_.accumulate, "accumulated is less than accumulate");
  stats_.accumulated = passes;
}

std::map<std::string, at::Tensor> Reducer::lost() {
  const std::lock_guard lock(mutex_);
  std::map<std::string, at::Tensor> kept;
  for (const auto& [index, lost] : buckets_.lost()) {
    kept[params_[index].name] = lost.clone(at::MemoryFormat::Contiguous);
  }
  return kept;
}

bool Reducer::setLost(const std::map<std::string, at::Tensor>& lost, std::string& why) {
  const std::lock_guard lock(mutex_);
  std::map<std::string, at::Tensor> rooms;
  for (const auto& [index, room] : buckets_.lost()) {
    rooms[params_[index].name] = room;
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
  ReducerStats stats = stats_;
  stats.add(reduction_->counts()); // of the pass under way
  for (const Bucket& bucket : buckets_.all()) {
    stats.shared_nbytes += static_cast<int64_t>(bucket.memory().sharedNbytes());
  }
  return stats;
}

std::vector<std::vector<std::string>> Reducer::bucketNames() {
  const std::lock_guard lock(mutex_);
  std::vector<std::vector<std::string>> names;
  for (const Bucket& bucket : buckets_.all()) {
    names.emplace_back();
    for (const Slot& slot : bucket.slots()) {
      names.back().push_back(params_[slot.index].name);
    }
  }
  return names;
}

std::vector<size_t> Reducer::bucketNbytes() {
  const std::lock_guard lock(mutex_);
  std::vector<size_t> sizes;
  for (const Bucket& bucket : buckets_.all()) {
    sizes.push_back(bucket.memory().gradientNbytes());
  }
  return sizes;
}

} // namespace pycomm
