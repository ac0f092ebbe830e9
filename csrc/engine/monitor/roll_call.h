#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "engine/links/credits.h"
#include "engine/monitor/entered_operation.h"
#include "engine/monitor/entry_history.h"
#include "engine/monitor/roll_call_config.h"
#include "engine/monitor/roll_call_output.h"
#include "engine/monitor/unexpected_operations.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/issue_context.h"
#include "engine/operation/not_entered.h"
#include "transport/frame_header.h"

namespace pycomm {

/// Which operations this rank has entered, whether the other ranks entered the same ones, who has not entered yet, and which deadlines
/// have passed. Events in, actions out: no I/O and no clock of its own.
///
/// Matching. Every frame carries its operation's descriptor. It is compared with the local operation of that id. If there is
/// none yet, the operation is unexpected, and the descriptor is kept. Schedules may differ between the two sides of a mistake, so frames on edges alone do not find every mistake: a rank
/// that has waited 2 ms sends a question (Waiting) to the ranks it waits for, and they compare, or answer that they have not entered
/// the operation (NotEntered). After 200 ms it asks all ranks, so that an error names the rank that is late and not a neighbour that
/// waits as well. It asks them again later: an answer may be lost on its way, or be true no more. If many operations are under way, only
/// the oldest ask: questions about hundreds would keep data waiting on a slow link.
///
/// Its parts: EnteredOperation is one operation that waits here, UnexpectedOperations has those that only other ranks have entered, EntryHistory
/// those that are over. RollCall feeds them frames and time.
///
/// Thread: the owner's; no locks.
class RollCall {
 public:
  using Config = RollCallConfig;
  using Way = RollCallOutput::Way;
  using Action = RollCallOutput::Action;

  /// What this rank knows of the operation of an id.
  enum class OperationState {
    Entered,
    Unknown,
    Past, ///< it has ended here, not long ago
  };

  /// `credits` has each operation before it is entered here, and until it has ended here. `places`: unexpected operations of a peer that may be
  /// kept. Both outlive this.
  RollCall(Config config, const Credits& credits, size_t places)
      : config_(std::move(config)), credits_(credits), output_(config_), unexpected_(places, config_.size) {}
  RollCall(const RollCall&) = delete; ///< the output points into it
  RollCall& operator=(const RollCall&) = delete;

  // ---- events
  void entered(const OperationId& id, const Descriptor& descriptor, Deadline deadline, TimePoint now);
  void ended(uint64_t op_id);
  /// As if it had not been entered. Takes no memory.
  void forget(uint64_t op_id) noexcept {
    ops_.erase(op_id);
  }
  /// Of an operation in shared memory, which shows there who has entered it: only these ranks, which lack, are asked about it, or nobody.
  /// They are asked at once if none was before.
  void asksOnly(uint64_t op_id, const std::vector<int>& ranks, TimePoint now);
  /// An operation of this rank's that went another way, and is over. Reported late, and only if another rank asks.
  void passed(const OperationId& id, const Descriptor& descriptor);
  /// A frame about an operation has arrived: compares its descriptor.
  [[nodiscard]] OperationState compared(int peer, const FrameHeader& header);
  /// Keeps the descriptor of an unexpected operation; false if the peer contradicts what it said before.
  [[nodiscard]] bool keepUnexpected(int peer, const FrameHeader& header, TimePoint now);
  /// Bytes of the operation have arrived.
  void progressed(uint64_t op_id, TimePoint now);
  /// A question (Waiting) has arrived.
  void asked(int peer, const FrameHeader& header, TimePoint now);
  /// An answer (NotEntered) has arrived.
  void answered(int peer, const FrameHeader& header, TimePoint now);
  /// This rank asks that peer for messages under a tag.
  void asksForMessages(int peer) {
    unexpected_.askedForMessages(peer);
  }
  /// Answers a rank that waits in something that this rank has not entered: says what this rank entered last.
  void answerNotEntered(int peer, uint64_t op_id, Way way);
  /// The peer broke the protocol: the group fails.
  void violated(int peer, const FrameHeader& header, const std::string& what) {
    output_.violated(peer, header, what);
  }
  void tick(TimePoint now);

  // ---- questions
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return std::min(next_tick_, next_deadline_);
  }
  /// A Fail action was made: nothing counts any more.
  [[nodiscard]] bool failed() const noexcept {
    return output_.failed();
  }
  [[nodiscard]] bool isEntered(uint64_t op_id) const {
    return ops_.count(op_id) != 0;
  }
  /// A frame of this operation has arrived, and it is not entered here.
  [[nodiscard]] bool isUnexpected(uint64_t op_id) const {
    return unexpected_.has(op_id);
  }
  /// The same, of that peer.
  [[nodiscard]] bool isUnexpected(uint64_t op_id, int peer) const {
    return unexpected_.has(op_id, peer);
  }
  /// It ended here not long ago.
  [[nodiscard]] bool hasEnded(uint64_t op_id) const {
    return history_.find(op_id) != nullptr;
  }
  /// The ranks whose frames of it have arrived, of an operation that is not entered here.
  [[nodiscard]] std::vector<int> unexpectedFrom(uint64_t op_id) const {
    return unexpected_.ranks(op_id);
  }
  /// The lowest rank that said that it has not entered a stuck operation.
  [[nodiscard]] std::optional<NotEntered> missing(uint64_t op_id) const;
  /// The same of one rank.
  [[nodiscard]] std::optional<NotEntered> missing(uint64_t op_id, int peer) const;
  /// What a NotEntered frame says, in words.
  [[nodiscard]] static std::string lastText(const FrameHeader& not_entered, int peer, const JobRanks& job);
  /// A frame header of this group, to `peer`; about an operation that is entered, with its descriptor.
  [[nodiscard]] FrameHeader headerFor(uint64_t op_id, FrameType type, int peer) const;

  struct Usage {
    size_t operations = 0;
    size_t unexpected = 0; ///< operations that are not entered here
    size_t places_taken = 0; ///< of unexpected operations
    size_t history = 0; ///< operations that have ended and are kept
    size_t forgotten = 0; ///< derived ids of older ones
  };
  [[nodiscard]] Usage usage() const noexcept {
    return {ops_.size(), unexpected_.size(), unexpected_.placesTaken(), history_.size(), history_.forgotten()};
  }
  [[nodiscard]] std::vector<Action> takeActions() {
    return output_.take();
  }

 private:
  using Op = EnteredOperation;

  void announce(Op& op);
  /// Tells the ranks that asked before this rank entered the operation that it has. It may end here before they ask again.
  void correct(uint64_t op_id, const std::set<int>& refused);
  /// In an all_to_all each pair of ranks agrees on a number of elements of its own. Frames of it say in `numel` how many the
  /// sender has for this peer, and that is what the peer compares with what it expects from the sender.
  void addressTo(int peer, const Descriptor& descriptor, FrameHeader& header) const;
  [[nodiscard]] Descriptor expectedFrom(const Op& op, int peer) const;
  void compare(const Descriptor& mine, int peer, const Descriptor& theirs, const OperationId& id);
  void ask(const Op& op, int peer);
  [[nodiscard]] bool hasCome(const Op& op, int peer) const {
    return op.hasCome(peer) || credits_.hasShown(op.id().id, peer);
  }
  [[nodiscard]] Way wayOfAnswers() const noexcept;
  void tellWaiting(Op& op, TimePoint now);
  void checkDeadlines(TimePoint now);
  void standOff(const Op& op, int peer, TimePoint now);

  const Config config_;
  const Credits& credits_;
  RollCallOutput output_;
  std::map<uint64_t, Op> ops_; ///< oldest first
  UnexpectedOperations unexpected_;
  EntryHistory history_;
  TimePoint next_tick_ = TimePoint::max();
  TimePoint next_asks_ = TimePoint::max(); ///< when the oldest operation that may not ask yet wants to
  TimePoint next_deadline_ = TimePoint::max(); ///< no operation's is earlier
};

} // namespace pycomm
