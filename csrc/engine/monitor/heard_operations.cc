#include "engine/monitor/heard_operations.h"

#include <utility>

namespace pycomm {

bool HeardOperations::add(int peer, uint64_t op_id, const Descriptor& theirs, TimePoint now) {
  Heard& heard = heard_[op_id];
  if (heard.ranks.empty()) {
    heard.since = now;
  }
  heard.last = now;
  heard.answered_late.erase(peer);
  const auto inserted = heard.ranks.emplace(peer, theirs);
  if (inserted.second) {
    ++peers_[static_cast<size_t>(peer)].heard(theirs.kind == Collective::Send);
  }
  return inserted.second || inserted.first->second == theirs;
}

HeardOperations::Heard HeardOperations::take(uint64_t op_id) {
  const auto found = heard_.find(op_id);
  if (found == heard_.end()) {
    return {};
  }
  Heard heard = std::move(found->second);
  heard_.erase(found);
  for (const auto& entry : heard.ranks) {
    --peers_[static_cast<size_t>(entry.first)].heard(entry.second.kind == Collective::Send);
  }
  return heard;
}

bool HeardOperations::hasPlace(int peer, uint64_t op_id, bool message) const {
  const Peer& asks = peers_[static_cast<size_t>(peer)];
  return has(op_id) || (message ? asks.messages < places_ + asks.asked : asks.collectives < places_);
}

std::vector<int> HeardOperations::ranks(uint64_t op_id) const {
  std::vector<int> ranks;
  const auto found = heard_.find(op_id);
  if (found != heard_.end()) {
    for (const auto& entry : found->second.ranks) {
      ranks.push_back(entry.first);
    }
  }
  return ranks;
}

} // namespace pycomm
