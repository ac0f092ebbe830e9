#include "ddp/reducer_group.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/wait_point.h"
#include "c10d/call_tag.h"

namespace pycomm {
namespace {

c10::Device deviceFor(c10d::ProcessGroup& group, const std::vector<ReducedParam>& params) {
  const std::vector<c10::Device> served = group.getDeviceTypes();
  const bool on_cpu = params.empty() ||
      std::any_of(served.begin(), served.end(), [](const c10::Device& device) { return device.is_cpu(); });
  return on_cpu ? c10::Device(c10::DeviceType::CPU) : params[0].tensor.device();
}

} // namespace

ReducerGroup::ReducerGroup(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const c10::intrusive_ptr<c10d::Backend>& backend,
    const std::vector<ReducedParam>& params)
    : group_(std::move(group)),
      device_(deviceFor(*group_, params)),
      param_device_(params.empty() ? c10::Device(c10::DeviceType::CPU) : params[0].device) {
  const bool encodes =
      std::any_of(params.begin(), params.end(), [](const ReducedParam& param) { return param.codec != Codec::None; });
  auto* ours = dynamic_cast<PycommBackend*>(backend.get());
  TORCH_CHECK_VALUE(!encodes || ours != nullptr, "int8 on the wire needs a process group of pycomm");
  memory_ = FlatMemory(ours != nullptr && ours->supportsTensorAlloc(-1));
  if (ours != nullptr) {
    const std::shared_ptr<Group> now = raising([&] { return ours->group(); });
    job_ = now->identity().job;
    if (ours->isReconfigurable()) {
      changing_backend_ = c10::intrusive_ptr<PycommBackend>::reclaim_copy(ours);
      run_ = now->identity().run;
      counted_ = encodes ? now : nullptr;
    }
  }
  codec_backend_ = encodes ? c10::intrusive_ptr<PycommBackend>::reclaim_copy(ours) : nullptr;
}

void ReducerGroup::requireSameMembers() const {
  if (changing_backend_ == nullptr) {
    return;
  }
  raising([&] {
    if (changing_backend_->group()->identity().run != run_) {
      throw Error(
          ErrorCode::InvalidArgument,
          "The process group of this model has other members than when the model was wrapped: it was reconfigured since.",
          "wrap the module again: DistributedDataParallel(model.module, ...) on all members");
    }
  });
}

ReducerGroup ReducerGroup::withItsBackend(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const std::vector<ReducedParam>& params) {
  const auto backend = group->getBackend(deviceFor(*group, params).type());
  return {std::move(group), backend, params};
}

std::vector<size_t> ReducerGroup::fromRank0(const std::vector<size_t>& values) const {
  at::Tensor flat = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), flat.mutable_data_ptr<int64_t>());
  std::vector<at::Tensor> tensors{flat.to(device_)};
  group_->broadcast(tensors)->wait();
  flat = tensors[0].cpu();
  const auto* received = flat.const_data_ptr<int64_t>();
  return {received, received + values.size()};
}

void ReducerGroup::abort(c10d::ProcessGroup& group, at::Device device, const std::string& what, bool others) {
  if (group.getSize() == 1) {
    return; // nobody waits
  }
  c10::intrusive_ptr<c10d::Backend> before;
  for (const c10::DeviceType type : {c10::DeviceType::CPU, device.type()}) {
    try {
      const c10::intrusive_ptr<c10d::Backend> backend = group.getBackend(type);
      auto* const ours = dynamic_cast<PycommBackend*>(backend.get());
      if (ours != nullptr) {
        ours->abortFor(what);
      } else if (others && backend != before) {
        backend->abort();
      }
      before = backend;
    } catch (const std::exception&) { // no backend for this type, or one that cannot
    }
  }
}

std::optional<std::chrono::milliseconds> ReducerGroup::timeoutOf(c10d::ProcessGroup& group, at::Device device) {
  try {
    return group.getBackend(device.type())->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// --- used parameters -----------------------------------------------------------------------------

GroupUse::GroupUse(const c10d::ProcessGroup& group) {
  static LeafMutex mutex;
  static std::map<const c10d::ProcessGroup*, std::weak_ptr<const c10d::ProcessGroup*>> uses; // guarded by it
  const std::lock_guard lock(mutex);
  std::erase_if(uses, [](const auto& each) { return each.second.expired(); });
  users_ = uses[&group].lock();
  if (users_ == nullptr) {
    users_ = std::make_shared<const c10d::ProcessGroup*>(&group);
    uses[&group] = users_;
  }
}

UsedParams::UsedParams(const SharedState& state, ReducerStats& stats)
    : state_(state), stats_(stats), here_(at::zeros({static_cast<int64_t>(state.now().trained.size())}, at::kInt)) {}

void UsedParams::mark(size_t index) {
  if (!kept()) {
    here_.mutable_data_ptr<int32_t>()[index] = 1;
  }
}

void UsedParams::launch(const ReducerGroup& group) {
  if (kept()) {
    return;
  }
  sums_ = here_.to(group.device(), /*non_blocking=*/false, /*copy=*/true);
  std::vector<at::Tensor> tensors{sums_};
  const CallTag about(CallTag::of("which parameters are used"));
  work_ = group.get()->allreduce(tensors);
}

bool UsedParams::anywhere(size_t index) {
  if (here_.const_data_ptr<int32_t>()[index] != 0) {
    return true;
  }
  await();
  return sums_.const_data_ptr<int32_t>()[index] != 0;
}

bool UsedParams::mayBeUnused(size_t index) const {
  const bool used = here_.const_data_ptr<int32_t>()[index] != 0;
  return !used && (!kept() || sums_.const_data_ptr<int32_t>()[index] == 0);
}

void UsedParams::await() {
  if (work_ == nullptr) {
    return;
  }
  const int64_t before = nowNs();
  work_->wait();
  stats_.exposed_ns += nowNs() - before;
  work_.reset();
  sums_ = sums_.cpu();
}

void UsedParams::forgetGone(const std::vector<ReducedParam>& params, const std::optional<PassWeights>& weights) {
  for (size_t index = 0; index < params.size() && !kept(); ++index) {
    const bool left_zeros = weights.has_value() && weights->leftZeros(index);
    if (!left_zeros && !params[index].tensor.grad().defined()) {
      here_.mutable_data_ptr<int32_t>()[index] = 0;
    }
  }
}

void UsedParams::clear() {
  if (!kept()) {
    here_.zero_();
  }
}

} // namespace pycomm
