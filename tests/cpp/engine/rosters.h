#pragma once

#include <string>
#include <vector>

#include "engine/operation/roster.h"

namespace pycomm::testing {

/// What a rendezvous would have found: one rank per entry of `hosts`, all with the same address.
inline Rendezvous metOn(const std::vector<std::string>& hosts) {
  Rendezvous met;
  met.group_hash = 7;
  met.nonce = 99;
  met.interface_name = "eth0";
  met.address_reason = "the test says so";
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    Member member;
    member.rank = static_cast<int>(rank);
    member.host = hosts[rank];
    member.identity.boot_id = hosts[rank];
    member.watch_name = "watch" + std::to_string(rank);
    member.remark = "remark" + std::to_string(rank);
    met.members.push_back(std::move(member));
  }
  return met;
}

inline Roster rosterOf(int rank, const std::vector<std::string>& hosts) {
  RendezvousConfig config;
  config.rank = rank;
  config.size = static_cast<int>(hosts.size());
  config.group_name = "test";
  return {config, metOn(hosts)};
}

} // namespace pycomm::testing
