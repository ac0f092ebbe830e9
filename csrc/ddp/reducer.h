#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ddp/bucket.h"
#include "ddp/grad_hooks.h"

namespace pycomm {

struct ReducerOptions {
  std::optional<at::ScalarType> wire_dtype; ///< none: the parameters' own
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool native_hooks = true; ///< false where Dynamo's Python reducer does the work
};

struct ReducerStats {
  int64_t steps = 0; ///< backward passes whose gradients were reduced
  int64_t buckets_reduced = 0;
  int64_t wire_nbytes = 0; ///< handed to all_reduce, repetitions included; with a comm hook, handed to the hook
  int64_t exposed_ns = 0; ///< backward was over and waited for the network
  int64_t overflowed_buckets = 0; ///< fp16 buckets reduced twice because the first scale was too large,
  int64_t underflowed_buckets = 0; ///< … too small,
  int64_t nonfinite_buckets = 0; ///< and those that held Inf or NaN before they were packed
};

/// Averages gradients over a process group while backward runs. The methods are those that
/// torch.nn.parallel.DistributedDataParallel calls on its reducer.
///
/// One backward pass: every accumulated gradient is packed into its bucket by a post hook; the bucket that is complete,
/// and every bucket before it, is launched at once, in the same order on all ranks; after the last one a callback
/// queued on the engine waits for the buckets in that order and writes the averages to .grad.
///
/// Example, buckets {d, c} {b} {a}, backward produces d, b, c, a: b is packed and waits, c completes the first bucket,
/// so buckets 0 and 1 leave together, a completes the last, the callback finishes 0, 1, 2.
///
/// Thread-safe by one mutex. It is held while buckets are launched and awaited, so no caller may hold the GIL.
class Reducer final : public std::enable_shared_from_this<Reducer> {
 public:
  /// `names`: of params, for errors. `bucket_indices`: which parameters share a bucket, buckets in launch order.
  Reducer(
      std::vector<at::Tensor> params,
      std::vector<std::string> names,
      std::vector<std::vector<size_t>> bucket_indices,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      ReducerOptions options);

  /// Throws when the last backward pass did not complete: naming the parameters without a gradient, or its failure.
  void prepareForForward();
  /// The next backward pass reduces. `outputs`: what forward returned, looked at with find_unused_parameters only.
  void prepareForBackward(const std::vector<at::Tensor>& outputs);

  /// Once, before the first backward pass, and not together with a wire dtype.
  void registerCommHook(std::unique_ptr<c10d::CommHookInterface> hook);
  /// The same, for buckets that travel as fp16 (torch's FP16_COMPRESS).
  void compressToFp16();

  void removeAutogradHooks();
  void checkFinalized();
  /// Forgets an unfinished or failed pass; buffers that a lost operation might still write are replaced.
  void resetState();
  void updateProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group);

  [[nodiscard]] ReducerStats stats();
  [[nodiscard]] const ReducerOptions& options() const noexcept {
    return options_;
  }
  [[nodiscard]] const std::vector<at::Tensor>& params() const noexcept {
    return params_;
  }
  [[nodiscard]] const std::vector<std::vector<size_t>>& bucketIndices() const noexcept {
    return bucket_indices_;
  }
  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& group() const noexcept {
    return group_;
  }

 private:
  struct Launched {
    c10::intrusive_ptr<c10d::Work> work; ///< one of the two
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };
  struct Place {
    size_t bucket;
    size_t slot;
  };

  void buildBuckets();
  void resetStep();
  void onGradient(size_t index);
  void takeGradient(size_t index);
  void markReady(size_t index);
  void launch(size_t bucket);
  void launchUsedMap();
  void queueFinish();
  void finish();
  void finishBucket(size_t bucket);
  void awaitAllReduce(size_t bucket);
  void awaitUsedMap();
  void wait(c10d::Work& work);
  [[nodiscard]] bool usedAnywhere(size_t index);
  void fail(const std::string& doing, const std::exception& error);
  void throwIfUnfinished() const;
  [[nodiscard]] std::string namesOfMissing() const;
  void checkHookMayBeSet() const;

  std::mutex mutex_; ///< guards everything below except params_, names_ and bucket_indices_, which never change
  const std::vector<at::Tensor> params_;
  const std::vector<std::string> names_;
  const std::vector<std::vector<size_t>> bucket_indices_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ReducerOptions options_;
  std::unique_ptr<c10d::CommHookInterface> hook_;

  std::vector<Bucket> buckets_;
  std::vector<Place> places_; ///< by parameter
  std::vector<Launched> launched_; ///< by bucket
  size_t next_bucket_ = 0; ///< the first that has not been launched

  bool expecting_ = false; ///< a forward pass asked for a reduction that has not finished
  bool started_ = false; ///< at least one gradient of that pass has come
  std::vector<bool> ready_; ///< by parameter, in this pass
  std::vector<size_t> unreachable_; ///< parameters that this pass's graph does not reach
  std::string failure_; ///< of an earlier pass; sticky until resetState()

  at::Tensor used_; ///< int32 by parameter: 1 where a gradient came since the last reduction; summed over ranks
  at::Tensor used_anywhere_;
  c10::intrusive_ptr<c10d::Work> used_work_;

  ReducerStats stats_;
  std::optional<GradHooks> grad_hooks_; ///< last: its hooks hold `this`, and it removes them before anything else goes
};

} // namespace pycomm
