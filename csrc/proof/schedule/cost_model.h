#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step.h"

namespace pycomm {

/// A virtual network: hosts on one switch, each with one card that all its ranks share; full duplex, and the switch
/// itself is never the bottleneck. The defaults are about a gigabit switch and hosts whose ranks meet over loopback.
struct NetworkModel {
  double latency_s = 50e-6; ///< one way, between hosts
  double card_bytes_per_s = 119e6; ///< each way
  double local_latency_s = 10e-6; ///< between ranks of a host
  double local_bytes_per_s = 3e9; ///< that one rank sends to others of its host
  double message_s = 3e-6; ///< of a rank's processor, for each frame sent and for each received
  double reduce_bytes_per_s = 5e9; ///< of a rank's processor
  int64_t header_nbytes = 64; ///< of each frame
};

/// What a collective takes there.
struct Cost {
  double seconds = 0; ///< until the last step of the last rank has ended
  Algorithm algorithm = Algorithm::Auto; ///< that was run
  std::vector<int64_t> sent_nbytes; ///< through each host's card, headers included
  std::vector<int64_t> received_nbytes;
};

/// Runs the schedules of all ranks of `request` (its rank is not used) in virtual time. Who waits for whom is exactly
/// what the executor does; that a sender may have to wait for credit is left out. Pure. Throws what makeSchedule()
/// throws.
/// Cost: O(steps of all ranks * log), 40 bytes a step.
[[nodiscard]] Cost costOf(const ScheduleRequest& request, const NetworkModel& network);

} // namespace pycomm
