#include "engine/monitor/roll_call.h"

#include <algorithm>

#include "engine/operation/operation.h"
#include "engine/report/mismatch.h"

namespace pycomm {

FrameHeader RollCall::headerFor(uint64_t op_id, FrameType type, int peer) const {
  FrameHeader header;
  header.type = type;
  header.group = config_.group;
  header.epoch = config_.epoch;
  header.op_id = op_id;
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    found->second.descriptor().writeTo(header);
    header.aux = type == FrameType::Waiting ? found->second.id().origin : 0;
    addressTo(peer, found->second.descriptor(), header);
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
  Descriptor expected = op.descriptor();
  if (expected.kind == Collective::AllToAll) {
    const int64_t nbytes = credits_.incomingNbytes(op.id().id, peer);
    if (nbytes >= 0) {
      expected.numel = nbytes / static_cast<int64_t>(elementSize(expected.dtype));
    }
  }
  return expected;
}

void RollCall::entered(const OperationId& id, const Descriptor& descriptor, Deadline deadline, TimePoint now) {
  Op& op = ops_[id.id];
  op.enter(id, descriptor, deadline, now);
  history_.entered(id, descriptor);
  next_tick_ = std::min(next_tick_, op.firstQuestion(config_));
  next_deadline_ = std::min(next_deadline_, deadline.instant());
  const UnexpectedOperations::Entry unexpected = unexpected_.take(id.id);
  for (const auto& entry : unexpected.ranks) {
    op.came(entry.first);
    compare(expectedFrom(op, entry.first), entry.first, entry.second, id);
  }
  correct(id.id, unexpected.refused);
  if (op.isMessage()) {
    announce(op);
  }
}

// A message concerns two ranks only, so nobody else is ever asked about it. One that cannot go eagerly is announced at once: its
// receiver could not find it otherwise.
void RollCall::announce(Op& op) {
  for (const int peer : credits_.withoutRoom(op.id().id)) {
    op.announced();
    ask(op, peer);
  }
}

void RollCall::ended(uint64_t op_id) {
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  history_.ended(op_id, found->second.descriptor());
  ops_.erase(found);
  next_tick_ = std::min(next_tick_, next_asks_);
}

void RollCall::passed(const OperationId& id, const Descriptor& descriptor) {
  if (ops_.count(id.id) != 0 || history_.find(id.id) != nullptr) {
    return;
  }
  history_.passed(id, descriptor);
  const UnexpectedOperations::Entry unexpected = unexpected_.take(id.id);
  for (const auto& entry : unexpected.ranks) {
    compare(descriptor, entry.first, entry.second, id);
  }
}

void RollCall::compare(const Descriptor& mine, int peer, const Descriptor& theirs, const OperationId& id) {
  if (mine != theirs) {
    output_.fail(disagreement(config_.hosts, config_.job, config_.rank, mine, peer, theirs, id));
  }
}

RollCall::OperationState RollCall::compared(int peer, const FrameHeader& header) {
  const auto found = ops_.find(header.op_id);
  if (found != ops_.end()) {
    if (header.type != FrameType::Data) { // else its bytes count: see hasCome() and progressed()
      found->second.came(peer);
    }
    compare(expectedFrom(found->second, peer), peer, Descriptor::readFrom(header), found->second.id());
    return OperationState::Entered;
  }
  const Descriptor* const mine = history_.find(header.op_id);
  if (mine == nullptr) {
    return OperationState::Unknown;
  }
  const bool derived = (header.op_id & kDerivedIdBit) != 0;
  Descriptor theirs = Descriptor::readFrom(header);
  theirs.numel = theirs.kind == Collective::AllToAll ? mine->numel : theirs.numel;
  compare(*mine, peer, theirs, OperationId{header.op_id, derived ? -1 : static_cast<int64_t>(header.op_id)});
  return OperationState::Past;
}

bool RollCall::keepUnexpected(int peer, const FrameHeader& header, TimePoint now) {
  if (!unexpected_.add(peer, header.op_id, Descriptor::readFrom(header), now)) {
    violated(peer, header, "two different descriptors for one operation");
    return false;
  }
  return true;
}

void RollCall::progressed(uint64_t op_id, TimePoint now) {
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    found->second.progressed(now);
  }
}

// ---- time

void RollCall::checkDeadlines(TimePoint now) {
  if (now < next_deadline_) {
    return;
  }
  TimePoint next = TimePoint::max();
  for (auto& entry : ops_) {
    Op& op = entry.second;
    if (op.deadline().expired(now)) {
      output_.overdue(entry.first);
      op.reportAgain(Deadline::at(now + kReportAgain));
    }
    next = std::min(next, op.deadline().instant());
  }
  next_deadline_ = next; // last: if there was no memory for an action, the next tick looks again
}

void RollCall::tick(TimePoint now) {
  checkDeadlines(now);
  next_tick_ = TimePoint::max();
  next_asks_ = TimePoint::max();
  if (failed()) {
    return;
  }
  size_t asking = 0;
  for (auto at = ops_.begin(); at != ops_.end(); ++at) {
    if (!at->second.asks()) {
      continue;
    }
    if ((at->first & kDerivedIdBit) == 0 && asking++ == config_.max_asking) {
      next_asks_ = at->second.firstQuestion(config_);
      at = ops_.lower_bound(kDerivedIdBit); // these do not wait for each other in order
      if (at == ops_.end()) {
        break;
      }
    }
    Op& op = at->second;
    tellWaiting(op, now);
    next_tick_ = std::min(next_tick_, op.nextQuestion(config_));
  }
}

// ---- questions about operations

std::optional<NotEntered> RollCall::missing(uint64_t op_id, int peer) const {
  const auto found = ops_.find(op_id);
  return found == ops_.end() ? std::nullopt : found->second.missing(peer);
}

std::optional<NotEntered> RollCall::missing(uint64_t op_id) const {
  const auto found = ops_.find(op_id);
  return found == ops_.end() ? std::nullopt : found->second.missing();
}

} // namespace pycomm
