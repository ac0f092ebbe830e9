#include "ddp/comm_hook.h"

namespace pycomm {

c10d::GradBucket gradBucketOf(const Bucket& bucket, size_t index, size_t bucket_count) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> params;
  for (const Bucket::Slot& slot : bucket.slots()) {
    offsets.push_back(slot.offset);
    lengths.push_back(slot.numel);
    sizes.push_back(slot.param.sizes());
    params.push_back(slot.param);
  }
  return c10d::GradBucket(
      index,
      bucket_count,
      bucket.home(),
      std::move(offsets),
      std::move(lengths),
      std::move(sizes),
      std::move(params),
      /*sparse_grad_indices=*/std::nullopt);
}

at::Tensor hookResult(c10d::CommHookInterface& hook, c10::ivalue::Future& future) {
  future.waitAndThrow();
  return hook.parseHookResult(future.value());
}

} // namespace pycomm
