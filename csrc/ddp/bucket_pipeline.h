#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/bucket_set.h"
#include "ddp/comm_hook.h"
#include "ddp/steps.h"

namespace pycomm {

/// The buckets of a reducer in one step. A bucket is launched when it and all buckets before it are full.
/// Buckets are finished in the order of launching. All ranks do both in the same order.
///
///     begin() -> [packAhead() ... -> setRatio() ->] pack() each gradient, launchFull() -> finishAll(), or awaitAll() -> writeAll()
///
/// finishEnded() may come before finishAll(). After an error, begin() again is not enough: the network may still write into the buckets, which
/// have to be cut again.
///
/// A full bucket is reduced by an all-reduce with SUM, once more if its scale was wrong; or by a comm hook, as torch's wrapper runs it: the hook
/// gets the plain gradients, and its result is final.
///
/// Example, buckets {d, c} {b} {a}, backward produces d, b, c, a: b is packed and waits. c completes the first bucket, so buckets 0 and 1
/// leave together. a completes the last one.
///
/// It lives as long as one cut of the buckets. Not thread-safe.
class BucketPipeline {
 public:
  /// Whether a rank has used a parameter, so that its average is written. It may wait for other ranks, and throw.
  using IsUsed = std::function<bool(size_t param)>;

  /// `buckets`, `group`, `hook`, `stats`, `recorder`: the reducer's, which outlive this. `looks`: for averagesAreFinite().
  BucketPipeline(
      BucketSet& buckets,
      const ReducerGroup& group,
      const CommHook& hook,
      ReducerStats& stats,
      StepRecorder& recorder,
      bool looks);

  /// `divisor`: of the sums; N in Wire.
  void begin(int divisor);
  /// As begin(), with all buckets full of zeros: this rank has no data.
  void beginShadow(int divisor);
  /// A pass begins. `checksum`: see Bucket::tagWith().
  void shareState(uint32_t checksum) noexcept {
    checksum_ = checksum;
  }
  /// See Bucket::pack().
  void pack(size_t param, bool unused);
  /// See Bucket::packAhead().
  void packAhead(size_t param, bool unused, bool counts);
  /// See Bucket::setRatio().
  void setRatio(double ratio);
  /// Whether all gradients have come, and nothing but the ratio is awaited.
  [[nodiscard]] bool allAhead() const noexcept {
    return slot_count_ > 0 && ahead_ == slot_count_;
  }
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
  /// Waits for all buckets, and writes the averages of each as it comes.
  void finishAll(const IsUsed& is_used);
  /// The same in two: first the sums of all buckets, which change nothing that a program or the next step sees, and then their averages.
  void awaitAll();
  void writeAll(const IsUsed& is_used);
  /// For errors, a clause: which bucket is awaited, with its parameters' names, or that all are finished.
  [[nodiscard]] std::string awaited() const;

  /// Whether all averages of this step are finite, the same on all ranks. True without looking if no residual is kept, or `looks` was false,
  /// unless lookAtAll() came. After finishAll(); on a device it waits for the device.
  [[nodiscard]] bool averagesAreFinite() const;
  /// After finishAll(), if residuals are kept elsewhere that an average of here makes void.
  void lookAtAll();

 private:
  /// What a bucket that has been launched waits for: one of the two. Null unless it is reduced now.
  struct Launched {
    c10::intrusive_ptr<c10d::Work> all_reduce;
    c10::intrusive_ptr<c10::ivalue::Future> hook_result;
  };

  void beginStep();
  void launch(size_t index);
  [[nodiscard]] bool firstHasEnded() const;
  void finishFirst(const IsUsed& is_used);
  void awaitFirst();
  void await(size_t index);
  void awaitHook(c10::ivalue::Future& result) const;
  [[nodiscard]] std::string titleOf(size_t index) const;
  void write(size_t index, const IsUsed& is_used);
  void settleResidual(Bucket& bucket, const std::vector<size_t>& unused);
  void lookAt(const at::Tensor& sums);

  BucketSet& buckets_;
  const ReducerGroup& group_;
  const CommHook& hook_;
  ReducerStats& stats_;
  StepRecorder& recorder_;
  std::vector<Launched> launched_; ///< by bucket
  uint32_t checksum_ = 0;
  size_t slot_count_ = 0;
  size_t ahead_ = 0; ///< slots packed ahead, until setRatio()
  size_t first_unlaunched_ = 0;
  size_t first_unfinished_ = 0;
  bool looks_; ///< at the averages
  bool finite_ = true; ///< what lookAt() saw in this step,
  std::vector<at::Tensor> finite_on_device_; ///< and where it has not waited for the answer
};

} // namespace pycomm
