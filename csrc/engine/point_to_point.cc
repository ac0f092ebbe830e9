#include "engine/point_to_point.h"

#include "engine/issue_context.h"

namespace pycomm {
namespace {

uint64_t countOf(const std::map<std::pair<int, uint32_t>, uint64_t>& counts, int peer, uint32_t tag) {
  const auto found = counts.find({peer, tag});
  return found == counts.end() ? 0 : found->second;
}

} // namespace

PointToPoint::Name PointToPoint::name(int from, int to, uint32_t tag, uint64_t count) const {
  const uint64_t ranks = (static_cast<uint64_t>(from) << 32) | static_cast<uint32_t>(to);
  const uint64_t edge = mix64(mix64(ranks) ^ ((uint64_t{tag} << 32) | group_));
  Name name;
  name.id = (mix64(edge + count) | kDerivedIdBit) & ~kSelfBit;
  name.index = static_cast<uint32_t>(count);
  return name;
}

PointToPoint::Name PointToPoint::nameSend(int to, uint32_t tag) {
  return name(rank_, to, tag, sends_[{to, tag}]++);
}

void PointToPoint::postReceive(uint64_t ticket, int from, uint32_t tag) {
  posted_[tag].push_back(Posted{ticket, from});
  serve(tag);
}

bool PointToPoint::isPast(bool sending, int peer, uint32_t tag, uint32_t index) const {
  const uint64_t next = countOf(sending ? sends_ : receives_, peer, tag);
  return static_cast<int32_t>(index - static_cast<uint32_t>(next)) < 0;
}

void PointToPoint::heard(int from, uint32_t tag, uint32_t index) {
  if (isPast(false, from, tag, index)) {
    return;
  }
  if (heard_.emplace(std::make_tuple(tag, from, index), heard_count_).second) {
    ++heard_count_;
    serve(tag);
  }
}

int PointToPoint::firstHeard(uint32_t tag) const {
  int first = kAnyRank;
  uint64_t order = heard_count_;
  for (int from = 0; from < size_; ++from) {
    const auto found = heard_.find({tag, from, static_cast<uint32_t>(countOf(receives_, from, tag))});
    if (found != heard_.end() && found->second < order) {
      order = found->second;
      first = from;
    }
  }
  return first;
}

void PointToPoint::serve(uint32_t tag) {
  const auto queue = posted_.find(tag);
  if (queue == posted_.end()) {
    return;
  }
  while (!queue->second.empty()) {
    const Posted next = queue->second.front();
    const int from = next.from == kAnyRank ? firstHeard(tag) : next.from;
    if (from == kAnyRank) {
      return;
    }
    queue->second.pop_front();
    Match match;
    match.ticket = next.ticket;
    match.from = from;
    match.name = name(from, rank_, tag, receives_[{from, tag}]++);
    heard_.erase({tag, from, match.name.index});
    if (from == rank_) {
      match.name.id |= kSelfBit;
    }
    matches_.push_back(match);
  }
  posted_.erase(queue);
}

} // namespace pycomm
