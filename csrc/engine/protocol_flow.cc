// The protocol's flow control: who may send how much, and who gives room back.
#include <algorithm>
#include <utility>

#include "engine/protocol.h"

namespace pycomm {

Protocol::EdgeState* Protocol::edgeTo(std::vector<EdgeState>& edges, int peer) {
  for (EdgeState& edge : edges) {
    if (edge.peer == peer) {
      return &edge;
    }
  }
  return nullptr;
}

void Protocol::addressTo(int peer, FrameHeader& header) const {
  const auto found = ops_.find(header.op_id);
  if (header.kind != static_cast<uint8_t>(Collective::AllToAll) || header.type == FrameType::NotEntered ||
      found == ops_.end()) {
    return;
  }
  for (const EdgeState& edge : found->second.outgoing) {
    if (edge.peer == peer) {
      header.numel = edge.total / static_cast<int64_t>(elementSize(found->second.descriptor.wire_dtype));
    }
  }
}

Descriptor Protocol::expectedFrom(Op& op, int peer) {
  Descriptor expected = op.descriptor;
  const EdgeState* edge = edgeTo(op.incoming, peer);
  if (expected.kind == Collective::AllToAll && edge != nullptr) {
    expected.numel = edge->total / static_cast<int64_t>(elementSize(expected.wire_dtype));
  }
  return expected;
}

// More cannot be missing from the pool where its sender finds it full: a quarter at the most has been used and is not given back yet,
// and the frame that does not fit is one of the largest.
bool Protocol::crowded(int peer) const {
  const int64_t pool = config_.eager_pool_nbytes;
  const int64_t held_when_full = pool - pool / 4 - cost(config_.eager_nbytes);
  return peers_[static_cast<size_t>(peer)].eager_in > std::max<int64_t>(0, std::min(pool / 2, held_when_full));
}

void Protocol::grant(Op& op, EdgeState& edge) {
  if (edge.passed == edge.frames) {
    return; // all of it has arrived
  }
  const int64_t limit = std::min(edge.total, edge.moved + config_.window_nbytes);
  // Small raises are saved up: a quarter of a window, or the rest of the edge. Not more: what is saved up is missing
  // from the room that a ring counts on, which is half a window and a segment of a quarter (kEdgeRoomNbytes,
  // kMaxSegmentNbytes).
  const bool worth_it = limit - edge.limit >= config_.window_nbytes / 4 || limit == edge.total;
  if (limit <= edge.limit || !worth_it) {
    return;
  }
  if (edge.limit == kNoLimit && !edge.shown) {
    Peer& peer = peers_[static_cast<size_t>(edge.peer)];
    if (peer.ahead >= config_.max_ahead) {
      return; // the peer says when it waits for this, or answers when this rank does, and shown() grants it then
    }
    edge.ahead = true;
    ++peer.ahead;
  }
  edge.limit = limit;
  FrameHeader header = headerFor(op.id.id, FrameType::Credit, edge.peer);
  header.aux = static_cast<uint64_t>(limit);
  send(edge.peer, header);
}

void Protocol::grantAllFrom(int peer) {
  for (auto& entry : ops_) {
    if (EdgeState* edge = edgeTo(entry.second.incoming, peer)) {
      grant(entry.second, *edge);
    }
  }
}

// The peer has sent something about an operation, so it has posted it.
void Protocol::shown(Op& op, int peer) {
  EdgeState* const edge = edgeTo(op.incoming, peer);
  if (edge == nullptr) {
    return;
  }
  edge->shown = true;
  forget(*edge);
  if (edge->limit == kNoLimit && (edge->total > config_.eager_nbytes || crowded(peer))) {
    grant(op, *edge);
  }
}

void Protocol::forget(EdgeState& edge) {
  if (std::exchange(edge.ahead, false)) {
    --peers_[static_cast<size_t>(edge.peer)].ahead;
  }
}

void Protocol::creditArrived(int peer, const FrameHeader& header, Op* op, TimePoint now) {
  const int64_t limit = static_cast<int64_t>(header.aux);
  if (limit < 0) {
    fail(violation(peer, header, "credit of less than nothing"));
    return;
  }
  if (header.op_id == 0) {
    Peer& pool = peers_[static_cast<size_t>(peer)];
    pool.eager_out = std::max<int64_t>(0, pool.eager_out - limit);
    for (const auto& entry : ops_) {
      Action action;
      action.kind = Action::Kind::Pump;
      action.peer = peer;
      action.op_id = entry.first;
      actions_.push_back(std::move(action));
    }
    return;
  }
  if (op == nullptr) {
    if (isPast(peer, header.op_id)) {
      return; // it did without
    }
    HeardFrom* const heard = remember(peer, header, now);
    if (heard == nullptr) {
      return;
    }
    Peer& from = peers_[static_cast<size_t>(peer)];
    if (heard->limit == kNoLimit && ++from.limits > config_.max_ahead) {
      fail(violation(peer, header, "credit for too many operations that are not posted here"));
      return;
    }
    heard->limit = std::max(heard->limit, limit);
    return;
  }
  EdgeState* edge = edgeTo(op->outgoing, peer);
  if (edge == nullptr) {
    fail(violation(peer, header, "credit on an edge that this operation does not have"));
    return;
  }
  edge->limit = std::max(edge->limit, std::min(limit, edge->total));
  Action action;
  action.kind = Action::Kind::Pump;
  action.peer = peer;
  action.op_id = header.op_id;
  actions_.push_back(std::move(action));
}

// Messages are not kept: which ones are past is known by their numbers (PointToPoint).
void Protocol::keepPast(const EdgeState& edge, uint64_t op_id) {
  Peer& peer = peers_[static_cast<size_t>(edge.peer)];
  while (!peer.past.empty() && peer.eager_sent - peer.past.front().sent > config_.eager_pool_nbytes) {
    peer.past.pop_front();
  }
  if (edge.passed > 0 && edge.limit == kNoLimit && ops_.at(op_id).descriptor.kind != Collective::Send) {
    peer.past.push_back(Past{op_id, peer.eager_sent});
  }
}

bool Protocol::isPast(int peer, uint64_t op_id) const {
  const std::deque<Past>& past = peers_[static_cast<size_t>(peer)].past;
  return std::any_of(past.rbegin(), past.rend(), [&](const Past& entry) { return entry.op_id == op_id; });
}

Protocol::Verdict Protocol::dataArrived(int peer, const FrameHeader& header, Op* op, TimePoint now) {
  const int64_t nbytes = header.payload_nbytes;
  Peer& pool = peers_[static_cast<size_t>(peer)];
  const bool eager = (header.aux & kEagerFlag) != 0;
  const bool was_crowded = crowded(peer);
  if (eager) {
    pool.eager_in += cost(nbytes);
    if (pool.eager_in > config_.eager_pool_nbytes) {
      fail(violation(peer, header, "more eager bytes than the pool holds"));
      return Verdict::Ignore;
    }
  }
  if (op != nullptr) {
    EdgeState* edge = edgeTo(op->incoming, peer);
    if (edge == nullptr || edge->frames == 0) { // the latter: what is only watched over here moves nothing
      fail(violation(peer, header, "data on an edge that this operation does not have"));
      return Verdict::Ignore;
    }
    ++edge->passed;
    if (crowded(peer) && !was_crowded) {
      grantAllFrom(peer);
    }
    op->since = now;
    op->missing.clear();
    return Verdict::Accept;
  }
  if (!eager) {
    fail(violation(peer, header, "data without credit for an operation that is not posted here"));
    return Verdict::Ignore;
  }
  if (crowded(peer) && !was_crowded) { // what is posted from now on gets credit at once
    grantAllFrom(peer);
  }
  HeardFrom* const heard = remember(peer, header, now);
  if (heard == nullptr) {
    return Verdict::Ignore;
  }
  ++heard->frames;
  return Verdict::Hold;
}

void Protocol::consumed(uint64_t op_id, int peer, int64_t nbytes, bool eager) {
  if (eager) {
    Peer& pool = peers_[static_cast<size_t>(peer)];
    pool.eager_in -= cost(nbytes);
    pool.eager_used += cost(nbytes);
    if (pool.eager_used >= config_.eager_pool_nbytes / 4) {
      FrameHeader header;
      header.type = FrameType::Credit;
      header.group = config_.group;
      header.epoch = config_.epoch;
      header.aux = static_cast<uint64_t>(std::exchange(pool.eager_used, 0));
      send(peer, header);
    }
  }
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  if (EdgeState* edge = edgeTo(found->second.incoming, peer)) {
    edge->moved += nbytes;
    if (edge->limit != kNoLimit) { // an edge that goes eagerly needs no credit
      grant(found->second, *edge);
    }
  }
}

Protocol::Permission Protocol::maySend(uint64_t op_id, int peer, int64_t nbytes) const {
  const auto found = ops_.find(op_id);
  if (failed_ || found == ops_.end()) {
    return Permission::No;
  }
  for (const EdgeState& edge : found->second.outgoing) {
    if (edge.peer != peer) {
      continue;
    }
    if (edge.limit != kNoLimit && edge.moved + nbytes <= edge.limit) { // no limit yet: the peer may not have posted it
      return Permission::Credit;
    }
    const Peer& pool = peers_[static_cast<size_t>(peer)];
    const bool early = edge.moved + nbytes <= config_.eager_nbytes;
    return early && pool.eager_out + cost(nbytes) <= config_.eager_pool_nbytes ? Permission::Eager : Permission::No;
  }
  return Permission::No;
}

bool Protocol::hasRoom(int peer, int64_t nbytes, size_t frames) const {
  const int64_t out = peers_[static_cast<size_t>(peer)].eager_out;
  return nbytes <= config_.eager_nbytes && out + cost(nbytes, frames) <= config_.eager_pool_nbytes;
}

void Protocol::sent(uint64_t op_id, int peer, int64_t nbytes, Permission used) {
  if (used == Permission::Eager) {
    Peer& pool = peers_[static_cast<size_t>(peer)];
    pool.eager_out += cost(nbytes);
    pool.eager_sent += cost(nbytes);
  }
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    if (EdgeState* edge = edgeTo(found->second.outgoing, peer)) {
      edge->moved += nbytes;
      ++edge->passed;
    }
  }
}

Protocol::Usage Protocol::usage() const {
  Usage usage;
  usage.operations = ops_.size();
  usage.heard = heard_.size();
  for (const Peer& peer : peers_) {
    usage.eager_in += peer.eager_in;
    usage.past += peer.past.size();
    usage.ahead += peer.ahead;
  }
  return usage;
}

std::optional<Protocol::Missing> Protocol::missing(uint64_t op_id, int peer) const {
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    for (const Missing& entry : found->second.missing) {
      if (entry.peer == peer) {
        return entry;
      }
    }
  }
  return std::nullopt;
}

std::optional<Protocol::Missing> Protocol::missing(uint64_t op_id) const {
  const auto found = ops_.find(op_id);
  if (found == ops_.end() || found->second.missing.empty()) {
    return std::nullopt;
  }
  return *std::min_element(
      found->second.missing.begin(), found->second.missing.end(), [](const Missing& a, const Missing& b) {
        return a.peer < b.peer;
      });
}

} // namespace pycomm
