#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/job_ranks.h"

namespace pycomm {

/// The group of a RollCall, and how long it waits before it asks.
struct RollCallConfig {
  int rank = 0;
  int size = 1;
  JobRanks job; ///< what error messages call the ranks
  uint32_t group = 0;
  uint16_t epoch = 0;
  std::vector<std::string> hosts; ///< of each rank, for error messages
  size_t max_asking = 64; ///< counted operations, the oldest, in which a rank asks others whether they have entered
  int waiting_after_ms = 2;
  int standoff_after_ms = 10000; ///< see RollCall::standOff

  /// In a group so large that nobody asks all ranks, an operation asks once, and only along its edges.
  static constexpr int kAskEveryoneMaxSize = 256;
  [[nodiscard]] bool mayAskEveryone() const noexcept {
    return size <= kAskEveryoneMaxSize;
  }
};

} // namespace pycomm
