#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/codec.h"

namespace pycomm {

/// What a group's codec has done on this rank. Written on the data loop, read by anyone.
struct CodecCounters {
  std::atomic<int64_t> sent_numel{0}; ///< encoded values that left this rank
  std::atomic<int64_t> sent_nbytes{0}; ///< and their bytes
  std::atomic<int64_t> saved_nbytes{0}; ///< how many more these would have been in their own dtype
  std::atomic<int64_t> overflows{0}; ///< finite values that became infinite here, encoded or added up
};

class Operation;
/// Takes note of finite values that became infinite in this operation; the first of a group are logged. Any thread.
void countOverflows(const Operation& operation, Codec codec, size_t overflows);

} // namespace pycomm
