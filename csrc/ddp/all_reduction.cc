#include "ddp/reduction.h"
#include "ddp/step_record.h"

namespace pycomm {
namespace {

class AllReduction final : public Reduction {
 public:
  AllReduction(const ReducerGroup& group, size_t bucket_count) : group_(group), works_(bucket_count) {}

  void launch(Bucket& bucket, size_t index) override {
    ++counts_.buckets;
    start(bucket, index);
  }

  // On a device nothing is asked: there a Work's answer costs a query of an event, which may have to wait for the device.
  [[nodiscard]] bool ended(const Bucket& bucket, size_t index) override {
    const auto& work = works_[index]; // null if its average could not be written
    return work != nullptr && bucket.memory().device().is_cpu() && work->isCompleted() && work->isSuccess() &&
        bucket.canWrite();
  }

  void finish(Bucket& bucket, size_t index) override {
    while (true) {
      const int64_t before = nowNs();
      works_[index]->wait();
      counts_.waited_ns += nowNs() - before;
      switch (bucket.judge()) {
        case Verdict::Good:
          works_[index].reset();
          return;
        case Verdict::NonFinite:
          ++counts_.nonfinite_buckets;
          works_[index].reset();
          return;
        case Verdict::Overflowed:
          ++counts_.overflowed_buckets;
          break;
        case Verdict::Underflowed:
          ++counts_.underflowed_buckets;
          break;
      }
      // Every rank came to the same verdict and finishes its buckets in the same order, so these match as well.
      start(bucket, index);
    }
  }

  [[nodiscard]] c10::intrusive_ptr<c10::ivalue::Future> future(size_t index) override {
    return works_[index]->getFuture();
  }

 private:
  void start(Bucket& bucket, size_t index) {
    counts_.wire_nbytes += static_cast<int64_t>(bucket.wireNbytes());
    works_[index] = bucket.allReduce(group_, state_);
  }

  const ReducerGroup& group_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_; ///< by bucket; null unless it is reduced now
};

} // namespace

std::unique_ptr<Reduction> allReduction(const ReducerGroup& group, size_t bucket_count) {
  return std::make_unique<AllReduction>(group, bucket_count);
}

} // namespace pycomm
