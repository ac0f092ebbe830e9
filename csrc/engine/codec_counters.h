#pragma once

#include <atomic>
#include <cstdint>

namespace pycomm {

/// What a group's codec has done on this rank. Written on the lane, read by anyone.
struct CodecCounters {
  std::atomic<int64_t> sent_numel{0}; ///< encoded values that left this rank
  std::atomic<int64_t> sent_nbytes{0}; ///< and their bytes
  std::atomic<int64_t> saved_nbytes{0}; ///< how many more these would have been in their own dtype
  std::atomic<int64_t> overflows{0}; ///< finite values that became infinite here, encoded or added up
};

} // namespace pycomm
