#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/operation/group_identity.h"
#include "schedule/topology_view.h"
#include "transport/rendezvous/rendezvous.h"

namespace pycomm {

/// The ranks of a group and their hosts, as the rendezvous found them. A roster does not change while the group lives. It is the same on
/// all ranks, except for the members that are marked as this rank's own.
struct Roster {
  /// Listeners stay in `met`.
  Roster(const RendezvousConfig& config, const Rendezvous& met);

  GroupIdentity identity; ///< this rank's own
  TopologyView topology; ///< ranks are on one host if their HostIdentity is equal: hostNumbers() in roster.cc
  std::vector<std::string> watch_names; ///< by rank: RankRecord::watch_name
  std::vector<std::string> remarks; ///< by rank: RendezvousConfig::remark
  std::string address_reason; ///< this rank's own: why it has this address
  RankClaim claim; ///< this rank's own

  /// The ranks on this one's host, itself among them, rising.
  [[nodiscard]] const std::vector<int32_t>& localRanks() const {
    return topology.ranksOf(topology.hostOf(identity.rank));
  }
};

} // namespace pycomm
