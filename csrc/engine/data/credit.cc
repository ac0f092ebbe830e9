#include "engine/data/credit.h"

#include <algorithm>
#include <iterator>

#include "engine/data/waiting.h"

namespace pycomm::credit {
namespace {

// More cannot be missing from the pool where its sender finds it full: a quarter at the most has been used and is not given back yet,
// and the frame that does not fit is one of the largest.
bool crowded(const Tables& tables, int rank) {
  const int64_t pool = tables.limits.eager_pool_nbytes;
  const int64_t held_when_full = pool - pool / 4 - tables.limits.cost(tables.limits.eager_nbytes);
  return tables.peer(rank).eager_in > std::max<int64_t>(0, std::min(pool / 2, held_when_full));
}

/// `shown`: the peer has entered the operation, as a frame of it shows.
void grant(Tables& tables, uint64_t op_id, EdgeRow& edge, bool shown) {
  if (edge.passed == edge.frames) {
    return; // all of it has arrived
  }
  const int64_t limit = std::min(edge.total, edge.moved + tables.limits.window_nbytes);
  // Small raises are saved up: a quarter of a window, or the rest of the edge. Not more: what is saved up is missing
  // from the room that a ring counts on, which is half a window and a segment of a quarter (kEdgeRoomNbytes,
  // kMaxSegmentNbytes).
  const bool worth_it = limit - edge.limit >= tables.limits.window_nbytes / 4 || limit == edge.total;
  if (limit <= edge.limit || !worth_it) {
    return;
  }
  if (edge.limit == kNoLimit && !shown) {
    PeerRow& from = tables.peer(edge.peer);
    if (from.granted_early >= tables.limits.max_ahead) {
      return; // the peer says when it waits for this, or answers when this rank does, and shown() grants it then
    }
    edge.granted_early = true;
    ++from.granted_early;
  }
  edge.limit = limit;
  tables.credit_actions.push_back(CreditAction{CreditAction::Kind::Grant, edge.peer, op_id, limit});
}

void grantAllFrom(Tables& tables, int rank) {
  for (auto& entry : tables.entered) {
    if (EdgeRow* edge = entry.second.from(rank)) {
      grant(tables, entry.first, *edge, waiting::hasCome(entry.second, rank));
    }
  }
}

void noLongerEarly(Tables& tables, EdgeRow& edge) noexcept {
  if (std::exchange(edge.granted_early, false)) {
    --tables.peer(edge.peer).granted_early;
  }
}

// Messages are not kept: which ones are past is known by their numbers (PointToPoint).
void keepPast(Tables& tables, const EdgeRow& edge, uint64_t op_id, bool message) {
  PeerRow& to = tables.peer(edge.peer);
  const int64_t over = to.eager_sent - tables.limits.eager_pool_nbytes;
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
  to.past.insert(at, PeerRow::Past{op_id, edge.eager_sent});
}

} // namespace

// ---- the life of an operation

void entered(Tables& tables, OperationRow& row, const PreparedSchedule& schedule, const UnexpectedRow* unexpected) {
  const auto add = [](std::vector<EdgeRow>& rows, const std::vector<Edge>& edges) {
    rows.reserve(edges.size());
    for (const Edge& edge : edges) {
      EdgeRow& added = rows.emplace_back();
      added.peer = edge.peer;
      added.total = edge.nbytes;
      added.frames = edge.steps.size();
    }
  };
  add(row.incoming, schedule.incoming);
  add(row.outgoing, schedule.outgoing);
  if (unexpected != nullptr) {
    for (const auto& [peer, ahead] : unexpected->peers) {
      if (EdgeRow* edge = row.to(peer)) {
        edge->limit = std::max(edge->limit, ahead.limit);
      }
      if (EdgeRow* edge = row.from(peer)) {
        edge->passed = ahead.frames;
      }
    }
  }
  for (EdgeRow& edge : row.incoming) {
    if (edge.total > tables.limits.eager_nbytes || crowded(tables, edge.peer)) {
      grant(tables, row.id().id, edge, unexpected != nullptr && unexpected->peers.count(edge.peer) != 0);
    }
  }
}

void ended(Tables& tables, OperationRow& row) {
  for (const EdgeRow& edge : row.outgoing) {
    keepPast(tables, edge, row.id().id, row.isMessage());
  }
  forget(tables, row);
}

void forget(Tables& tables, OperationRow& row) noexcept {
  for (EdgeRow& edge : row.incoming) {
    noLongerEarly(tables, edge);
  }
}

bool isPast(const Tables& tables, int peer, uint64_t op_id) {
  const std::deque<PeerRow::Past>& past = tables.peer(peer).past;
  return std::any_of(past.rbegin(), past.rend(), [&](const PeerRow::Past& entry) { return entry.op_id == op_id; });
}

// ---- receiving

void shown(Tables& tables, OperationRow& row, int peer) {
  EdgeRow* const edge = row.from(peer);
  if (edge == nullptr) {
    return;
  }
  noLongerEarly(tables, *edge);
  if (edge->limit == kNoLimit && (edge->total > tables.limits.eager_nbytes || crowded(tables, peer))) {
    grant(tables, row.id().id, *edge, true);
  }
}

const char* headerArrived(Tables& tables, OperationRow* row, int peer, int64_t nbytes, bool eager) {
  PeerRow& pool = tables.peer(peer);
  const bool was_crowded = crowded(tables, peer);
  if (eager) {
    pool.eager_in += tables.limits.cost(nbytes);
    if (pool.eager_in > tables.limits.eager_pool_nbytes) {
      return "more eager bytes than the pool holds";
    }
  }
  if (row != nullptr) {
    EdgeRow* edge = row->from(peer);
    if (edge == nullptr || edge->frames == 0) { // the latter: what is only watched over here moves nothing
      return "data on an edge that this operation does not have";
    }
    ++edge->passed;
  } else if (!eager) {
    return "data without credit for an operation that is not posted here";
  }
  if (crowded(tables, peer) && !was_crowded) { // what is entered from now on gets credit at once
    grantAllFrom(tables, peer);
  }
  return nullptr;
}

void consumed(Tables& tables, OperationRow& row, int peer, int64_t nbytes, bool eager) {
  if (eager) {
    PeerRow& pool = tables.peer(peer);
    pool.eager_in -= tables.limits.cost(nbytes);
    pool.eager_used += tables.limits.cost(nbytes);
    if (pool.eager_used >= tables.limits.eager_pool_nbytes / 4 && pool.trouble == nullptr) { // else its link broke
      tables.credit_actions.push_back(
          CreditAction{CreditAction::Kind::Grant, peer, 0, std::exchange(pool.eager_used, 0)});
    }
  }
  if (EdgeRow* edge = row.from(peer)) {
    edge->moved += nbytes;
    if (edge->limit != kNoLimit) { // an edge that goes eagerly needs no credit
      grant(tables, row.id().id, *edge, true);
    }
  }
}

// ---- sending

const char* granted(Tables& tables, OperationRow& row, int peer, int64_t limit) {
  if (limit < 0) {
    return "credit of less than nothing";
  }
  EdgeRow* edge = row.to(peer);
  if (edge == nullptr) {
    return "credit on an edge that this operation does not have";
  }
  edge->limit = std::max(edge->limit, std::min(limit, edge->total));
  tables.credit_actions.push_back(CreditAction{CreditAction::Kind::MaySend, peer, row.id().id, 0});
  return nullptr;
}

const char* grantedAhead(Tables& tables, AheadOfUs& ahead, int peer, int64_t limit) {
  if (limit < 0) {
    return "credit of less than nothing";
  }
  if (ahead.limit == kNoLimit && ++tables.peer(peer).credited_unexpected > tables.limits.max_ahead) {
    return "credit for too many operations that are not posted here";
  }
  ahead.limit = std::max(ahead.limit, limit);
  return nullptr;
}

const char* gaveRoomBack(Tables& tables, int peer, int64_t nbytes) {
  if (nbytes < 0) {
    return "credit of less than nothing";
  }
  PeerRow& pool = tables.peer(peer);
  pool.eager_out = std::max<int64_t>(0, pool.eager_out - nbytes);
  for (const auto& entry : tables.entered) {
    const EdgeRow* const edge = entry.second.to(peer);
    if (edge != nullptr && edge->passed < edge->frames) {
      tables.credit_actions.push_back(CreditAction{CreditAction::Kind::MaySend, peer, entry.first, 0});
    }
  }
  return nullptr;
}

Permission maySend(const Tables& tables, const EdgeRow& edge, int64_t nbytes) {
  if (edge.limit != kNoLimit && edge.moved + nbytes <= edge.limit) { // no limit yet: the peer may not have entered it
    return Permission::Credit;
  }
  const PeerRow& pool = tables.peer(edge.peer);
  const bool within_eager = edge.moved + nbytes <= tables.limits.eager_nbytes;
  return within_eager && pool.eager_out + tables.limits.cost(nbytes) <= tables.limits.eager_pool_nbytes
      ? Permission::Eager
      : Permission::No;
}

bool hasRoom(const Tables& tables, int peer, int64_t nbytes, size_t frames) {
  const Limits& limits = tables.limits;
  return nbytes <= limits.eager_nbytes &&
      tables.peer(peer).eager_out + limits.cost(nbytes, frames) <= limits.eager_pool_nbytes;
}

void queued(Tables& tables, EdgeRow& edge, int64_t nbytes, Permission used) {
  PeerRow& pool = tables.peer(edge.peer);
  if (used == Permission::Eager) {
    pool.eager_out += tables.limits.cost(nbytes);
    pool.eager_sent += tables.limits.cost(nbytes);
  }
  edge.moved += nbytes;
  ++edge.passed;
  edge.eager_sent = pool.eager_sent;
}

// ---- questions

bool lacksCredit(const OperationRow& row, int peer) {
  const EdgeRow* const edge = row.to(peer);
  return edge != nullptr && edge->limit == kNoLimit && edge->passed < edge->frames;
}

std::vector<int> unfinished(const OperationRow& row) {
  std::vector<int> ranks;
  for (const EdgeRow& edge : row.incoming) {
    if (edge.moved < edge.total || edge.total == 0) {
      ranks.push_back(edge.peer);
    }
  }
  for (const EdgeRow& edge : row.outgoing) {
    if (edge.passed < edge.frames) {
      ranks.push_back(edge.peer);
    }
  }
  return ranks;
}

std::vector<int> withoutRoom(const Tables& tables, const OperationRow& row) {
  std::vector<int> ranks;
  for (const EdgeRow& edge : row.outgoing) {
    if (!hasRoom(tables, edge.peer, edge.total, edge.frames)) {
      ranks.push_back(edge.peer);
    }
  }
  return ranks;
}

} // namespace pycomm::credit
