#include <utility>

#include "base/wait_point.h"
#include "ddp/reduction.h"
#include "ddp/step_record.h"

namespace pycomm {
namespace {

/// One bucket as torch's comm hooks expect it: the flat gradients, not averaged, and where each parameter's lies. Borrows sizes from
/// the bucket's parameters.
c10d::GradBucket gradBucketOf(const Bucket& bucket, size_t index, size_t bucket_count) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> params;
  for (const Slot& slot : bucket.slots()) {
    offsets.push_back(slot.offset);
    lengths.push_back(slot.numel);
    sizes.push_back(slot.param.sizes());
    params.push_back(slot.param);
  }
  return c10d::GradBucket(
      index,
      bucket_count,
      bucket.memory().home,
      std::move(offsets),
      std::move(lengths),
      std::move(sizes),
      std::move(params),
      /*sparse_grad_indices=*/std::nullopt);
}

class HookReduction final : public Reduction {
 public:
  HookReduction(std::shared_ptr<c10d::CommHookInterface> hook, size_t bucket_count)
      : hook_(std::move(hook)), futures_(bucket_count) {}

  void launch(Bucket& bucket, size_t index) override {
    ++counts_.buckets;
    counts_.wire_nbytes += static_cast<int64_t>(bucket.wireNbytes());
    c10d::GradBucket grad_bucket = gradBucketOf(bucket, index, futures_.size());
    futures_[index] = hook_->runHook(grad_bucket);
  }

  // Gradients gain by an early average if they travel cast. Those of a hook are in home.
  [[nodiscard]] bool ended(const Bucket& /*bucket*/, size_t /*index*/) override {
    return false;
  }

  void finish(Bucket& bucket, size_t index) override {
    const auto future = std::exchange(futures_[index], nullptr);
    const int64_t before = nowNs();
    beforeWait();
    future->waitAndThrow(); // without the GIL
    const at::Tensor result = hook_->parseHookResult(future->value());
    counts_.waited_ns += nowNs() - before;
    bucket.takeResult(result);
  }

  [[nodiscard]] c10::intrusive_ptr<c10::ivalue::Future> future(size_t index) override {
    return futures_[index];
  }

 private:
  std::shared_ptr<c10d::CommHookInterface> hook_;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures_; ///< by bucket; null unless it is reduced now
};

} // namespace

std::unique_ptr<Reduction> hookReduction(std::shared_ptr<c10d::CommHookInterface> hook, size_t bucket_count) {
  return std::make_unique<HookReduction>(std::move(hook), bucket_count);
}

} // namespace pycomm
