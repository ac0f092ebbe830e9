#pragma once

#include <functional>
#include <memory>

#include "ddp/bucket_set.h"
#include "ddp/reduction.h"
#include "ddp/step_recorder.h"

namespace pycomm {

/// The buckets of a reducer in one step. A bucket is launched when it and all buckets before it are full, and finished in the same
/// order: all ranks do both alike.
///
///     begin() -> pack() each gradient, launchFull() -> finishAll()
///
/// finishEnded() may come in between. After an error, begin() again is not enough: the network may still write into the buckets, which
/// have to be cut again.
///
/// Example, buckets {d, c} {b} {a}, backward produces d, b, c, a: b is packed and waits. c completes the first bucket, so buckets 0 and 1
/// leave together. a completes the last one.
///
/// It lives as long as one cut of the buckets. Not thread-safe.
class BucketPipeline {
 public:
  /// Whether the average of a parameter is written to its .grad. It may wait for other ranks, and throw.
  using IsWritten = std::function<bool(size_t param)>;

  /// `buckets`, `recorder`: the reducer's, which outlive this. `reduction`: of these buckets.
  BucketPipeline(BucketSet& buckets, std::unique_ptr<Reduction> reduction, StepRecorder& recorder);

  /// `divisor`: of the sums; the ranks that have data.
  void begin(int divisor);
  /// As begin(), with all buckets full of zeros: this rank has no data.
  void beginShadow(int divisor);
  void pack(size_t param);
  /// Launches the buckets that are full. True if it launched the last one.
  [[nodiscard]] bool launchFull();
  [[nodiscard]] bool allLaunched() const noexcept;

  /// Finishes the launched buckets that the network has already done, without waiting for it. It issues nothing collective, since other
  /// ranks may come less far.
  void finishEnded(const IsWritten& is_written);
  /// Waits for all buckets.
  void finishAll(const IsWritten& is_written);
  /// The first bucket that is not finished; after an error the one that failed.
  [[nodiscard]] size_t firstUnfinished() const noexcept {
    return first_unfinished_;
  }

  [[nodiscard]] const ReductionCounts& counts() const noexcept {
    return reduction_->counts();
  }
  void clearCounts() noexcept {
    reduction_->clearCounts();
  }

 private:
  void finishFirst(const IsWritten& is_written);

  BucketSet& buckets_;
  std::unique_ptr<Reduction> reduction_;
  StepRecorder& recorder_;
  size_t first_unlaunched_ = 0;
  size_t first_unfinished_ = 0;
};

} // namespace pycomm
