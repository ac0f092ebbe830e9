// The questions of the roll call: an operation that waits says so to other ranks, and they answer if they have not entered it.
#include <algorithm>

#include "engine/monitor/roll_call.h"
#include "engine/report/mismatch.h"

namespace pycomm {
namespace {

// How long ago a rank may have asked that is taken to wait still.
constexpr std::chrono::seconds kLately(1);

/// In FrameHeader::aux of a Waiting that answers one. The other bits have the CallbackOrigin of the sender's operation.
constexpr uint64_t kAnswers = 1;

bool answers(const FrameHeader& waiting) noexcept {
  return (waiting.aux & kAnswers) != 0;
}

} // namespace

void RollCall::asked(int peer, const FrameHeader& header, TimePoint now) {
  // Entered here, and `compared` has compared it. The peer gives credit once it knows that this rank waits, too, and it may have had no
  // place for that (see below). An answer is not answered.
  if (ops_.count(header.op_id) != 0) {
    if (!answers(header) && credits_.lacksCredit(header.op_id, peer)) {
      FrameHeader answer = headerFor(header.op_id, FrameType::Waiting, peer);
      answer.aux |= kAnswers;
      output_.send(peer, answer, Way::Needed);
    }
    return;
  }
  if (answers(header)) {
    return; // an answer about what has ended here long ago
  }
  if (history_.isBehind(header.op_id)) {
    return; // it ended here long ago
  }
  // A collective is kept if there is a place for it: its data will be compared in any case, and this rank asks when it enters it. The
  // sender of messages announces no more than there are places for, and one for each question.
  const bool message = header.kind == static_cast<uint8_t>(Collective::Send);
  const bool has_place = unexpected_.hasPlace(peer, header.op_id, message);
  if (message && !has_place) {
    violated(peer, header, "it announces too many messages");
    return;
  }
  if (has_place && !keepUnexpected(peer, header, now)) {
    return;
  }
  if (has_place && !message) {
    unexpected_.refused(peer, header.op_id);
    unexpected_.issuedIn(peer, header.op_id, header.aux);
  }
  answerNotEntered(peer, header.op_id, message ? Way::BulkLink : wayOfAnswers());
}

void RollCall::answered(int peer, const FrameHeader& header, TimePoint now) {
  const auto found = ops_.find(header.op_id);
  // Answers travel another way than the frames of the operation, and may come later than those: then the peer has entered it since.
  if (found == ops_.end() || hasCome(found->second, peer)) {
    return;
  }
  found->second.lacks(peer, lastText(header, peer, config_.job));
  standOff(found->second, peer, now);
}

void RollCall::answerNotEntered(int peer, uint64_t op_id, Way way) {
  FrameHeader reply;
  reply.type = FrameType::NotEntered;
  reply.group = config_.group;
  reply.epoch = config_.epoch;
  history_.writeLast(reply);
  reply.op_id = op_id;
  output_.send(peer, reply, way);
}

void RollCall::correct(uint64_t op_id, const std::set<int>& refused) {
  for (const int peer : refused) {
    FrameHeader came = headerFor(op_id, FrameType::Waiting, peer);
    came.aux |= kAnswers;
    output_.send(peer, came, wayOfAnswers());
  }
}

std::string RollCall::lastText(const FrameHeader& not_entered, int peer, const JobRanks& job) {
  const Descriptor last = Descriptor::readFrom(not_entered);
  const bool message = last.kind == Collective::Send; // its text says which one
  return not_entered.aux == 0 ? "no operation yet"
                              : last.text(job, peer) + (message ? "" : " " + operationText(not_entered.aux));
}

// Two ranks wait, each in an operation that the other has not entered, and one of the two was issued by a callback: most likely a
// callback ran inline on one rank and later on the other, so that the same operation has two names. After 10 s this is reported instead
// of leaving it to the deadline. Counted operations alone cannot meet so: all ranks count in the same order.
//
// The other rank's operation may have ended without this rank, as that of a root does, or its question may have come very late. So one that
// brought no frame lately is answered once more: if that rank still waits in it, this answer makes that rank find the two. A frame of this
// rank's operation reached it a moment ago: the question whose answer led here.
void RollCall::standOff(const Op& op, int peer, TimePoint now) {
  const auto patience = std::chrono::milliseconds(config_.standoff_after_ms);
  if (op.waited(now) < patience || op.isMessage()) {
    return;
  }
  unexpected_.forEachOf(peer, [&](uint64_t op_id, UnexpectedOperations::Entry& entry, const Descriptor& theirs) {
    const bool derived = ((op_id | op.id().id) & kDerivedIdBit) != 0;
    if (theirs.kind == Collective::Send || !derived || now - entry.since < patience) {
      return true;
    }
    if (now - entry.last > kLately) {
      // Once for each question: two ranks that both have only old questions would answer each other without end.
      if (entry.answered_late.insert(peer).second) {
        answerNotEntered(peer, op_id, wayOfAnswers());
      }
      return true;
    }
    ErrorRecord record = mismatch(config_.hosts, config_.job, config_.rank, op.descriptor(), peer, op.id());
    record.summary = "Rank " + std::to_string(record.rank) + " (" + record.host + ") waits in " +
        op.descriptor().text(config_.job) + " " + operationText(op.id().id, op.id().origin) + ", which " +
        config_.job.text(peer) + " (" + record.peer_host + ") has not entered; that one waits in " +
        theirs.text(config_.job) + " " + operationText(op_id, entry.originOf(peer)) + ", which is not entered here.";
    output_.fail(std::move(record));
    return false;
  });
}

// An edge that cannot go on without credit needs its own link; and the peer grants that once it knows that this rank waits. The receiver of
// a message that is announced waits for that. And in a group so large that nobody asks all ranks, an operation asks once, and only along its
// edges.
void RollCall::ask(const Op& op, int peer) {
  const bool announces = op.isMessage() && op.descriptor().root == config_.rank;
  const bool needed = announces || credits_.lacksCredit(op.id().id, peer) || !config_.mayAskEveryone();
  const Way otherwise = op.isMessage() ? Way::BulkLink : Way::OpenLink;
  output_.send(peer, headerFor(op.id().id, FrameType::Waiting, peer), needed ? Way::Needed : otherwise);
}

RollCall::Way RollCall::wayOfAnswers() const noexcept {
  return config_.mayAskEveryone() ? Way::OpenLink : Way::BulkLink;
}

void RollCall::asksOnly(uint64_t op_id, const std::vector<int>& ranks, TimePoint now) {
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  Op& op = found->second;
  const bool first = op.asksOnly(ranks, now);
  next_tick_ = std::min(next_tick_, op.nextQuestion(config_));
  for (size_t i = 0; first && i < ranks.size(); ++i) {
    ask(op, ranks[i]);
  }
}

void RollCall::tellWaiting(Op& op, TimePoint now) {
  if (op.takeFirstQuestion(now, config_)) {
    for (const int peer : credits_.unfinished(op.id().id)) {
      ask(op, peer);
    }
  }
  if (op.takeRound(now, config_)) {
    for (int peer = 0; peer < config_.size; ++peer) {
      const bool known = op.roundLeavesOutKnown() && hasCome(op, peer); // to have entered it
      if (peer != config_.rank && !known && op.mayAsk(peer)) {
        ask(op, peer);
      }
    }
  }
}

} // namespace pycomm
