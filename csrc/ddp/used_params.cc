#include "ddp/used_params.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "c10d/call_tag.h"
#include "ddp/step_record.h"

namespace pycomm {

UsedParams::UsedParams(size_t param_count) : here_(at::zeros({static_cast<int64_t>(param_count)}, at::kInt)) {}

void UsedParams::mark(size_t index) {
  if (!kept_) {
    here_.mutable_data_ptr<int32_t>()[index] = 1;
  }
}

void UsedParams::launch(c10d::ProcessGroup& group, c10::Device device) {
  if (kept_) {
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
  if (!kept_) {
    here_.zero_();
  }
}

} // namespace pycomm
