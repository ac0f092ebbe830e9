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

void Protocol::grant(Op& op, EdgeState& edge) {
  const int64_t limit = std::min(edge.total, edge.moved + config_.window_nbytes);
  // Small raises are saved up: a quarter of a window, or the rest of the edge. Not more: what is saved up is missing
  // from the room that a ring counts on, which is half a window and a segment of a quarter (kEdgeRoomNbytes,
  // kMaxSegmentNbytes).
  const bool worth_it = limit - edge.limit >= config_.window_nbytes / 4 || limit == edge.total;
  if (limit <= edge.limit || !worth_it) {
    return;
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

void Protocol::creditArrived(int peer, const FrameHeader& header, Op* op, TimePoint now) {
  const int64_t limit = static_cast<int64_t>(header.aux);
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
    if (remember(peer, header, now)) {
      int64_t& known = heard_[header.op_id].limits[peer];
      known = std::max(known, limit);
    }
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

void Protocol::consumed(uint64_t op_id, int peer, int64_t nbytes, bool eager) {
  if (eager) {
    Peer& pool = peers_[static_cast<size_t>(peer)];
    pool.eager_in -= nbytes;
    pool.eager_used += nbytes;
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
    if (edge->limit > 0) { // an edge that goes eagerly needs no credit
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
    if (edge.limit > 0 && edge.moved + nbytes <= edge.limit) { // no limit yet: the peer may not have posted it
      return Permission::Credit;
    }
    const Peer& pool = peers_[static_cast<size_t>(peer)];
    const bool early = edge.moved + nbytes <= config_.eager_nbytes;
    return early && pool.eager_out + nbytes <= config_.eager_pool_nbytes ? Permission::Eager : Permission::No;
  }
  return Permission::No;
}

void Protocol::sent(uint64_t op_id, int peer, int64_t nbytes, Permission used) {
  if (used == Permission::Eager) {
    peers_[static_cast<size_t>(peer)].eager_out += nbytes;
  }
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    if (EdgeState* edge = edgeTo(found->second.outgoing, peer)) {
      edge->moved += nbytes;
    }
  }
}

Protocol::Usage Protocol::usage() const {
  Usage usage;
  usage.operations = ops_.size();
  usage.heard = heard_.size();
  for (const Peer& peer : peers_) {
    usage.eager_in += peer.eager_in;
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
