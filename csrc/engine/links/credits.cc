#include "engine/links/credits.h"

#include <algorithm>
#include <iterator>

namespace pycomm {

Credits::EdgeState Credits::stateOf(const Edge& edge) {
  EdgeState state;
  state.peer = edge.peer;
  state.total = edge.nbytes;
  state.frames = edge.steps.size();
  return state;
}

const Credits::EdgeState* Credits::edgeTo(const std::vector<EdgeState>& edges, int peer) {
  for (const EdgeState& edge : edges) {
    if (edge.peer == peer) {
      return &edge;
    }
  }
  return nullptr;
}

Credits::EdgeState* Credits::edgeTo(std::vector<EdgeState>& edges, int peer) {
  return const_cast<EdgeState*>(edgeTo(std::as_const(edges), peer));
}

const Credits::EdgeState* Credits::incoming(uint64_t op_id, int peer) const {
  const auto found = ops_.find(op_id);
  return found == ops_.end() ? nullptr : edgeTo(found->second.incoming, peer);
}

const Credits::EdgeState* Credits::outgoing(uint64_t op_id, int peer) const {
  const auto found = ops_.find(op_id);
  return found == ops_.end() ? nullptr : edgeTo(found->second.outgoing, peer);
}

// ---- the life of an operation

void Credits::posted(uint64_t op_id, const PreparedSchedule& schedule, bool message, const std::vector<int>& shown_by) {
  Op& op = ops_[op_id];
  op.message = message;
  for (const Edge& edge : schedule.incoming) {
    op.incoming.push_back(stateOf(edge));
  }
  for (const Edge& edge : schedule.outgoing) {
    op.outgoing.push_back(stateOf(edge));
  }
  for (const auto& entry : takeUnexpected(op_id)) {
    if (EdgeState* edge = edgeTo(op.outgoing, entry.first)) {
      edge->limit = std::max(edge->limit, entry.second.limit);
    }
    if (EdgeState* edge = edgeTo(op.incoming, entry.first)) {
      edge->passed = entry.second.frames;
    }
  }
  for (const int rank : shown_by) {
    if (EdgeState* edge = edgeTo(op.incoming, rank)) {
      edge->shown = true;
    }
  }
  for (EdgeState& edge : op.incoming) {
    if (edge.total > config_.eager_nbytes || crowded(edge.peer)) {
      grant(op_id, edge);
    }
  }
}

void Credits::ended(uint64_t op_id) {
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  for (const EdgeState& edge : found->second.outgoing) {
    keepPast(edge, op_id, found->second.message);
  }
  for (EdgeState& edge : found->second.incoming) {
    noLongerAhead(edge);
  }
  ops_.erase(found);
}

void Credits::forget(uint64_t op_id) noexcept {
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  for (EdgeState& edge : found->second.incoming) {
    noLongerAhead(edge);
  }
  ops_.erase(found);
}

void Credits::passed(uint64_t op_id) {
  static_cast<void>(takeUnexpected(op_id));
}

std::map<int, Credits::Unexpected> Credits::takeUnexpected(uint64_t op_id) {
  const auto found = unexpected_.find(op_id);
  if (found == unexpected_.end()) {
    return {};
  }
  std::map<int, Unexpected> ranks = std::move(found->second);
  unexpected_.erase(found);
  for (const auto& entry : ranks) {
    peer(entry.first).limits -= entry.second.limit == kNoLimit ? 0 : 1;
  }
  return ranks;
}

// Messages are not kept: which ones are past is known by their numbers (PointToPoint).
void Credits::keepPast(const EdgeState& edge, uint64_t op_id, bool message) {
  Peer& to = peer(edge.peer);
  const int64_t over = to.eager_sent - config_.eager_pool_nbytes;
  while (!to.past.empty() && to.past.front().sent < over) {
    to.past.pop_front();
  }
  if (edge.passed == 0 || edge.limit != kNoLimit || message || edge.eager_sent < over) {
    return;
  }
  auto at = to.past.end(); // operations end in about the order of their last frames
  while (at != to.past.begin() && std::prev(at)->sent > edge.eager_sent) {
    --at;
  }
  to.past.insert(at, Past{op_id, edge.eager_sent});
}

bool Credits::isPast(int rank, uint64_t op_id) const {
  const std::deque<Past>& past = peer(rank).past;
  return std::any_of(past.rbegin(), past.rend(), [&](const Past& entry) { return entry.op_id == op_id; });
}

// ---- receiving

// More cannot be missing from the pool where its sender finds it full: a quarter at the most has been used and is not given back yet,
// and the frame that does not fit is one of the largest.
bool Credits::crowded(int rank) const {
  const int64_t pool = config_.eager_pool_nbytes;
  const int64_t held_when_full = pool - pool / 4 - cost(config_.eager_nbytes);
  return peer(rank).eager_in > std::max<int64_t>(0, std::min(pool / 2, held_when_full));
}

void Credits::grant(uint64_t op_id, EdgeState& edge) {
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
    Peer& from = peer(edge.peer);
    if (from.ahead >= config_.max_ahead) {
      return; // the peer says when it waits for this, or answers when this rank does, and shown() grants it then
    }
    edge.ahead = true;
    ++from.ahead;
  }
  edge.limit = limit;
  actions_.push_back(Action{Action::Kind::Grant, edge.peer, op_id, limit});
}

void Credits::grantAllFrom(int rank) {
  for (auto& entry : ops_) {
    if (EdgeState* edge = edgeTo(entry.second.incoming, rank)) {
      grant(entry.first, *edge);
    }
  }
}

void Credits::shown(uint64_t op_id, int rank) {
  const auto found = ops_.find(op_id);
  EdgeState* const edge = found == ops_.end() ? nullptr : edgeTo(found->second.incoming, rank);
  if (edge == nullptr) {
    return;
  }
  edge->shown = true;
  noLongerAhead(*edge);
  if (edge->limit == kNoLimit && (edge->total > config_.eager_nbytes || crowded(rank))) {
    grant(op_id, *edge);
  }
}

void Credits::noLongerAhead(EdgeState& edge) {
  if (std::exchange(edge.ahead, false)) {
    --peer(edge.peer).ahead;
  }
}

const char* Credits::arrived(uint64_t op_id, int rank, int64_t nbytes, bool eager) {
  Peer& pool = peer(rank);
  const bool was_crowded = crowded(rank);
  if (eager) {
    pool.eager_in += cost(nbytes);
    if (pool.eager_in > config_.eager_pool_nbytes) {
      return "more eager bytes than the pool holds";
    }
  }
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    EdgeState* edge = edgeTo(found->second.incoming, rank);
    if (edge == nullptr || edge->frames == 0) { // the latter: what is only watched over here moves nothing
      return "data on an edge that this operation does not have";
    }
    ++edge->passed;
  } else if (!eager) {
    return "data without credit for an operation that is not posted here";
  }
  if (crowded(rank) && !was_crowded) { // what is posted from now on gets credit at once
    grantAllFrom(rank);
  }
  if (found == ops_.end()) {
    ++unexpected_[op_id][rank].frames;
  }
  return nullptr;
}

void Credits::consumed(uint64_t op_id, int rank, int64_t nbytes, bool eager) {
  if (eager) {
    Peer& pool = peer(rank);
    pool.eager_in -= cost(nbytes);
    pool.eager_used += cost(nbytes);
    if (pool.eager_used >= config_.eager_pool_nbytes / 4) {
      actions_.push_back(Action{Action::Kind::Grant, rank, 0, std::exchange(pool.eager_used, 0)});
    }
  }
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  if (EdgeState* edge = edgeTo(found->second.incoming, rank)) {
    edge->moved += nbytes;
    if (edge->limit != kNoLimit) { // an edge that goes eagerly needs no credit
      grant(op_id, *edge);
    }
  }
}

// ---- sending

const char* Credits::granted(uint64_t op_id, int rank, int64_t limit) {
  if (limit < 0) {
    return "credit of less than nothing";
  }
  if (op_id == 0) {
    Peer& pool = peer(rank);
    pool.eager_out = std::max<int64_t>(0, pool.eager_out - limit);
    for (const auto& entry : ops_) {
      actions_.push_back(Action{Action::Kind::MaySend, rank, entry.first, 0});
    }
    return nullptr;
  }
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    Unexpected& unexpected = unexpected_[op_id][rank];
    if (unexpected.limit == kNoLimit && ++peer(rank).limits > config_.max_ahead) {
      return "credit for too many operations that are not posted here";
    }
    unexpected.limit = std::max(unexpected.limit, limit);
    return nullptr;
  }
  EdgeState* edge = edgeTo(found->second.outgoing, rank);
  if (edge == nullptr) {
    return "credit on an edge that this operation does not have";
  }
  edge->limit = std::max(edge->limit, std::min(limit, edge->total));
  actions_.push_back(Action{Action::Kind::MaySend, rank, op_id, 0});
  return nullptr;
}

Credits::Permission Credits::maySend(uint64_t op_id, int rank, int64_t nbytes) const {
  const EdgeState* const edge = outgoing(op_id, rank);
  if (edge == nullptr) {
    return Permission::No;
  }
  if (edge->limit != kNoLimit && edge->moved + nbytes <= edge->limit) { // no limit yet: the peer may not have posted it
    return Permission::Credit;
  }
  const Peer& pool = peer(rank);
  const bool within_eager = edge->moved + nbytes <= config_.eager_nbytes;
  return within_eager && pool.eager_out + cost(nbytes) <= config_.eager_pool_nbytes ? Permission::Eager
                                                                                    : Permission::No;
}

bool Credits::hasRoom(int rank, int64_t nbytes, size_t frames) const {
  return nbytes <= config_.eager_nbytes && peer(rank).eager_out + cost(nbytes, frames) <= config_.eager_pool_nbytes;
}

void Credits::sent(uint64_t op_id, int rank, int64_t nbytes, Permission used) {
  if (used == Permission::Eager) {
    Peer& pool = peer(rank);
    pool.eager_out += cost(nbytes);
    pool.eager_sent += cost(nbytes);
  }
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    if (EdgeState* edge = edgeTo(found->second.outgoing, rank)) {
      edge->moved += nbytes;
      ++edge->passed;
      edge->eager_sent = peer(rank).eager_sent;
    }
  }
}

// ---- questions

bool Credits::lacksCredit(uint64_t op_id, int rank) const {
  const EdgeState* const edge = outgoing(op_id, rank);
  return edge != nullptr && edge->limit == kNoLimit && edge->passed < edge->frames;
}

bool Credits::hasShown(uint64_t op_id, int rank) const {
  const EdgeState* const edge = incoming(op_id, rank);
  return edge != nullptr && edge->shown;
}

int64_t Credits::incomingNbytes(uint64_t op_id, int rank) const {
  const EdgeState* const edge = incoming(op_id, rank);
  return edge == nullptr ? -1 : edge->total;
}

int64_t Credits::outgoingNbytes(uint64_t op_id, int rank) const {
  const EdgeState* const edge = outgoing(op_id, rank);
  return edge == nullptr ? -1 : edge->total;
}

std::vector<int> Credits::unfinished(uint64_t op_id) const {
  std::vector<int> ranks;
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return ranks;
  }
  for (const EdgeState& edge : found->second.incoming) {
    if (edge.moved < edge.total || edge.total == 0) {
      ranks.push_back(edge.peer);
    }
  }
  for (const EdgeState& edge : found->second.outgoing) {
    if (edge.passed < edge.frames) {
      ranks.push_back(edge.peer);
    }
  }
  return ranks;
}

std::vector<int> Credits::withoutRoom(uint64_t op_id) const {
  std::vector<int> ranks;
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return ranks;
  }
  for (const EdgeState& edge : found->second.outgoing) {
    if (!hasRoom(edge.peer, edge.total, edge.frames)) {
      ranks.push_back(edge.peer);
    }
  }
  return ranks;
}

Credits::Usage Credits::usage() const {
  Usage usage;
  for (const Peer& entry : peers_) {
    usage.eager_in += entry.eager_in;
    usage.past += entry.past.size();
    usage.ahead += entry.ahead;
  }
  usage.most_past = peers_.size() * static_cast<size_t>(config_.eager_pool_nbytes / config_.frame_nbytes + 1);
  usage.with_credit = ops_.size();
  usage.unexpected_credit = unexpected_.size();
  return usage;
}

} // namespace pycomm
