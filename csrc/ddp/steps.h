#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Logging.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/wait_point.h"

namespace pycomm {

class Reducer;

// What a reducer counts and records of its steps, and torch's table of that.

/// Counters of a reducer since it was made.
struct ReducerStats {
  int64_t passes = 0; ///< backward passes, without those in no_sync()
  int64_t steps = 0; ///< passes whose gradients were reduced
  int64_t buckets_reduced = 0;
  int64_t wire_nbytes = 0; ///< given to all_reduce, as they travel, repetitions included; or to the comm hook
  int64_t gradient_nbytes = 0; ///< the bytes that one all_reduce per pass, in the parameters' own dtypes, would take
  int64_t exposed_ns = 0; ///< backward was over and waited for the network
  int64_t overflowed_buckets = 0; ///< fp16 buckets reduced twice because the first scale was too large
  int64_t underflowed_buckets = 0; ///< fp16 buckets reduced twice because the first scale was too small
  int64_t nonfinite_buckets = 0; ///< fp16 buckets that held Inf or NaN before they were packed
  int64_t forgotten_residuals = 0; ///< steps with an average that was not finite: error feedback kept nothing
  int64_t accumulated = 0; ///< passes since the last reduction
  // Of steps that survive deaths: see StepAgreement.
  int64_t redone_steps = 0; ///< times that all buckets of a step were summed again
  int64_t lost_ranks = 0;
  int64_t left_ranks = 0; ///< in order
  int64_t joined_ranks = 0;
  int64_t epochs = 0; ///< groups so far, the present one included
  int64_t agreeing_ns = 0; ///< waited for the other members, and for those who are left to meet
  int64_t meeting_ns = 0; ///< of these groups, but the first, how long their members took to meet
  int64_t redoing_ns = 0; ///< summed again
  /// What the epochs that are over have counted.
  struct Epoch {
    int size = 0; ///< its ranks
    int64_t wire_nbytes = 0;
    int64_t gradient_nbytes = 0;
    int64_t codec_overflows = 0;
  };
  std::vector<Epoch> past;
  int64_t shared_nbytes = 0; ///< of the present buckets: bytes that other ranks reach in place
};

/// The steady clock, in the unit and from the origin of Python's time.monotonic_ns().
[[nodiscard]] inline int64_t nowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The times of events in one reduced backward pass of this rank: nanoseconds of the steady clock, 0 for an event that did not happen.
struct StepTrace {
  struct Bucket {
    int64_t gradient_nbytes = 0;
    int64_t wire_nbytes = 0;
    int64_t first_gradient_ns = 0; ///< its first gradient was packed
    int64_t launched_ns = 0; ///< given to the network
    std::atomic<int64_t> reduced_ns{
        0}; ///< the network was done with it; written by the thread that completes the future
    int64_t unpacked_ns = 0; ///< averages are in .grad
  };

  explicit StepTrace(size_t bucket_count) : buckets(bucket_count) {}

  int64_t began_ns = 0; ///< forward was over: backward may begin
  int64_t first_gradient_ns = 0;
  int64_t backward_ended_ns = 0; ///< the graph was done; from here on this rank waits for the network
  int64_t ended_ns = 0;
  std::vector<Bucket> buckets;
};

/// Writes a StepTrace of each step while it is switched on. The last one that has ended is kept.
class StepRecorder {
 public:
  void switchOn(bool on) noexcept {
    on_ = on;
  }
  [[nodiscard]] std::shared_ptr<const StepTrace> last() const {
    return last_;
  }

  void begin(size_t bucket_count);
  void gradient(size_t bucket);
  /// If recording(). `reduced`: completes when the network is done with the bucket.
  void launched(size_t bucket, size_t gradient_nbytes, size_t wire_nbytes, c10::ivalue::Future& reduced);
  void unpacked(size_t bucket);
  void backwardEnded();
  void end();
  /// The step under way is not recorded.
  void drop() noexcept {
    record_.reset();
  }
  [[nodiscard]] bool recording() const noexcept {
    return record_ != nullptr;
  }

 private:
  bool on_ = false;
  std::shared_ptr<StepTrace>
      record_; ///< of the step under way; null unless it is recorded. Futures' callbacks hold it too
  std::shared_ptr<const StepTrace> last_;
};

/// The logger that torch.nn.parallel.DistributedDataParallel calls. It keeps a table of facts about one wrapper. A fact that torch's
/// own logger has, too, has the same name there. It prints nothing. Any thread.
class DdpLogger final {
 public:
  explicit DdpLogger(std::shared_ptr<Reducer> reducer);

  void setConstructionData(
      const std::string& module_name,
      const std::vector<int>& device_ids,
      int output_device,
      bool broadcast_buffers,
      bool has_sync_bn,
      bool static_graph);
  void setCommHookName(const std::string& name);
  void setStaticGraph();
  void setUnevenInputJoin();
  void setError(const std::string& text);

  /// The table, with the reducer's counters as they are now.
  [[nodiscard]] at::DDPLoggingData table() const;

 private:
  std::shared_ptr<Reducer> reducer_;
  mutable LeafMutex mutex_; ///< guards the next
  at::DDPLoggingData table_;
};

} // namespace pycomm
