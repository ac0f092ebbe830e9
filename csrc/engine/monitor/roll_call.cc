#include "engine/monitor/roll_call.h"

#include <algorithm>

#include "engine/operation/operation.h"
#include "engine/report/mismatch.h"

namespace pycomm {
namespace {

constexpr size_t kRecent = 256;

} // namespace

void RollCall::send(int peer, const FrameHeader& header, Way way) {
  Action action;
  action.kind = Action::Kind::Send;
  action.peer = peer;
  action.way = way;
  action.header = header;
  actions_.push_back(std::move(action));
}

void RollCall::fail(ErrorRecord record) {
  if (failed_) {
    return; // the first error wins
  }
  failed_ = true;
  Action action;
  action.kind = Action::Kind::Fail;
  action.record = std::move(record);
  actions_.push_back(std::move(action));
}

FrameHeader RollCall::headerFor(uint64_t op_id, FrameType type, int peer) const {
  FrameHeader header;
  header.type = type;
  header.group = config_.group;
  header.epoch = config_.epoch;
  header.op_id = op_id;
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    found->second.descriptor.writeTo(header);
    addressTo(peer, found->second.descriptor, header);
  }
  return header;
}

void RollCall::addressTo(int peer, const Descriptor& descriptor, FrameHeader& header) const {
  if (descriptor.kind != Collective::AllToAll) {
    return;
  }
  const int64_t nbytes = credits_.outgoingNbytes(header.op_id, peer);
  if (nbytes >= 0) {
    header.numel = nbytes / static_cast<int64_t>(elementSize(descriptor.dtype));
  }
}

Descriptor RollCall::expectedFrom(const Op& op, int peer) const {
  Descriptor expected = op.descriptor;
  if (expected.kind == Collective::AllToAll) {
    const int64_t nbytes = credits_.incomingNbytes(op.id.id, peer);
    if (nbytes >= 0) {
      expected.numel = nbytes / static_cast<int64_t>(elementSize(expected.dtype));
    }
  }
  return expected;
}

void RollCall::entered(const OperationId& id, const Descriptor& descriptor, Deadline deadline, TimePoint now) {
  Op& op = ops_[id.id];
  op.id = id;
  op.descriptor = descriptor;
  op.deadline = deadline;
  op.since = now;
  last_entered_ = id;
  highest_sequence_ = std::max(highest_sequence_, id.sequence);
  last_descriptor_ = descriptor;
  next_tick_ = std::min(next_tick_, now + std::chrono::milliseconds(config_.waiting_after_ms));
  next_deadline_ = std::min(next_deadline_, deadline.instant());
  const Heard heard = takeHeard(id.id);
  for (const auto& entry : heard.ranks) {
    noteCame(op, entry.first);
    compare(expectedFrom(op, entry.first), entry.first, entry.second, id);
  }
  correct(id.id, heard.refused);
  if (descriptor.kind == Collective::Send) {
    announce(op);
  }
}

// A message concerns two ranks only, so nobody else is ever asked about it. One that cannot go eagerly is announced at once: its
// receiver could not find it otherwise.
void RollCall::announce(Op& op) {
  for (const int peer : credits_.withoutRoom(op.id.id)) {
    op.told_waiting = true;
    ask(op, peer);
  }
}

void RollCall::ended(uint64_t op_id) {
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  keepRecent(op_id, found->second.descriptor);
  ops_.erase(found);
  next_tick_ = std::min(next_tick_, next_asks_);
}

std::vector<int> RollCall::heardFrom(uint64_t op_id) const {
  std::vector<int> ranks;
  const auto found = heard_.find(op_id);
  if (found != heard_.end()) {
    for (const auto& entry : found->second.ranks) {
      ranks.push_back(entry.first);
    }
  }
  return ranks;
}

RollCall::Heard RollCall::takeHeard(uint64_t op_id) {
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

void RollCall::keepRecent(uint64_t op_id, const Descriptor& descriptor) {
  recent_[op_id] = descriptor;
  recent_order_.push_back(op_id);
  if (recent_order_.size() > kRecent) {
    recent_.erase(recent_order_.front());
    recent_order_.pop_front();
  }
}

void RollCall::passed(const OperationId& id, const Descriptor& descriptor) {
  if (ops_.count(id.id) != 0 || recent_.count(id.id) != 0) {
    return;
  }
  keepRecent(id.id, descriptor);
  if (id.sequence > highest_sequence_) { // entered later than the last one that was entered here
    highest_sequence_ = id.sequence;
    last_entered_ = id;
    last_descriptor_ = descriptor;
  }
  const Heard heard = takeHeard(id.id);
  for (const auto& entry : heard.ranks) {
    compare(descriptor, entry.first, entry.second, id);
  }
}

void RollCall::compare(const Descriptor& mine, int peer, const Descriptor& theirs, const OperationId& id) {
  if (mine != theirs) {
    fail(disagreement(config_.hosts, config_.rank, mine, peer, theirs, id));
  }
}

RollCall::Standing RollCall::compared(int peer, const FrameHeader& header) {
  const auto found = ops_.find(header.op_id);
  if (found != ops_.end()) {
    if (header.type != FrameType::Data) { // else its bytes count: see hasCome() and progressed()
      noteCame(found->second, peer);
    }
    compare(expectedFrom(found->second, peer), peer, Descriptor::readFrom(header), found->second.id);
    return Standing::Entered;
  }
  const auto recent = recent_.find(header.op_id);
  if (recent == recent_.end()) {
    return Standing::Unknown;
  }
  const bool derived = (header.op_id & kDerivedIdBit) != 0;
  Descriptor theirs = Descriptor::readFrom(header);
  theirs.numel = theirs.kind == Collective::AllToAll ? recent->second.numel : theirs.numel;
  compare(recent->second, peer, theirs, OperationId{header.op_id, derived ? -1 : static_cast<int64_t>(header.op_id)});
  return Standing::Past;
}

bool RollCall::remember(int peer, const FrameHeader& header, TimePoint now) {
  const Descriptor theirs = Descriptor::readFrom(header);
  Heard& heard = heard_[header.op_id];
  if (heard.ranks.empty()) {
    heard.since = now;
  }
  heard.last = now;
  heard.answered_late.erase(peer);
  const auto inserted = heard.ranks.emplace(peer, theirs);
  if (inserted.second) {
    ++peers_[static_cast<size_t>(peer)].heard(theirs.kind == Collective::Send);
  } else if (inserted.first->second != theirs) {
    violated(peer, header, "two different descriptors for one operation");
    return false;
  }
  return true;
}

void RollCall::progressed(uint64_t op_id, TimePoint now) {
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    found->second.since = now;
    found->second.missing.clear();
  }
}

void RollCall::violated(int peer, const FrameHeader& header, const std::string& what) {
  fail(violation(peer, header, what));
}

ErrorRecord RollCall::violation(int peer, const FrameHeader& header, const std::string& what) const {
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  record.rank = config_.rank;
  record.host = config_.hosts[static_cast<size_t>(config_.rank)];
  record.peer = peer;
  record.peer_host = config_.hosts[static_cast<size_t>(peer)];
  record.op = collectiveName(Descriptor::readFrom(header).kind);
  record.sequence = (header.op_id & kDerivedIdBit) != 0 ? -1 : static_cast<int64_t>(header.op_id);
  record.phase = "matching";
  record.summary = "Rank " + std::to_string(peer) + " sent what the protocol does not allow: " + what + ".";
  record.hint = "check that all ranks run the same build of pycomm; otherwise report this as a bug";
  return record;
}

// ---- time

void RollCall::checkDeadlines(TimePoint now) {
  if (now < next_deadline_) {
    return;
  }
  TimePoint next = TimePoint::max();
  for (auto& entry : ops_) {
    Deadline& deadline = entry.second.deadline;
    if (deadline.expired(now)) {
      Action action;
      action.kind = Action::Kind::Overdue;
      action.op_id = entry.first;
      actions_.push_back(std::move(action));
      deadline = Deadline::at(now + kReportAgain);
    }
    next = std::min(next, deadline.instant());
  }
  next_deadline_ = next; // last: if there was no memory for an action, the next tick looks again
}

void RollCall::tick(TimePoint now) {
  checkDeadlines(now);
  next_tick_ = TimePoint::max();
  next_asks_ = TimePoint::max();
  if (failed_) {
    return;
  }
  size_t asking = 0;
  for (auto at = ops_.begin(); at != ops_.end(); ++at) {
    if ((at->first & kDerivedIdBit) == 0 && asking++ == config_.max_asking) {
      next_asks_ = at->second.since + std::chrono::milliseconds(config_.waiting_after_ms);
      at = ops_.lower_bound(kDerivedIdBit); // these do not wait for each other in order
      if (at == ops_.end()) {
        break;
      }
    }
    Op& op = at->second;
    tellWaiting(op, now);
    if (!op.told_waiting) {
      next_tick_ = std::min(next_tick_, op.since + std::chrono::milliseconds(config_.waiting_after_ms));
    } else if (asksEveryone(op)) {
      next_tick_ = std::min(next_tick_, op.since + nextRound(op));
    }
  }
}

// ---- questions about operations

std::optional<Missing> RollCall::missing(uint64_t op_id, int peer) const {
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

std::optional<Missing> RollCall::missing(uint64_t op_id) const {
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
