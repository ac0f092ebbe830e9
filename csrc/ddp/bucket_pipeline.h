#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/bucket_set.h"
#include "ddp/reduction.h"
#include "ddp/step_recorder.h"

namespace pycomm {

/// The buckets of a reducer in one step. A bucket is launched when it and all buckets before it are full.
/// Buckets are finished in the order of launching. All ranks do both in the same order.
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
  /// Whether a rank has used a parameter, so that its average is written. It may wait for other ranks, and throw.
  using IsUsed = std::function<bool(size_t param)>;

  /// `buckets`, `recorder`: the reducer's, which outlive this. `reduction`: of these buckets. `looks`: for averagesAreFinite().
  BucketPipeline(BucketSet& buckets, std::unique_ptr<Reduction> reduction, StepRecorder& recorder, bool looks);

  /// `divisor`: of the sums; the ranks that have data. `ratio`: see PassWeights.
  void begin(int divisor, double ratio = 1.0);
  /// As begin(), with all buckets full of zeros: this rank has no data.
  void beginShadow(int divisor);
  /// See Reduction::begin().
  void shareState(uint32_t state) noexcept {
    reduction_->begin(state);
  }
  /// See Bucket::pack().
  void pack(size_t param, bool unused);
  /// Launches the buckets that are full. True if it launched the last one.
  [[nodiscard]] bool launchFull();
  [[nodiscard]] bool allLaunched() const noexcept;

  /// Finishes the launched buckets that the network has already done, without waiting for it. It issues nothing collective, since other
  /// ranks may come less far.
  ///
  /// A gradient that travels cast stays in memory of its own until its average is in .grad. If it is freed while backward runs, the next
  /// layer's gradient gets that memory while it is still in the cache. If it is freed at the end of backward, it goes back to the system,
  /// and the next step has a page fault for every page of every gradient.
  void finishEnded(const IsUsed& is_used);
  /// Waits for all buckets.
  void finishAll(const IsUsed& is_used);
  /// For errors, a clause: which bucket is awaited, with its parameters' names, or that all are finished.
  [[nodiscard]] std::string awaited() const;

  /// Whether all averages of this step are finite, the same on all ranks. True without looking if no wire keeps a residual, or `looks` was false. After
  /// finishAll(); on a device it waits for the device.
  [[nodiscard]] bool averagesAreFinite() const;

  [[nodiscard]] const ReductionCounts& counts() const noexcept {
    return reduction_->counts();
  }
  void clearCounts() noexcept {
    reduction_->clearCounts();
  }

 private:
  void beginStep();
  void finishFirst(const IsUsed& is_used);
  void lookAt(const at::Tensor& sums);

  BucketSet& buckets_;
  std::unique_ptr<Reduction> reduction_;
  StepRecorder& recorder_;
  size_t first_unlaunched_ = 0;
  size_t first_unfinished_ = 0;
  bool looks_; ///< at the averages
  bool finite_ = true; ///< what lookAt() saw in this step,
  std::vector<at::Tensor> finite_on_device_; ///< and where it has not waited for the answer
};

} // namespace pycomm
