#include "engine/data/leaving.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/data/point_to_point.h"
#include "engine/monitor/membership.h"
#include "engine/report/failure_text.h"

namespace pycomm::leaving {
namespace {

using Reading = PeerRow::Reading;
using Presence = PeerRow::Presence;
using Suspicion = PeerRow::Suspicion;

// How long a link may take that the peer opened before it left.
constexpr std::chrono::milliseconds kLinkWithin(kOneTryMs);

void notice(Tables& tables, ErrorRecord record) {
  Action& action = tables.actions.emplace_back();
  action.kind = Action::Kind::Notice;
  action.record = std::move(record);
}

PeerRow::Trouble& troubleOf(PeerRow& peer) {
  peer.trouble = peer.trouble != nullptr ? std::move(peer.trouble) : std::make_unique<PeerRow::Trouble>();
  return *peer.trouble;
}

const Suspicion* suspicionOf(const PeerRow& peer) noexcept {
  return peer.trouble != nullptr && peer.trouble->suspicion ? &*peer.trouble->suspicion : nullptr;
}

const ErrorRecord* changedOf(const PeerRow& peer) noexcept {
  return peer.trouble != nullptr && peer.trouble->changed ? &*peer.trouble->changed : nullptr;
}

const ErrorRecord* lostOf(const PeerRow& peer) noexcept {
  return peer.trouble != nullptr && peer.trouble->lost ? &*peer.trouble->lost : nullptr;
}

/// Unless it is suspected already.
void suspect(Tables& tables, int peer, Suspicion&& suspicion) {
  std::optional<Suspicion>& of = troubleOf(tables.peer(peer)).suspicion;
  if (!of) {
    of = std::move(suspicion);
    ++tables.suspicions;
  }
}

std::optional<Suspicion> takeSuspicion(Tables& tables, PeerRow& peer) noexcept {
  if (suspicionOf(peer) == nullptr) {
    return std::nullopt;
  }
  --tables.suspicions;
  return std::exchange(peer.trouble->suspicion, std::nullopt);
}

void goesAway(Tables& tables, PeerRow& peer, Presence how) noexcept {
  tables.away += peer.presence == Presence::Here ? 1 : 0;
  peer.asked = 0; // it answers no more
  peer.presence = how;
}

// ---- what this rank's operations still have to do with a peer

template <typename EdgeOf>
const Operation* firstWith(const Tables& tables, const EdgeOf& edge_of) noexcept {
  for (const auto& entry : tables.entered) {
    const EdgeRow* const edge = edge_of(entry.second);
    if (edge != nullptr && edge->done < edge->frames) {
      return entry.second.operation.get();
    }
  }
  return nullptr;
}

/// The first operation that has still to send to `peer`; null if there is none.
const Operation* owing(const Tables& tables, int peer) noexcept {
  const Operation* const operation = firstWith(tables, [&](const OperationRow& row) { return row.to(peer); });
  const SendQueue* const queue = tables.peer(peer).queue.get();
  return operation != nullptr || queue == nullptr ? operation : queue->oldest();
}

/// The first receive from `peer`, or from kAnyRank itself, that has no message yet. One that has a message stays in the table until it has
/// begun.
const Operation* receiveFrom(const Tables& tables, int peer, size_t waiting) noexcept {
  if (waiting == 0) {
    return nullptr;
  }
  const auto found = std::find_if(tables.receives.begin(), tables.receives.end(), [&](const auto& entry) {
    return entry.second->request().peer == peer;
  });
  return found == tables.receives.end() ? nullptr : found->second.get();
}

/// The first operation that waits for frames or a message from `peer`; null if there is none.
const Operation* awaiting(const Tables& tables, int peer) noexcept {
  const Operation* const operation = firstWith(tables, [&](const OperationRow& row) { return row.from(peer); });
  return operation != nullptr ? operation : receiveFrom(tables, peer, tables.peer(peer).receives);
}

/// A receive from any rank that has no message yet; null if there is none.
const Operation* awaitingAnyone(const Tables& tables) noexcept {
  return receiveFrom(tables, PointToPoint::kAnyRank, tables.receives_from_any);
}

// A receive from any rank that waits although all other ranks have left and none of their links is open; null if there is none.
const Operation* withoutSenders(const Tables& tables) noexcept {
  if (tables.away != tables.peers.size() - 1) {
    return nullptr;
  }
  for (const PeerRow& peer : tables.peers) {
    if (peer.reading == Reading::Open) {
      return nullptr;
    }
  }
  return awaitingAnyone(tables);
}

// ---- what that means

/// What an operation that needs a peer fails with once that is away. A lost one is still there: its link broke.
ErrorRecord awayFrom(const Tables& tables, int peer, const Operation& operation) {
  const ErrorRecord* const lost = lostOf(tables.peer(peer));
  return lost != nullptr ? *lost : peerLeftUs(peer, operation, tables.identity);
}

// Bytes of the frames of an incoming edge that have not begun to arrive.
int64_t nbytesToCome(const OperationRow& row, const EdgeRow& edge) {
  if (edge.passed == 0) {
    return edge.total;
  }
  const PreparedSchedule& prepared = *row.operation->request().schedule;
  const Edge& frames = prepared.incoming[static_cast<size_t>(&edge - row.incoming.data())];
  int64_t nbytes = 0;
  for (size_t i = edge.passed; i < edge.frames; ++i) {
    nbytes += static_cast<int64_t>(prepared.frameNbytes(prepared.schedule.steps[frames.steps[i]]));
  }
  return nbytes;
}

// Whether operations wait for so many bytes of a lost peer that they take credit, or room of the pool that it has used up: neither reaches it
// any more. Nor has credit that they gave: when it was lost, nothing was due from it, so all of them came later.
bool lacksCredit(const Tables& tables, int peer) {
  const PeerRow& row = tables.peer(peer);
  if (row.presence != Presence::Lost) {
    return false;
  }
  int64_t pool = row.eager_in + row.eager_used; // with what has arrived of these operations
  bool takes_credit = false;
  const auto add = [&](int64_t total, int64_t to_come, size_t frames) {
    takes_credit = takes_credit || total > tables.limits.eager_nbytes;
    pool += tables.limits.cost(to_come, frames);
  };
  for (const auto& entry : tables.entered) {
    const EdgeRow* const edge = entry.second.from(peer);
    if (edge != nullptr && edge->passed < edge->frames) {
      add(edge->total, nbytesToCome(entry.second, *edge), edge->frames - edge->passed);
    }
  }
  for (const auto& entry : tables.receives) {
    if (entry.second->request().peer == peer && !entry.second->identified()) { // else it begins, and is in both tables
      const auto nbytes = static_cast<int64_t>(entry.second->request().output.nbytes);
      add(nbytes, nbytes, 1);
    }
  }
  return takes_credit || pool > tables.limits.eager_pool_nbytes;
}

// Of a peer that has left or is lost: whether an operation still needs it.
void check(Tables& tables, int peer, TimePoint now) {
  const PeerRow& row = tables.peer(peer);
  const Operation* const owing_it = owing(tables, peer);
  const Operation* const awaiting_it = awaiting(tables, peer);
  const bool missed = awaiting_it != nullptr && (row.reading == Reading::Ended || lacksCredit(tables, peer));
  if (owing_it != nullptr || missed) {
    const bool missed_first = missed && (owing_it == nullptr || awaiting_it->issuedAt() < owing_it->issuedAt());
    const ErrorRecord* const changed = missed_first ? changedOf(row) : nullptr;
    notice(tables, changed != nullptr ? *changed : awayFrom(tables, peer, missed_first ? *awaiting_it : *owing_it));
  } else if (awaiting_it != nullptr && row.reading == Reading::NotOpened) {
    suspect(
        tables, peer, Suspicion{Suspicion::State::AwaitsLink, awayFrom(tables, peer, *awaiting_it), now + kLinkWithin});
  }
}

// A receive from any rank can be served as long as a rank is there, or a link may bring a message that was sent before its sender left:
// a goodbye on the control link may even arrive before the Hello of that link.
void checkAnyone(Tables& tables, int left, TimePoint now) {
  const Operation* const receive = withoutSenders(tables);
  if (receive == nullptr) {
    return;
  }
  bool on_its_way = false;
  const ErrorRecord* changed = nullptr;
  for (size_t peer = 0; peer < tables.peers.size(); ++peer) {
    const PeerRow& row = tables.peers[peer];
    on_its_way = on_its_way || (static_cast<int>(peer) != tables.identity.rank && row.reading == Reading::NotOpened);
    changed = changed == nullptr ? changedOf(row) : changed;
  }
  ErrorRecord record = changed == nullptr ? awayFrom(tables, left, *receive) : *changed;
  if (!on_its_way) {
    notice(tables, std::move(record));
    return;
  }
  const Suspicion* const before = suspicionOf(tables.peer(left));
  if (before == nullptr || before->state == Suspicion::State::Doubted) {
    static_cast<void>(takeSuspicion(tables, tables.peer(left)));
    suspect(tables, left, Suspicion{Suspicion::State::AwaitsLink, std::move(record), now + kLinkWithin});
  }
}

// Nothing is due in either direction. Either the peer was only asked whether it has entered an operation, and has ended since. Or a
// message had left and is lost, and the rank that waits for it would wait for ever.
void lose(Tables& tables, int peer, const ErrorRecord& broke, TimePoint doubt_at) {
  PeerRow& row = tables.peer(peer);
  goesAway(tables, row, Presence::Lost);
  ErrorRecord lost = linkLost(peer, broke, tables.identity);
  troubleOf(row).lost = lost;
  suspect(tables, peer, Suspicion{Suspicion::State::Doubted, std::move(lost), doubt_at});
}

// A broken link to a peer matters only if something has still to go out on it. The peer sends on a link of its own, and the end of that
// link is better evidence. If the peer died, the ranks with a control link to it report that.
void decide(Tables& tables, int peer, Suspicion suspicion, TimePoint now) {
  if (suspicion.state == Suspicion::State::Doubted) {
    Action& action = tables.actions.emplace_back();
    action.kind = Action::Kind::Doubt;
    action.record = std::move(suspicion.record);
    check(tables, peer, now); // what was posted meanwhile
    checkAnyone(tables, peer, now);
    return;
  }
  const Reading reading = tables.peer(peer).reading;
  if (tables.peer(peer).isAway()) {
    if (reading == Reading::Open) {
      return; // the link has arrived, and its end will be reported
    }
    if (const Operation* const receive = withoutSenders(tables)) {
      notice(tables, awayFrom(tables, peer, *receive));
      return;
    }
  }
  if (owing(tables, peer) == nullptr) {
    const bool due = awaiting(tables, peer) != nullptr;
    if (!due) {
      if (tables.peer(peer).presence !=
          Presence::Left) { // else another rank has served the receive that waited for its link
        lose(tables, peer, suspicion.record, suspicion.due + kLinkWithin);
      }
      return;
    }
    // The peer's link may be on its way, or still bring what is due. But the peer may wait for credit that went on the broken link.
    if (suspicion.state == Suspicion::State::AwaitsGoodbye && reading != Reading::Ended) {
      suspicion.state = Suspicion::State::AwaitsLink;
      suspicion.due += kLinkWithin;
      suspect(tables, peer, std::move(suspicion));
      return;
    }
  }
  notice(tables, std::move(suspicion.record));
}

} // namespace

// ---- events

void saidGoodbye(Tables& tables, int peer, TimePoint now) {
  PeerRow& row = tables.peer(peer);
  goesAway(tables, row, Presence::Left);
  static_cast<void>(takeSuspicion(tables, row));
  if (row.trouble != nullptr) {
    row.trouble->lost.reset();
  }
  check(tables, peer, now);
  checkAnyone(tables, peer, now);
}

void readingEnded(Tables& tables, int peer, ErrorRecord gone, TimePoint now) {
  PeerRow& row = tables.peer(peer);
  if (row.presence != Presence::Left) {
    notice(tables, std::move(gone));
    return;
  }
  if (gone.code == ErrorCode::DataCorrupt) { // the peer had sent all that was due
    if (awaitingAnyone(tables) != nullptr) { // perhaps for what was changed
      notice(tables, gone);
    }
    std::optional<ErrorRecord>& changed = troubleOf(row).changed;
    changed = changed ? std::move(changed) : std::move(gone);
  }
  saidGoodbye(tables, peer, now); // what waited for this link waits in vain
}

void writingBroke(Tables& tables, int peer, ErrorRecord gone, TimePoint now) {
  if (tables.peer(peer).presence == Presence::Left) {
    saidGoodbye(tables, peer, now); // what is queued for it will not leave
  } else {
    suspect(tables, peer, Suspicion{Suspicion::State::AwaitsGoodbye, std::move(gone), now + kGoodbyeWithin});
  }
}

void posted(Tables& tables, const PreparedSchedule* schedule, bool receives, TimePoint now) {
  if (tables.away == 0) {
    return;
  }
  const auto needs = [&](int peer) {
    const auto to = [&](const Edge& edge) { return edge.peer == peer; };
    return schedule != nullptr &&
        (std::any_of(schedule->incoming.begin(), schedule->incoming.end(), to) ||
         std::any_of(schedule->outgoing.begin(), schedule->outgoing.end(), to));
  };
  int first = -1;
  for (int peer = 0; peer < tables.identity.size; ++peer) {
    if (tables.peer(peer).isAway()) {
      first = first < 0 ? peer : first;
      if (needs(peer)) { // what earlier operations need was checked when they were posted, or when the peer went
        check(tables, peer, now);
      }
    }
  }
  if (receives) { // else a receive that waits has been checked: again, it would take a lost peer for one that left
    checkAnyone(tables, first, now);
  }
}

void tick(Tables& tables, TimePoint now) {
  for (size_t peer = 0; tables.suspicions > 0 && peer < tables.peers.size(); ++peer) {
    PeerRow& row = tables.peers[peer];
    if (suspicionOf(row) == nullptr || suspicionOf(row)->due > now) {
      continue;
    }
    Suspicion kept = *suspicionOf(row);
    try {
      decide(tables, static_cast<int>(peer), *takeSuspicion(tables, row), now);
    } catch (...) { // no memory: the next tick decides
      suspect(tables, static_cast<int>(peer), std::move(kept));
      throw;
    }
  }
}

TimePoint nextTick(const Tables& tables) noexcept {
  TimePoint next = TimePoint::max();
  for (size_t peer = 0; tables.suspicions > 0 && peer < tables.peers.size(); ++peer) {
    const Suspicion* const suspicion = suspicionOf(tables.peers[peer]);
    next = suspicion == nullptr ? next : std::min(next, suspicion->due);
  }
  return next;
}

} // namespace pycomm::leaving
