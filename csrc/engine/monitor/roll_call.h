#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/links/credits.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/issue_context.h"
#include "engine/operation/missing.h"
#include "transport/wire.h"

namespace pycomm {

/// Which operations this rank has entered, whether the other ranks entered the same ones, who has not entered yet, and which deadlines
/// have passed. Events in, actions out: no I/O and no clock of its own.
///
/// Matching. Every frame carries its operation's descriptor. It is compared with the local operation of that id, or remembered until
/// there is one. Schedules may differ between the two sides of a mistake, so frames on edges alone do not find every mistake: a rank
/// that has waited 2 ms sends a question (Waiting) to the ranks it waits for, and they compare, or answer that they have not entered
/// the operation (NotEntered). After 200 ms it asks all ranks, so that an error names the rank that is late and not a neighbour that
/// waits as well. It asks them again later: an answer may be lost on its way, or be true no more. If many operations are under way, only
/// the oldest ask: questions about hundreds would keep data waiting on a slow link.
///
/// Of each peer, so many collectives are remembered as there are places for, and as many messages: any number of the former may be
/// ahead, and the sender of the latter keeps to the bound.
///
/// Thread: the owner's; no locks.
class RollCall {
 public:
  struct Config {
    int rank = 0;
    int size = 1;
    uint32_t group = 0;
    uint16_t epoch = 0;
    std::vector<std::string> hosts; ///< of each rank, for error messages
    size_t max_asking = 64; ///< counted operations, the oldest, in which a rank asks others whether they have entered
    int waiting_after_ms = 2;
    int standoff_after_ms = 10000; ///< see RollCall::standOff
  };

  /// What this rank knows of the operation of an id.
  enum class Standing {
    Entered,
    Unknown,
    Past, ///< it has ended here, not long ago
  };

  /// How a frame travels.
  enum class Way {
    BulkLink, ///< opened if there is none. Messages: both ranks have or need it. And an edge that cannot go on without credit
    OpenLink, ///< any way that needs no new connection, over control links if need be; it may be lost, since nothing depends on it
  };

  struct Action {
    enum class Kind {
      Send, ///< a frame without payload to `peer`
      Fail, ///< the group has failed: `record`
      Overdue, ///< the deadline of operation `op_id` has passed. Again each second until it has ended: a report may be lost
      Pump, ///< Protocol's, never the roll call's: operation `op_id` may be able to send to `peer` now
    };
    Kind kind = Kind::Send;
    int peer = -1;
    Way way = Way::BulkLink;
    uint64_t op_id = 0;
    FrameHeader header;
    ErrorRecord record;
  };

  /// `credits` has each operation before it is entered here, and until it has ended here. `places`: operations of a peer that may be
  /// remembered. Both outlive this.
  RollCall(Config config, const Credits& credits, size_t places)
      : config_(std::move(config)), credits_(credits), places_(places), peers_(static_cast<size_t>(config_.size)) {}

  // ---- events
  void entered(const OperationId& id, const Descriptor& descriptor, Deadline deadline, TimePoint now);
  void ended(uint64_t op_id);
  /// As if it had not been entered. Takes no memory.
  void forget(uint64_t op_id) noexcept {
    ops_.erase(op_id);
  }
  /// An operation of this rank's that went another way, and is over. Reported late, and only if another rank asks.
  void passed(const OperationId& id, const Descriptor& descriptor);
  /// A frame about an operation has arrived: compares its descriptor.
  [[nodiscard]] Standing compared(int peer, const FrameHeader& header);
  /// Keeps the descriptor of an operation that is not entered here; false if the peer contradicts what it said before.
  [[nodiscard]] bool remember(int peer, const FrameHeader& header, TimePoint now);
  /// Bytes of the operation have arrived.
  void progressed(uint64_t op_id, TimePoint now);
  /// A question (Waiting) has arrived.
  void asked(int peer, const FrameHeader& header, TimePoint now);
  /// An answer (NotEntered) has arrived.
  void answered(int peer, const FrameHeader& header, TimePoint now);
  /// This rank asks that peer for messages under a tag.
  void asksForMessages(int peer) {
    ++peers_[static_cast<size_t>(peer)].asked;
  }
  /// Answers a rank that waits in something that this rank has not entered: says what this rank entered last.
  void answerNotEntered(int peer, uint64_t op_id, Way way);
  /// The peer broke the protocol: the group fails.
  void violated(int peer, const FrameHeader& header, const std::string& what);
  void tick(TimePoint now);

  // ---- questions
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return std::min(next_tick_, next_deadline_);
  }
  /// A Fail action was made: nothing counts any more.
  [[nodiscard]] bool failed() const noexcept {
    return failed_;
  }
  [[nodiscard]] bool isEntered(uint64_t op_id) const {
    return ops_.count(op_id) != 0;
  }
  /// A frame of this operation has arrived, and it is not entered here.
  [[nodiscard]] bool hasHeardOf(uint64_t op_id) const {
    return heard_.count(op_id) != 0;
  }
  /// The ranks whose frames of it have arrived, of an operation that is not entered here.
  [[nodiscard]] std::vector<int> heardFrom(uint64_t op_id) const;
  /// The lowest rank that said that it has not entered a stuck operation.
  [[nodiscard]] std::optional<Missing> missing(uint64_t op_id) const;
  /// The same of one rank.
  [[nodiscard]] std::optional<Missing> missing(uint64_t op_id, int peer) const;
  /// What a NotEntered frame says, in words.
  [[nodiscard]] static std::string lastText(const FrameHeader& not_entered);
  /// A frame header of this group, to `peer`; about an operation that is entered, with its descriptor.
  [[nodiscard]] FrameHeader headerFor(uint64_t op_id, FrameType type, int peer) const;

  struct Usage {
    size_t operations = 0;
    size_t heard = 0; ///< operations that are not entered here
  };
  [[nodiscard]] Usage usage() const noexcept {
    return {ops_.size(), heard_.size()};
  }
  [[nodiscard]] std::vector<Action> takeActions() {
    return std::exchange(actions_, {});
  }

 private:
  struct Op {
    OperationId id;
    Descriptor descriptor;
    Deadline deadline = Deadline::never(); ///< once it has been reported: when it is reported again
    TimePoint since; ///< entered, or last byte moved
    bool told_waiting = false; ///< the ranks on unfinished edges know
    int rounds = 0; ///< how often all ranks have been asked
    std::set<int> came; ///< ranks that have entered it, as a frame of theirs shows
    std::vector<Missing> missing; ///< ranks that said that they have not entered it, each once
  };
  /// What has been heard of an operation that is not entered here.
  struct Heard {
    std::map<int, Descriptor> ranks; ///< the lowest that differs is named
    TimePoint since; ///< first heard of
    TimePoint last; ///< heard of again
    std::set<int> refused; ///< ranks that were answered that it is not entered here
    std::set<int> answered_late; ///< ranks that standOff() has answered since they last asked
  };
  struct Peer {
    size_t collectives = 0; ///< entries of heard_ that it is in
    size_t messages = 0; ///< the same of messages, which have places of their own
    size_t asked = 0; ///< questions for messages, each of which may bring one more than fits
    [[nodiscard]] size_t& heard(bool message) noexcept {
      return message ? messages : collectives;
    }
  };

  void keepRecent(uint64_t op_id, const Descriptor& descriptor);
  void announce(Op& op);
  /// Tells the ranks that asked before this rank entered the operation that it has. It may end here before they ask again.
  void correct(uint64_t op_id, const std::set<int>& refused);
  /// In an all_to_all each pair of ranks agrees on a number of elements of its own. Frames of it say in `numel` how many the
  /// sender has for this peer, and that is what the peer compares with what it expects from the sender.
  void addressTo(int peer, const Descriptor& descriptor, FrameHeader& header) const;
  [[nodiscard]] Descriptor expectedFrom(const Op& op, int peer) const;
  [[nodiscard]] Heard takeHeard(uint64_t op_id);
  void compare(const Descriptor& mine, int peer, const Descriptor& theirs, const OperationId& id);
  void fail(ErrorRecord record);
  void send(int peer, const FrameHeader& header, Way way);
  void ask(const Op& op, int peer);
  static void noteCame(Op& op, int peer);
  [[nodiscard]] bool hasCome(const Op& op, int peer) const {
    return op.came.count(peer) != 0 || credits_.hasShown(op.id.id, peer);
  }
  [[nodiscard]] Way wayOfQuestions() const noexcept;
  void tellWaiting(Op& op, TimePoint now);
  [[nodiscard]] bool asksEveryone(const Op& op) const noexcept;
  [[nodiscard]] std::chrono::milliseconds nextRound(const Op& op) const noexcept;
  void checkDeadlines(TimePoint now);
  void standOff(const Op& op, int peer, TimePoint now);
  [[nodiscard]] ErrorRecord violation(int peer, const FrameHeader& header, const std::string& what) const;

  const Config config_;
  const Credits& credits_;
  const size_t places_;
  std::map<uint64_t, Op> ops_; ///< oldest first
  std::unordered_map<uint64_t, Heard> heard_;
  std::unordered_map<uint64_t, Descriptor> recent_; ///< operations that ended here, the last kRecent
  std::deque<uint64_t> recent_order_;
  std::vector<Peer> peers_;
  OperationId last_entered_;
  int64_t highest_sequence_ = 0; ///< of the counted operations entered here
  std::optional<Descriptor> last_descriptor_;
  TimePoint next_tick_ = TimePoint::max();
  TimePoint next_asks_ = TimePoint::max(); ///< when the oldest operation that may not ask yet wants to
  TimePoint next_deadline_ = TimePoint::max(); ///< no operation's is earlier
  std::vector<Action> actions_;
  bool failed_ = false;
};

} // namespace pycomm
