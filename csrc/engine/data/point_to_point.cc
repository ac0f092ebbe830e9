#include "engine/data/point_to_point.h"

namespace pycomm {
namespace {

template <typename Queues>
auto takeFirst(Queues& queues, typename Queues::iterator at) {
  auto first = std::move(at->second.front());
  at->second.pop_front();
  if (at->second.empty()) {
    queues.erase(at);
  }
  return first;
}

} // namespace

uint64_t PointToPoint::idOf(int from, int to, uint32_t index) const noexcept {
  const uint64_t ranks = (static_cast<uint64_t>(from) << 32) | static_cast<uint32_t>(to);
  const uint64_t edge = mix64(mix64(ranks) ^ tables_.identity.hash);
  return (mix64(edge + index) | kDerivedIdBit) & ~kSelfBit;
}

PointToPoint::Name PointToPoint::nameSend(int to) {
  const auto index = static_cast<uint32_t>(tables_.peer(to).sent++);
  return Name{idOf(tables_.identity.rank, to, index), index};
}

bool PointToPoint::isNameOf(int from, int to, Name name) const noexcept {
  const uint64_t id = from == to ? name.id & ~kSelfBit : name.id;
  return id == idOf(from, to, name.index);
}

bool PointToPoint::hasSent(int to, uint32_t index) const noexcept {
  return static_cast<int32_t>(index - static_cast<uint32_t>(tables_.peer(to).sent)) < 0;
}

void PointToPoint::postReceive(uint64_t ticket, int from, uint32_t tag) {
  Tag& under = tags_[tag];
  auto first = under.messages.end();
  for (auto at = under.messages.begin(); at != under.messages.end(); ++at) {
    const bool fits = from == kAnyRank || from == at->first;
    if (fits && (first == under.messages.end() || at->second.front().order < first->second.front().order)) {
      first = at;
    }
  }
  if (first == under.messages.end()) {
    under.receives[from].push_back(ticket);
    ++waiting(from);
    return;
  }
  const int sender = first->first;
  matches_.push_back(Match{ticket, sender, takeFirst(under.messages, first).name});
  if (under.messages.empty() && under.receives.empty()) {
    tags_.erase(tag);
  }
}

void PointToPoint::arrived(int from, uint32_t tag, Name name) {
  Tag& under = tags_[tag];
  const auto own = under.receives.find(from);
  const auto any = under.receives.find(kAnyRank);
  const auto none = under.receives.end();
  if (own == none && any == none) {
    under.messages[from].push_back(Unexpected{unexpected_count_++, name});
    return;
  }
  const bool takes_own = own != none && (any == none || own->second.front() < any->second.front());
  --waiting(takes_own ? from : kAnyRank);
  matches_.push_back(Match{takeFirst(under.receives, takes_own ? own : any), from, name});
  if (under.messages.empty() && under.receives.empty()) {
    tags_.erase(tag);
  }
}

uint64_t PointToPoint::oldestUnder(uint32_t tag, int from) const noexcept {
  const auto under = tags_.find(tag);
  if (under == tags_.end()) {
    return 0;
  }
  const auto receives = under->second.receives.find(from);
  return receives == under->second.receives.end() ? 0 : receives->second.front();
}

std::vector<std::pair<int, uint64_t>> PointToPoint::waitingUnder(uint32_t tag) const {
  std::vector<std::pair<int, uint64_t>> ranks;
  const auto under = tags_.find(tag);
  if (under != tags_.end()) {
    for (const auto& entry : under->second.receives) {
      ranks.emplace_back(entry.first, entry.second.front());
    }
  }
  return ranks;
}

} // namespace pycomm
