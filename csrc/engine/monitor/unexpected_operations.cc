#include "engine/monitor/unexpected_operations.h"

#include <utility>

namespace pycomm {

bool UnexpectedOperations::add(int peer, uint64_t op_id, const Descriptor& theirs, TimePoint now) {
  Entry& entry = entries_[op_id];
  if (entry.ranks.empty()) {
    entry.since = now;
  }
  entry.last = now;
  entry.answered_late.erase(peer);
  const auto inserted = entry.ranks.emplace(peer, theirs);
  if (inserted.second) {
    ++peers_[static_cast<size_t>(peer)].count(theirs.kind == Collective::Send);
  }
  return inserted.second || inserted.first->second == theirs;
}

UnexpectedOperations::Entry UnexpectedOperations::take(uint64_t op_id) {
  const auto found = entries_.find(op_id);
  if (found == entries_.end()) {
    return {};
  }
  Entry taken = std::move(found->second);
  entries_.erase(found);
  for (const auto& entry : taken.ranks) {
    --peers_[static_cast<size_t>(entry.first)].count(entry.second.kind == Collective::Send);
  }
  return taken;
}

bool UnexpectedOperations::hasPlace(int peer, uint64_t op_id, bool message) const {
  const Peer& asks = peers_[static_cast<size_t>(peer)];
  return has(op_id) || (message ? asks.messages < places_ + asks.asked : asks.collectives < places_);
}

size_t UnexpectedOperations::placesTaken() const noexcept {
  size_t taken = 0;
  for (const Peer& peer : peers_) {
    taken += peer.collectives + peer.messages;
  }
  return taken;
}

std::vector<int> UnexpectedOperations::ranks(uint64_t op_id) const {
  std::vector<int> ranks;
  const auto found = entries_.find(op_id);
  if (found != entries_.end()) {
    for (const auto& entry : found->second.ranks) {
      ranks.push_back(entry.first);
    }
  }
  return ranks;
}

} // namespace pycomm
