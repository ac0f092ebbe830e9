// The protocol's questions: an operation that waits tells other ranks so, and they say if they have not entered it.
#include <algorithm>
#include <utility>

#include "engine/mismatch.h"
#include "engine/protocol.h"

namespace pycomm {
namespace {

// A rank that is stuck this long asks everyone, so that the error names who has not entered and not only a neighbour that waits
// as well. One frame to each rank, once an operation, only when stuck. Where many operations are under way the oldest ask, and the
// others when they are among the oldest: questions about hundreds would keep data waiting on a slow link.
constexpr int kAskEveryoneAfterMs = 200;
constexpr int kAskEveryoneMaxSize = 256;

} // namespace

void Protocol::waitingArrived(int peer, const FrameHeader& header, Op* op, TimePoint now) {
  // Posted here, and `arrived` has compared it. The peer gives credit once it knows that this rank waits, too, and it may have had no
  // place for that (see below). An answer is not answered.
  if (op != nullptr) {
    const EdgeState* const edge = edgeTo(op->outgoing, peer);
    if (header.aux == 0 && edge != nullptr && edge->limit == kNoLimit && edge->passed < edge->frames) {
      FrameHeader answer = headerFor(header.op_id, FrameType::Waiting, peer);
      answer.aux = 1;
      send(peer, answer);
    }
    return;
  }
  // A counted id that I have passed: it ended here long ago.
  const bool counted = (header.op_id & kDerivedIdBit) == 0;
  if (counted && static_cast<int64_t>(header.op_id) <= highest_sequence_) {
    return;
  }
  // A collective is kept if there is a place for it: its data will be compared in any case, and this rank asks when it enters it. The
  // sender of messages announces no more than there are places for, and one for each question.
  const bool message = header.kind == static_cast<uint8_t>(Collective::Send);
  Peer& asks = peers_[static_cast<size_t>(peer)];
  const auto places = static_cast<size_t>(config_.eager_pool_nbytes / config_.frame_nbytes) + 2 * config_.max_ahead;
  const bool has_place = heard_.count(header.op_id) != 0 || asks.heard(message) < places + (message ? asks.asked : 0);
  if (message && !has_place) {
    fail(violation(peer, header, "it announces too many messages"));
    return;
  }
  if (has_place && remember(peer, header, now) == nullptr) {
    return;
  }
  answerNotEntered(peer, header.op_id);
}

void Protocol::answerNotEntered(int peer, uint64_t op_id) {
  FrameHeader reply;
  reply.type = FrameType::NotEntered;
  reply.group = config_.group;
  reply.epoch = config_.epoch;
  if (last_descriptor_) {
    last_descriptor_->writeTo(reply);
  }
  reply.op_id = op_id;
  reply.aux = last_posted_.id;
  send(peer, reply);
}

std::string Protocol::lastText(const FrameHeader& not_entered) {
  const Descriptor last = Descriptor::readFrom(not_entered);
  const bool message = last.kind == Collective::Send; // its text says which one
  return not_entered.aux == 0 ? "no operation yet"
                              : last.text() + (message ? "" : " " + operationText(not_entered.aux));
}

// Two ranks wait, each in an operation that the other has not entered, and one of the two was issued by a callback: most likely a
// callback ran inline on one rank and later on the other, so that the same operation has two names. After 10 s this is told instead of
// leaving it to the deadline. Counted operations alone cannot meet so: all ranks count in the same order.
void Protocol::standOff(const Op& op, int peer, TimePoint now) {
  const auto patience = std::chrono::milliseconds(config_.standoff_after_ms);
  if (now - op.since < patience || op.descriptor.kind == Collective::Send) {
    return;
  }
  for (const auto& entry : heard_) {
    const auto theirs = entry.second.ranks.find(peer);
    const bool derived = ((entry.first | op.id.id) & kDerivedIdBit) != 0;
    if (theirs == entry.second.ranks.end() || theirs->second.descriptor.kind == Collective::Send || !derived ||
        now - entry.second.since < patience) {
      continue;
    }
    ErrorRecord record = mismatch(config_.hosts, config_.rank, op.descriptor, peer, op.id);
    record.summary = "Rank " + std::to_string(config_.rank) + " (" + record.host + ") waits in " +
        op.descriptor.text() + " " + operationText(op.id.id) + ", which rank " + std::to_string(peer) + " (" +
        record.peer_host + ") has not entered; that one waits in " + theirs->second.descriptor.text() + " " +
        operationText(entry.first) + ", which is not entered here.";
    fail(std::move(record));
    return;
  }
}

void Protocol::tellWaiting(Op& op, TimePoint now) {
  const auto waited = now - op.since;
  if (!op.told_waiting && waited >= std::chrono::milliseconds(config_.waiting_after_ms)) {
    op.told_waiting = true;
    const FrameHeader header = headerFor(op.id.id, FrameType::Waiting, -1);
    for (const EdgeState& edge : op.incoming) {
      if (edge.moved < edge.total || edge.total == 0) {
        send(edge.peer, header);
      }
    }
    for (const EdgeState& edge : op.outgoing) {
      if (edge.passed < edge.frames) {
        send(edge.peer, header);
      }
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
    const FrameHeader header = headerFor(op.id.id, FrameType::Waiting, -1);
    for (int peer = 0; peer < config_.size; ++peer) {
      if (peer != config_.rank) {
        send(peer, header);
      }
    }
  }
}

void Protocol::tick(TimePoint now) {
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
