#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/bucket.h"

namespace pycomm {

/// Counters of the reductions since the last commit.
struct ReductionCounts {
  int64_t buckets = 0;
  int64_t wire_nbytes = 0; ///< given to all_reduce, repetitions included, or to the comm hook
  int64_t waited_ns = 0; ///< finish() waited for the network
  int64_t overflowed_buckets = 0;
  int64_t underflowed_buckets = 0;
  int64_t nonfinite_buckets = 0;
};

/// Reduces the full buckets of one reducer. launch() gives a bucket to the network. finish() waits until it holds the sums, of which
/// Bucket::write() makes averages.
///
/// All ranks launch the same buckets in the same order and finish them in that order. Not thread-safe.
class Reduction {
 public:
  Reduction() = default;
  virtual ~Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  /// A pass begins. `state`: of what all ranks must share now. A rank with another one gets a mismatch, if the group compares operations.
  void begin(uint32_t state) noexcept {
    state_ = state;
  }
  /// `index`: of the bucket, which is sealed.
  virtual void launch(Bucket& bucket, size_t index) = 0;
  /// Whether finish() would neither wait, throw nor reduce again. Another rank may see another answer at the same time.
  [[nodiscard]] virtual bool ended(const Bucket& bucket, size_t index) = 0;
  /// Throws the reduction's error if it failed.
  virtual void finish(Bucket& bucket, size_t index) = 0;
  /// Completes when the network is done with this bucket's last launch.
  [[nodiscard]] virtual c10::intrusive_ptr<c10::ivalue::Future> future(size_t index) = 0;

  [[nodiscard]] const ReductionCounts& counts() const noexcept {
    return counts_;
  }
  void clearCounts() noexcept {
    counts_ = {};
  }

 protected:
  ReductionCounts counts_;
  uint32_t state_ = 0;
};

/// By an all-reduce with SUM over `group`, which outlives it; once more if the bucket's scale was wrong.
[[nodiscard]] std::unique_ptr<Reduction> allReduction(const ReducerGroup& group, size_t bucket_count);

/// By a comm hook, as torch's wrapper runs it: the hook gets the plain gradients, and its result is final.
[[nodiscard]] std::unique_ptr<Reduction> hookReduction(
    std::shared_ptr<c10d::CommHookInterface> hook,
    size_t bucket_count);

} // namespace pycomm
