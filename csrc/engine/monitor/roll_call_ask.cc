// The questions of the roll call: an operation that waits says so to other ranks, and they answer if they have not entered it. And its
// deadlines.
#include <algorithm>

#include "engine/monitor/roll_call.h"
#include "engine/report/mismatch.h"

namespace pycomm {
namespace {

constexpr int kAskEveryoneAfterMs = 200;
constexpr int kAskEveryoneMaxSize = 256;

} // namespace

void RollCall::asked(int peer, const FrameHeader& header, TimePoint now) {
  // Entered here, and `compared` has compared it. The peer gives credit once it knows that this rank waits, too, and it may have had no
  // place for that (see below). An answer is not answered.
  if (ops_.count(header.op_id) != 0) {
    if (header.aux == 0 && credits_.lacksCredit(header.op_id, peer)) {
      FrameHeader answer = headerFor(header.op_id, FrameType::Waiting, peer);
      answer.aux = 1;
      send(peer, answer);
    }
    return;
  }
  // A counted id that this rank has passed: it ended here long ago.
  const bool counted = (header.op_id & kDerivedIdBit) == 0;
  if (counted && static_cast<int64_t>(header.op_id) <= highest_sequence_) {
    return;
  }
  // A collective is kept if there is a place for it: its data will be compared in any case, and this rank asks when it enters it. The
  // sender of messages announces no more than there are places for, and one for each question.
  const bool message = header.kind == static_cast<uint8_t>(Collective::Send);
  Peer& asks = peers_[static_cast<size_t>(peer)];
  const bool has_place = heard_.count(header.op_id) != 0 || asks.heard(message) < places_ + (message ? asks.asked : 0);
  if (message && !has_place) {
    violated(peer, header, "it announces too many messages");
    return;
  }
  if (has_place && !remember(peer, header, now)) {
    return;
  }
  answerNotEntered(peer, header.op_id);
}

void RollCall::answered(int peer, const FrameHeader& header, TimePoint now) {
  const auto found = ops_.find(header.op_id);
  // A frame of the peer shows that it has entered the operation since.
  if (found != ops_.end() && !credits_.hasShown(header.op_id, peer)) {
    found->second.missing.push_back(Missing{peer, lastText(header)});
    standOff(found->second, peer, now);
  }
}

void RollCall::answerNotEntered(int peer, uint64_t op_id) {
  FrameHeader reply;
  reply.type = FrameType::NotEntered;
  reply.group = config_.group;
  reply.epoch = config_.epoch;
  if (last_descriptor_) {
    last_descriptor_->writeTo(reply);
  }
  reply.op_id = op_id;
  reply.aux = last_entered_.id;
  send(peer, reply);
}

std::string RollCall::lastText(const FrameHeader& not_entered) {
  const Descriptor last = Descriptor::readFrom(not_entered);
  const bool message = last.kind == Collective::Send; // its text says which one
  return not_entered.aux == 0 ? "no operation yet"
                              : last.text() + (message ? "" : " " + operationText(not_entered.aux));
}

// Two ranks wait, each in an operation that the other has not entered, and one of the two was issued by a callback: most likely a
// callback ran inline on one rank and later on the other, so that the same operation has two names. After 10 s this is reported instead
// of leaving it to the deadline. Counted operations alone cannot meet so: all ranks count in the same order.
void RollCall::standOff(const Op& op, int peer, TimePoint now) {
  const auto patience = std::chrono::milliseconds(config_.standoff_after_ms);
  if (now - op.since < patience || op.descriptor.kind == Collective::Send) {
    return;
  }
  for (const auto& entry : heard_) {
    const auto theirs = entry.second.ranks.find(peer);
    const bool derived = ((entry.first | op.id.id) & kDerivedIdBit) != 0;
    if (theirs == entry.second.ranks.end() || theirs->second.kind == Collective::Send || !derived ||
        now - entry.second.since < patience) {
      continue;
    }
    ErrorRecord record = mismatch(config_.hosts, config_.rank, op.descriptor, peer, op.id);
    record.summary = "Rank " + std::to_string(config_.rank) + " (" + record.host + ") waits in " +
        op.descriptor.text() + " " + operationText(op.id.id) + ", which rank " + std::to_string(peer) + " (" +
        record.peer_host + ") has not entered; that one waits in " + theirs->second.text() + " " +
        operationText(entry.first) + ", which is not entered here.";
    fail(std::move(record));
    return;
  }
}

void RollCall::tellWaiting(Op& op, TimePoint now) {
  const auto waited = now - op.since;
  if (!op.told_waiting && waited >= std::chrono::milliseconds(config_.waiting_after_ms)) {
    op.told_waiting = true;
    for (const int peer : credits_.unfinished(op.id.id)) {
      send(peer, headerFor(op.id.id, FrameType::Waiting, peer));
    }
  }
  const auto due = [&](bool told, int after_ms) {
    return !told && config_.size <= kAskEveryoneMaxSize && waited >= std::chrono::milliseconds(after_ms);
  };
  const bool again = due(op.told_again, config_.standoff_after_ms + 50);
  if (again || due(op.told_everyone, kAskEveryoneAfterMs)) {
    op.told_everyone = true;
    op.told_again = again;
    op.missing.clear();
    for (int peer = 0; peer < config_.size; ++peer) {
      if (peer != config_.rank) {
        send(peer, headerFor(op.id.id, FrameType::Waiting, peer));
      }
    }
  }
}

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
      deadline = Deadline::never();
    } else {
      next = std::min(next, deadline.instant());
    }
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
    } else if (!op.told_everyone && config_.size <= kAskEveryoneMaxSize) {
      next_tick_ = std::min(next_tick_, op.since + std::chrono::milliseconds(kAskEveryoneAfterMs));
    } else if (!op.told_again && config_.size <= kAskEveryoneMaxSize) {
      // A little later than the patience, so that the answer finds it over.
      next_tick_ = std::min(next_tick_, op.since + std::chrono::milliseconds(config_.standoff_after_ms + 50));
    }
  }
}

} // namespace pycomm
