#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace pycomm {

/// The steady clock, in the unit and from the origin of Python's time.monotonic_ns().
[[nodiscard]] inline int64_t nowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The times of events in one reduced backward pass of this rank: nanoseconds of the steady clock, 0 for an event that did not happen.
struct StepRecord {
  struct Bucket {
    int64_t gradient_nbytes = 0;
    int64_t wire_nbytes = 0;
    int64_t first_gradient_ns = 0; ///< its first gradient was packed
    int64_t launched_ns = 0; ///< given to the network
    std::atomic<int64_t> reduced_ns{
        0}; ///< the network was done with it; written by the thread that completes the future
    int64_t unpacked_ns = 0; ///< averages are in .grad
  };

  explicit StepRecord(size_t bucket_count) : buckets(bucket_count) {}

  int64_t began_ns = 0; ///< forward was over: backward may begin
  int64_t first_gradient_ns = 0;
  int64_t backward_ended_ns = 0; ///< the graph was done; from here on this rank waits for the network
  int64_t ended_ns = 0;
  std::vector<Bucket> buckets;
};

} // namespace pycomm
