#pragma once

#include <cstdint>
#include <vector>

#include "schedule/step.h"

namespace pycomm {

/// A virtual network: hosts on one switch. Each host has one full-duplex NIC that all its ranks share; the switch is
/// never the bottleneck. The defaults are about a gigabit switch and hosts whose ranks communicate over loopback.
struct NetworkModel {
  double latency_s = 50e-6; ///< one way, between hosts
  double nic_bytes_per_s = 119e6; ///< per direction
  double local_latency_s = 10e-6; ///< between ranks of a host
  double local_bytes_per_s = 3e9; ///< from one rank to others of its host
  double message_s = 3e-6; ///< processor time of a rank, for each frame sent and for each received
  double reduce_bytes_per_s = 5e9; ///< on a rank's processor
  int64_t header_nbytes = 64; ///< per frame
};

/// The cost of a collective in that network.
struct Cost {
  double seconds = 0; ///< until the last step of the last rank has ended
  Algorithm algorithm = Algorithm::Auto; ///< the algorithm that was run
  std::vector<int64_t> sent_nbytes; ///< through each host's NIC, headers included
  std::vector<int64_t> received_nbytes;
};

/// Runs the schedules of all ranks of `request` (its rank is not used) in virtual time. Steps wait for each other
/// exactly as in the executor, except that no sender waits for credit. Pure. Throws what makeSchedule() throws.
/// Cost: O(steps of all ranks * log), 40 bytes per step.
[[nodiscard]] Cost costOf(const ScheduleRequest& request, const NetworkModel& network);

} // namespace pycomm
