#pragma once

#include <cstdint>

#include "ddp/reduction.h"

namespace pycomm {

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
  int64_t shared_nbytes = 0; ///< of the present buckets: bytes that other ranks reach in place

  void add(const ReductionCounts& counts) noexcept {
    buckets_reduced += counts.buckets;
    wire_nbytes += counts.wire_nbytes;
    exposed_ns += counts.waited_ns;
    overflowed_buckets += counts.overflowed_buckets;
    underflowed_buckets += counts.underflowed_buckets;
    nonfinite_buckets += counts.nonfinite_buckets;
  }
};

} // namespace pycomm
