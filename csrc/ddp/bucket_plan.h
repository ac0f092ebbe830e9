#pragma once

#include <cstddef>
#include <vector>

namespace pycomm {

/// The facts that decide which parameters may share a bucket.
struct BucketMember {
  size_t nbytes = 0;
  int kind = 0; ///< only equal kinds share: dtype and wire dtype
  bool alone = false; ///< a sparse gradient
};

/// How full buckets get. A bucket is closed by the gradient that brings it to its cap, so it may be larger by that one.
struct BucketCaps {
  std::vector<size_t> nbytes; ///< of the first, second … bucket of a kind; the last one holds for all others
  size_t last_nbytes = 0; ///< cap of the bucket that completes last; 0: no cap of its own
};

/// Cuts the gradients, in the order in which they come, into buckets: each entry the indices of one bucket, buckets in
/// the order in which they will be complete.
///
/// The first bucket is small, so that the network has something to do early. The last one is small, because backward is
/// over when it leaves: all of it is exposed.
///
/// Example: caps 1 MiB then 4, last 1; sizes 0.5 0.5 2 2 2 2 0.5 0.25 give {0.5 0.5} {2 2} {2 2} {0.5 0.25}.
[[nodiscard]] std::vector<std::vector<size_t>> planBuckets(
    const std::vector<size_t>& order,
    const std::vector<BucketMember>& members,
    const BucketCaps& caps);

} // namespace pycomm
