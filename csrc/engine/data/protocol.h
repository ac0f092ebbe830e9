#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/links/credits.h"
#include "engine/monitor/roll_call.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/issue_context.h"
#include "engine/operation/prepared_schedule.h"
#include "transport/frame_header.h"

namespace pycomm {

/// What the frames of one group mean on one rank: events in, actions out, without I/O and without a clock of its own. The lane feeds
/// it; so can a simulator.
///
/// It keeps nothing itself. RollCall knows which operations the ranks have entered, Credits how much may be sent; each frame goes first
/// to the one and then to the other.
/// Thread: the owner's; no locks.
class Protocol {
 public:
  struct Config : RollCall::Config, Credits::Config {};
  using Permission = Credits::Permission;

  enum class Verdict {
    Accept, ///< data of an operation posted here
    Hold, ///< data of an operation that is not posted here yet: an unexpected frame. Keep it, it fits the pool
    Ignore, ///< nothing more to do; drop a payload
  };

  using Action = RollCall::Action;

  explicit Protocol(const Config& config);
  Protocol(const Protocol&) = delete; ///< its parts know each other
  Protocol& operator=(const Protocol&) = delete;

  // ---- events
  /// If it throws, nothing is kept of the operation.
  void posted(
      const OperationId& id,
      const Descriptor& descriptor,
      const PreparedSchedule& schedule,
      TimePoint now,
      Deadline deadline = Deadline::never());
  void ended(uint64_t op_id);
  /// See RollCall::asksOnly.
  void asksOnly(uint64_t op_id, const std::vector<int>& ranks, TimePoint now) {
    roll_call_.asksOnly(op_id, ranks, now);
  }
  /// See RollCall::passed.
  void passed(const OperationId& id, const Descriptor& descriptor);
  [[nodiscard]] Verdict arrived(int peer, const FrameHeader& header, TimePoint now);
  /// The bytes of one data frame have been used and their memory is free again. Called for a frame of 0 bytes, too.
  void consumed(uint64_t op_id, int peer, int64_t nbytes, bool eager) {
    credits_.consumed(op_id, peer, nbytes, eager);
  }
  void sent(uint64_t op_id, int peer, int64_t nbytes, Permission used) {
    credits_.sent(op_id, peer, nbytes, used);
  }
  /// This rank asks that peer for messages under a tag.
  void asked(int peer) {
    roll_call_.asksForMessages(peer);
  }
  /// Of messages.
  void answerNotEntered(int peer, uint64_t op_id) {
    roll_call_.answerNotEntered(peer, op_id, RollCall::Way::BulkLink);
  }
  /// See RollCall::violated.
  void violated(int peer, const FrameHeader& header, const std::string& what) {
    roll_call_.violated(peer, header, what);
  }
  void tick(TimePoint now) {
    roll_call_.tick(now);
  }

  // ---- questions
  /// A Fail action was made: nothing is accepted or sent any more.
  [[nodiscard]] bool failed() const noexcept {
    return roll_call_.failed();
  }
  [[nodiscard]] Permission maySend(uint64_t op_id, int peer, int64_t nbytes) const {
    return failed() ? Permission::No : credits_.maySend(op_id, peer, nbytes);
  }
  [[nodiscard]] bool hasRoom(int peer, int64_t nbytes, size_t frames) const {
    return credits_.hasRoom(peer, nbytes, frames);
  }
  /// That peer has said something of an operation that is not entered here; or it is entered, also if no frames carry it.
  [[nodiscard]] bool hasSpoken(int peer, uint64_t op_id) const {
    return roll_call_.isUnexpected(op_id, peer) || roll_call_.isEntered(op_id);
  }
  /// Not long ago.
  [[nodiscard]] bool hasEnded(uint64_t op_id) const {
    return roll_call_.hasEnded(op_id);
  }
  [[nodiscard]] static std::string lastText(const FrameHeader& not_entered, int peer, const JobRanks& job) {
    return RollCall::lastText(not_entered, peer, job);
  }
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return roll_call_.nextTick();
  }
  [[nodiscard]] std::optional<NotEntered> missing(uint64_t op_id) const {
    return roll_call_.missing(op_id);
  }
  [[nodiscard]] std::optional<NotEntered> missing(uint64_t op_id, int peer) const {
    return roll_call_.missing(op_id, peer);
  }
  [[nodiscard]] FrameHeader headerFor(uint64_t op_id, FrameType type, int peer) const {
    return roll_call_.headerFor(op_id, type, peer);
  }

  /// The state kept for operations that have not ended here or are not posted here.
  struct Usage : RollCall::Usage, Credits::Usage {};
  [[nodiscard]] Usage usage() const;

  /// The roll call's first, then those of credits. Nothing depends on the order between the two.
  [[nodiscard]] std::vector<Action> takeActions();

 private:
  [[nodiscard]] Verdict dataArrived(int peer, const FrameHeader& header, RollCall::OperationState state, TimePoint now);
  void creditArrived(int peer, const FrameHeader& header, RollCall::OperationState state, TimePoint now);

  const uint32_t group_;
  const uint16_t epoch_;
  Credits credits_; ///< before roll_call_, which asks it
  RollCall roll_call_;
};

} // namespace pycomm
