#include "ddp/used_params.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "c10d/call_tag.h"
#include "ddp/steps.h"

namespace pycomm {

UsedParams::UsedParams(const SharedState& state)
    : state_(state), here_(at::zeros({static_cast<int64_t>(state.now().trained.size())}, at::kInt)) {}

void UsedParams::mark(size_t index) {
  if (!kept()) {
    here_.mutable_data_ptr<int32_t>()[index] = 1;
  }
}

void UsedParams::launch(c10d::ProcessGroup& group, c10::Device device) {
  if (kept()) {
    return;
  }
  sums_ = here_.to(device, /*non_blocking=*/false, /*copy=*/true);
  std::vector<at::Tensor> tensors{sums_};
  const CallTag about(CallTag::of("which parameters are used"));
  work_ = group.allreduce(tensors);
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
  waited_ns_ += nowNs() - before;
  work_.reset();
  sums_ = sums_.cpu();
}

void UsedParams::clear() {
  if (!kept()) {
    here_.zero_();
  }
}

} // namespace pycomm
