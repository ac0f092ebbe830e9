#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/bucket.h"

namespace pycomm {

/// What reductions have done since the last commit.
struct ReductionCounts {
  int64_t buckets = 0;
  int64_t wire_nbytes = 0; ///< handed to all_reduce, repetitions included, or to the comm hook
  int64_t waited_ns = 0; ///< finish() waited for the network
  int64_t overflowed_buckets = 0;
  int64_t underflowed_buckets = 0;
  int64_t nonfinite_buckets = 0;
};

/// What happens to the full buckets of one reducer: launch() hands one to the network, finish() waits until it holds sums that
/// Bucket::commit() makes averages of.
///
/// All ranks launch the same buckets in the same order and finish them in that order. Not thread-safe.
class Reduction {
 public:
  Reduction() = default;
  virtual ~Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  /// `index`: of the bucket, which is sealed.
  virtual void launch(Bucket& bucket, size_t index) = 0;
  /// Whether finish() would neither wait, throw nor reduce again. A local matter: other ranks may see it later.
  [[nodiscard]] virtual bool ended(const Bucket& bucket, size_t index) = 0;
  /// Throws what became of the reduction, if it failed.
  virtual void finish(Bucket& bucket, size_t index) = 0;
  /// Completes when the network has done the bucket that was launched last under this index.
  [[nodiscard]] virtual c10::intrusive_ptr<c10::ivalue::Future> future(size_t index) = 0;

  [[nodiscard]] const ReductionCounts& counts() const noexcept {
    return counts_;
  }
  void clearCounts() noexcept {
    counts_ = {};
  }

 protected:
  ReductionCounts counts_;
};

/// An all-reduce by SUM over `group`; once more if the bucket's scale was wrong. `tags`: one per bucket, see CallTag.
[[nodiscard]] std::unique_ptr<Reduction> allReduction(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    std::vector<uint32_t> tags);

/// A comm hook, as torch's wrapper runs it: it gets the plain gradients, and what it returns is final.
[[nodiscard]] std::unique_ptr<Reduction> hookReduction(
    std::shared_ptr<c10d::CommHookInterface> hook,
    size_t bucket_count);

} // namespace pycomm
