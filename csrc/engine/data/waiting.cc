#include "engine/data/waiting.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/data/credit.h"
#include "engine/data/matching.h"
#include "engine/report/mismatch.h"

namespace pycomm::waiting {
namespace {

using std::chrono::milliseconds;
using Way = Action::Way;

// When an operation that waits asks all ranks. The first answers may be lost, or be true no more: so once more. And for the last time a
// little later than the patience of findDeadlock(), so that the answers find it over, also where the other rank counts from the first round.
// No later one comes so shortly before the deadline as the first comes after the beginning: the answers that are there must do.
constexpr milliseconds kFirstRound(200);
constexpr milliseconds kSecondRound(2000);
constexpr milliseconds kAfterPatience = kFirstRound + milliseconds(50);
constexpr int kRounds = 3;

// How long ago a rank may have asked that is taken to wait still.
constexpr std::chrono::seconds kLately(1);

/// In FrameHeader::aux of a Waiting that answers one. The other bits have the CallbackOrigin of the sender's operation.
constexpr uint64_t kAnswers = 1;

void send(Tables& tables, int peer, const FrameHeader& header, Way way) {
  Action action;
  action.kind = Action::Kind::Send;
  action.peer = peer;
  action.way = way;
  action.header = header;
  tables.actions.push_back(std::move(action));
}

Way wayOfAnswers(const Tables& tables) noexcept {
  return tables.mayAskEveryone() ? Way::OpenLink : Way::BulkLink;
}

// An edge that cannot go on without credit needs its own link; and the peer grants that once it knows that this rank waits. The receiver of
// a message that is announced waits for that. And in a group so large that nobody asks all ranks, an operation asks once, and only along its
// edges.
void ask(Tables& tables, const OperationRow& row, int peer) {
  const bool announces = row.isMessage() && row.descriptor().root == tables.identity.rank;
  const bool needed = announces || credit::lacksCredit(row, peer) || !tables.mayAskEveryone();
  const Way otherwise = row.isMessage() ? Way::BulkLink : Way::OpenLink;
  send(tables, peer, matching::headerFor(tables, &row, FrameType::Waiting, peer), needed ? Way::Needed : otherwise);
}

// ---- when an operation asks

/// Whether it asks anybody.
bool asks(const OperationRow& row) noexcept {
  return !row.asks_only || !row.asks_only->empty();
}

/// How long it has waited: since it was entered, or a byte moved.
Clock::duration waited(const OperationRow& row, TimePoint now) noexcept {
  return now - row.since;
}

/// When the ranks on edges are asked, if they have not been.
TimePoint firstQuestion(const Tables& tables, const OperationRow& row) noexcept {
  return row.since + milliseconds(tables.limits.waiting_after_ms);
}

bool asksEveryone(const Tables& tables, const OperationRow& row) noexcept {
  return asks(row) && row.rounds < kRounds && tables.mayAskEveryone() && !row.isMessage();
}

milliseconds nextRound(const Tables& tables, const OperationRow& row) noexcept {
  return row.rounds == 0 ? kFirstRound
      : row.rounds == 1  ? kSecondRound
                         : milliseconds(tables.limits.deadlock_after_ms) + kAfterPatience;
}

/// All ranks are to be asked now. True once for each round.
bool takeRound(const Tables& tables, OperationRow& row, TimePoint now) noexcept {
  bool due = false;
  while (asksEveryone(tables, row) && waited(row, now) >= nextRound(tables, row)) {
    due = due || row.rounds == 0 || row.deadline.instant() > now + kFirstRound;
    ++row.rounds;
  }
  return due;
}

void tellWaiting(Tables& tables, OperationRow& row, TimePoint now) {
  if (!row.told_waiting && waited(row, now) >= milliseconds(tables.limits.waiting_after_ms)) {
    row.told_waiting = true;
    for (const int peer : credit::unfinished(row)) {
      ask(tables, row, peer);
    }
  }
  if (takeRound(tables, row, now)) {
    const bool leaves_out_known = row.rounds == 2;
    for (int peer = 0; peer < tables.identity.size; ++peer) {
      const bool known = leaves_out_known && hasCome(row, peer); // to have entered it
      const bool may_ask = !row.asks_only || row.asks_only->count(peer) != 0;
      if (peer != tables.identity.rank && !known && may_ask) {
        ask(tables, row, peer);
      }
    }
  }
}

void checkDeadlines(Tables& tables, TimePoint now) {
  if (now < tables.next_deadline) {
    return;
  }
  TimePoint next = TimePoint::max();
  for (auto& [op_id, row] : tables.entered) {
    if (row.deadline.expired(now)) {
      Action action;
      action.kind = Action::Kind::Overdue;
      action.op_id = op_id;
      tables.actions.push_back(std::move(action));
      row.deadline = Deadline::at(now + kSayAgain);
    }
    next = std::min(next, row.deadline.instant());
  }
  tables.next_deadline = next; // last: if there was no memory for an action, the next tick looks again
}

// Two ranks wait, each in an operation that the other has not entered, and one of the two was issued by a callback: most likely a
// callback ran inline on one rank and later on the other, so that the same operation has two names. After 10 s this is reported instead
// of leaving it to the deadline. Counted operations alone cannot meet so: all ranks count in the same order.
//
// The other rank's operation may have ended without this rank, as that of a root does, or its question may have come very late. So one that
// brought no frame lately is answered once more: if that rank still waits in it, this answer makes that rank find the two. A frame of this
// rank's operation reached it a moment ago: the question whose answer led here.
void findDeadlock(Tables& tables, const OperationRow& row, int peer, TimePoint now) {
  const auto patience = milliseconds(tables.limits.deadlock_after_ms);
  if (waited(row, now) < patience || row.isMessage() || tables.peer(peer).collectives == 0) {
    return;
  }
  for (auto& [op_id, unexpected] : tables.unexpected) { // the oldest counted one first
    const auto found = unexpected.peers.find(peer);
    const bool derived = ((op_id | row.id().id) & kDerivedIdBit) != 0;
    if (found == unexpected.peers.end() || found->second.descriptor.kind == Collective::Send || !derived ||
        now - unexpected.since < patience) {
      continue;
    }
    AheadOfUs& theirs = found->second;
    if (now - unexpected.last > kLately) {
      // Once for each question: two ranks that both have only old questions would answer each other without end.
      if (!std::exchange(theirs.answered_late, true)) {
        answerNotEntered(tables, peer, op_id, wayOfAnswers(tables));
      }
      continue;
    }
    const GroupIdentity& us = tables.identity;
    ErrorRecord record = mismatch(us, row.descriptor(), peer, row.id());
    record.summary = "Rank " + std::to_string(record.rank) + " (" + record.host + ") waits in " +
        row.descriptor().text(us.job) + " " + operationText(row.id().id, row.id().origin) + ", which " +
        us.job.text(peer) + " (" + record.peer_host + ") has not entered; that one waits in " +
        theirs.descriptor.text(us.job) + " " + operationText(op_id, theirs.origin) + ", which is not entered here.";
    matching::fail(tables, std::move(record));
    return;
  }
}

} // namespace

// ---- events

void entered(Tables& tables, const OperationRow& row) {
  tables.next_tick = std::min(tables.next_tick, firstQuestion(tables, row));
  tables.next_deadline = std::min(tables.next_deadline, row.deadline.instant());
}

void came(OperationRow& row, int peer) {
  row.came.insert(peer);
  const auto same = [&](const NotEntered& one) { return one.peer == peer; };
  row.missing.erase(std::remove_if(row.missing.begin(), row.missing.end(), same), row.missing.end());
}

void progressed(OperationRow& row, TimePoint now) noexcept {
  row.since = now;
  row.missing.clear();
}

// A message concerns two ranks only, so nobody else is ever asked about it. One that cannot go eagerly is announced at once: its
// receiver could not find it otherwise.
void announce(Tables& tables, OperationRow& row) {
  for (const int peer : credit::withoutRoom(tables, row)) {
    row.told_waiting = true;
    ask(tables, row, peer);
  }
}

void correct(Tables& tables, const OperationRow& row, const UnexpectedRow& unexpected) {
  for (const auto& [peer, ahead] : unexpected.peers) {
    if (ahead.refused) {
      FrameHeader has_come = matching::headerFor(tables, &row, FrameType::Waiting, peer);
      has_come.aux |= kAnswers;
      send(tables, peer, has_come, wayOfAnswers(tables));
    }
  }
}

void asksOnly(Tables& tables, OperationRow& row, const std::vector<int>& ranks, TimePoint now) {
  row.asks_only.emplace(ranks.begin(), ranks.end());
  row.told_waiting = true; // it has no edges
  const bool first = !row.asked_them && !ranks.empty();
  if (first) {
    row.since = now;
    row.asked_them = true;
  }
  tables.next_tick = std::min(tables.next_tick, nextQuestion(tables, row));
  for (size_t i = 0; first && i < ranks.size(); ++i) {
    ask(tables, row, ranks[i]);
  }
}

void asked(Tables& tables, const OperationRow* row, int peer, const FrameHeader& header, TimePoint now) {
  // Entered here, and its descriptor has been compared. The peer gives credit once it knows that this rank waits, too, and it may have
  // had no place for that (see below). An answer is not answered.
  if (row != nullptr) {
    if (!answers(header) && credit::lacksCredit(*row, peer)) {
      FrameHeader answer = matching::headerFor(tables, row, FrameType::Waiting, peer);
      answer.aux |= kAnswers;
      send(tables, peer, answer, Way::Needed);
    }
    return;
  }
  if (answers(header)) {
    return; // an answer about what has ended here long ago
  }
  if (matching::isBehind(tables, header.op_id)) {
    return; // it ended here long ago
  }
  // A collective is kept if there is a place for it: its data will be compared in any case, and this rank asks when it enters it. The
  // sender of messages announces no more than there are places for, and one for each question.
  const bool message = header.kind == static_cast<uint8_t>(Collective::Send);
  const bool has_place = matching::hasPlace(tables, peer, header.op_id, message);
  if (message && !has_place) {
    matching::violated(tables, peer, header, "it announces too many messages");
    return;
  }
  if (has_place) {
    AheadOfUs* const ahead = matching::keep(tables, peer, header, now);
    if (ahead == nullptr) {
      return;
    }
    if (!message) {
      ahead->refused = true;
      ahead->origin = header.aux != 0 ? header.aux : ahead->origin;
    }
  }
  answerNotEntered(tables, peer, header.op_id, message ? Way::BulkLink : wayOfAnswers(tables));
}

void answered(Tables& tables, OperationRow* row, int peer, const FrameHeader& header, TimePoint now) {
  // Answers travel another way than the frames of the operation, and may come later than those: then the peer has entered it since.
  if (row == nullptr || hasCome(*row, peer)) {
    return;
  }
  const auto same = [&](const NotEntered& one) { return one.peer == peer; };
  const auto earlier = std::find_if(row->missing.begin(), row->missing.end(), same);
  std::string last = lastText(header, peer, tables.identity.job);
  if (earlier == row->missing.end()) {
    row->missing.push_back(NotEntered{peer, std::move(last)});
  } else {
    earlier->last = std::move(last);
  }
  findDeadlock(tables, *row, peer, now);
}

void answerNotEntered(Tables& tables, int peer, uint64_t op_id, Way way) {
  FrameHeader reply = matching::headerFor(tables, nullptr, FrameType::NotEntered, peer);
  matching::writeLast(tables, reply);
  reply.op_id = op_id;
  send(tables, peer, reply, way);
}

// ---- time

void tick(Tables& tables, TimePoint now) {
  checkDeadlines(tables, now);
  tables.next_tick = TimePoint::max();
  tables.next_asks = TimePoint::max();
  if (tables.failed) {
    return;
  }
  size_t asking = 0;
  for (auto at = tables.entered.begin(); at != tables.entered.end(); ++at) {
    if (!asks(at->second)) {
      continue;
    }
    if ((at->first & kDerivedIdBit) == 0 && asking++ == tables.limits.max_asking) {
      tables.next_asks = firstQuestion(tables, at->second);
      at = tables.entered.lower_bound(kDerivedIdBit); // these do not wait for each other in order
      if (at == tables.entered.end()) {
        break;
      }
    }
    tellWaiting(tables, at->second, now);
    tables.next_tick = std::min(tables.next_tick, nextQuestion(tables, at->second));
  }
}

// ---- questions

TimePoint nextTick(const Tables& tables) noexcept {
  return std::min(tables.next_tick, tables.next_deadline);
}

bool answers(const FrameHeader& waiting) noexcept {
  return (waiting.aux & kAnswers) != 0;
}

bool hasCome(const OperationRow& row, int peer) {
  const EdgeRow* const edge = row.from(peer);
  return row.came.count(peer) != 0 || (edge != nullptr && edge->passed > 0);
}

std::optional<NotEntered> missing(const OperationRow& row) {
  if (row.missing.empty()) {
    return std::nullopt;
  }
  return *std::min_element(
      row.missing.begin(), row.missing.end(), [](const NotEntered& a, const NotEntered& b) { return a.peer < b.peer; });
}

std::optional<NotEntered> missing(const OperationRow& row, int peer) {
  for (const NotEntered& entry : row.missing) {
    if (entry.peer == peer) {
      return entry;
    }
  }
  return std::nullopt;
}

std::string lastText(const FrameHeader& not_entered, int peer, const JobRanks& job) {
  const Descriptor last = Descriptor::readFrom(not_entered);
  const bool message = last.kind == Collective::Send; // its text says which one
  return not_entered.aux == 0 ? "no operation yet"
                              : last.text(job, peer) + (message ? "" : " " + operationText(not_entered.aux));
}

TimePoint nextQuestion(const Tables& tables, const OperationRow& row) noexcept {
  if (!row.told_waiting) {
    return firstQuestion(tables, row);
  }
  return asksEveryone(tables, row) ? row.since + nextRound(tables, row) : TimePoint::max();
}

} // namespace pycomm::waiting
