#include "engine/operation/roster.h"

#include <algorithm>

namespace pycomm {
namespace {

/// A number per rank, equal where hosts are: the lowest rank there.
std::vector<int32_t> hostNumbers(const std::vector<Member>& members) {
  std::vector<int32_t> numbers;
  for (const Member& member : members) {
    const auto first = std::find_if(
        members.begin(), members.end(), [&](const Member& other) { return other.identity == member.identity; });
    numbers.push_back(static_cast<int32_t>(first - members.begin()));
  }
  return numbers;
}

} // namespace

Roster::Roster(const RendezvousConfig& config, const Rendezvous& met)
    : topology(hostNumbers(met.members)), address_reason(met.address_reason), claim(met.claim) {
  identity.rank = config.rank;
  identity.size = config.size;
  identity.job = config.job;
  identity.name = config.group_name;
  identity.epoch = config.epoch;
  identity.hash = met.group_hash;
  identity.nonce = met.nonce;
  identity.run = met.run;
  identity.unix_nonce = met.nonce;
  identity.memory_key = {0, met.nonce}; // with a secret, Security::finish() puts another one there
  identity.local_address = met.local_address;
  identity.interface_name = met.interface_name;
  for (const Member& member : met.members) {
    identity.hosts.push_back(member.host);
    identity.addresses.push_back(member.address);
    identity.unix_sockets.push_back(member.unix_socket);
    watch_names.push_back(member.watch_name);
    remarks.push_back(member.remark);
    identity.processes.push_back(member.process_id);
  }
}

} // namespace pycomm
