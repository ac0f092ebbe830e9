#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/send_queue.h"
#include "engine/links/channel.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/issue_context.h"
#include "engine/operation/not_entered.h"
#include "engine/operation/operation.h"
#include "transport/frame_header.h"

namespace pycomm {

class Transfer;

/// How much the ranks of a group may have under way, and how long they wait before they ask each other. The same on all ranks.
struct Limits {
  int64_t window_nbytes = 4 << 20; ///< of an edge: how far credit is ahead of what has been consumed
  int64_t eager_nbytes = 64 << 10; ///< of an edge: its first bytes, which need no credit
  int64_t eager_pool_nbytes = 16 * ((64 << 10) + sizeof(FrameHeader)); ///< 16 of the largest eager frames
  int64_t frame_nbytes = sizeof(FrameHeader); ///< what an eager frame costs in the pool beside its payload
  size_t max_ahead = 4096; ///< operations that a peer has not entered, as far as is known, and may have credit for
  size_t max_asking = 64; ///< counted operations, the oldest, in which a rank asks others whether they have entered
  int waiting_after_ms = 2;
  int deadlock_after_ms = 10000; ///< see waiting.cc

  [[nodiscard]] int64_t cost(int64_t nbytes, size_t frames = 1) const noexcept {
    return nbytes + frame_nbytes * static_cast<int64_t>(frames);
  }
  /// Collectives of a peer that may be kept although they are not entered here; and as many messages.
  [[nodiscard]] size_t places() const noexcept {
    return static_cast<size_t>(eager_pool_nbytes / frame_nbytes) + 2 * max_ahead;
  }
};

/// No credit has been given yet.
inline constexpr int64_t kNoLimit = -1;

/// One direction of an operation's traffic with one peer, and how far it has come:
///
///            incoming                                outgoing
///   passed   frames whose header has arrived         frames that were queued
///   done     frames that have arrived whole          frames that the kernel has taken
///   moved    bytes that were consumed here           bytes that were queued
///   limit    bytes that may be sent in all,          the same,
///            as this rank has told the peer          as the peer has told this rank
struct EdgeRow {
  int peer = -1;
  int64_t total = 0; ///< bytes of all its frames
  size_t frames = 0;
  size_t passed = 0;
  size_t done = 0;
  int64_t moved = 0;
  int64_t limit = kNoLimit;
  bool granted_early = false; ///< incoming: counted in PeerRow::granted_early
  int64_t eager_sent = 0; ///< outgoing: PeerRow::eager_sent after its last frame
};

/// A frame that came before this rank entered its operation.
struct UnexpectedFrame {
  int peer = -1;
  FrameHeader header;
  StagingBuffer staging;
};

/// An operation that this rank has entered and not ended.
struct OperationRow {
  OperationRow();
  ~OperationRow();
  OperationRow(const OperationRow&) = delete;
  OperationRow& operator=(const OperationRow&) = delete;

  [[nodiscard]] const OperationId& id() const noexcept {
    return operation->request().id;
  }
  [[nodiscard]] const Descriptor& descriptor() const noexcept {
    return operation->request().descriptor;
  }
  /// Messages are their two ranks' business: nobody else is asked about one.
  [[nodiscard]] bool isMessage() const noexcept {
    return descriptor().kind == Collective::Send;
  }
  [[nodiscard]] EdgeRow* from(int peer) noexcept;
  [[nodiscard]] EdgeRow* to(int peer) noexcept;
  [[nodiscard]] const EdgeRow* from(int peer) const noexcept {
    return const_cast<OperationRow*>(this)->from(peer);
  }
  [[nodiscard]] const EdgeRow* to(int peer) const noexcept {
    return const_cast<OperationRow*>(this)->to(peer);
  }

  /// The part that runs it.
  enum class Runs {
    Here, ///< the event loop, by `transfer`
    InSharedMemory, ///< the HostPlane
    Elsewhere, ///< another library: NCCL
  };
  Runs runs = Runs::Here;
  [[nodiscard]] bool runsHere() const noexcept {
    return runs == Runs::Here;
  }
  std::shared_ptr<Operation> operation;
  std::unique_ptr<Transfer> transfer; ///< null unless runsHere()
  std::vector<EdgeRow> incoming; ///< in the order of its schedule, as the next; none if it does not run here
  std::vector<EdgeRow> outgoing;
  std::vector<UnexpectedFrame> unexpected; ///< until it begins

  // What the other ranks have done: matching.h, waiting.h.
  std::set<int> came; ///< ranks that have entered it, as their frames other than data show
  std::vector<NotEntered> missing; ///< ranks that said that they have not; each once
  TimePoint since; ///< entered; or when data last began to arrive, or when it first asked those of asks_only
  Deadline deadline = Deadline::never(); ///< once it has been reported: when it is reported again
  bool told_waiting = false; ///< the ranks on unfinished edges know
  int rounds = 0; ///< how often all ranks have been asked
  std::optional<std::set<int>> asks_only; ///< none: all
  bool asked_them = false; ///< those of asks_only
};

/// What a peer has sent about an operation that is not entered here.
struct AheadOfUs {
  Descriptor descriptor;
  uint64_t origin = 0; ///< CallbackOrigin, if the peer has asked
  int64_t limit = kNoLimit; ///< credit
  size_t frames = 0; ///< of data
  bool refused = false; ///< it was answered that the operation is not entered here
  bool answered_late = false; ///< while a deadlock was looked for, since it last asked
};

/// An operation that other ranks have sent something about, and that is not entered here. It may have ended here long ago.
struct UnexpectedRow {
  std::map<int, AheadOfUs> peers; ///< by rank: the lowest that differs is named. Never empty
  TimePoint since; ///< when the first frame arrived
  TimePoint last; ///< when the last one did
  std::vector<UnexpectedFrame> frames;
};

/// A rank of the group.
struct PeerRow {
  /// An operation that has ended here, for which credit may still come: all that was sent went eagerly.
  struct Past {
    uint64_t op_id;
    int64_t sent; ///< eager_sent after its last frame to that peer
  };

  // Flow control: credit.h.
  int64_t eager_out = 0; ///< in the peer's pool because of us
  int64_t eager_in = 0; ///< in our pool because of it, not yet consumed
  int64_t eager_used = 0; ///< consumed, not yet given back
  int64_t eager_sent = 0; ///< ever
  /// In the order of their last frames. Once more than a pool has been sent after an operation's last frame, the peer has given back
  /// room for some of that, so it has read that frame before, and credit that it granted until then has come.
  std::deque<Past> past;
  size_t granted_early = 0; ///< edges that have credit, while nothing shows that the peer has entered their operations
  size_t credited_unexpected = 0; ///< unexpected operations for which it has given credit

  // Messages: messages.h.
  uint64_t sent = 0; ///< messages to it that have been named
  size_t receives = 0; ///< of messages from it that have not come
  std::unique_ptr<SendQueue> queue; ///< messages to it; null: there were none
  std::string
      lacked; ///< when it had no message under a tag that was asked for: what it had done last; "": it has not said so

  // Whether it is there: leaving.h.
  /// The state of the link that it opened to this rank.
  enum class Reading : uint8_t { NotOpened, Open, Ended };
  Reading reading = Reading::NotOpened;
  /// Here -> Lost -> Left, or Here -> Left.
  enum class Presence : uint8_t {
    Here,
    Lost, ///< the link to it broke while nothing was due, and it said no goodbye
    Left, ///< it said goodbye
  };
  Presence presence = Presence::Here;
  struct Suspicion {
    /// AwaitsGoodbye -> AwaitsLink, or AwaitsGoodbye -> Doubted; a suspicion may also begin as AwaitsLink.
    enum class State {
      AwaitsGoodbye, ///< a link broke: a goodbye may explain it
      AwaitsLink, ///< the link that the peer opened may be on its way
      Doubted, ///< nothing here needs the peer: only ranks with a control link to it know whether it is alive
    };
    State state;
    ErrorRecord record; ///< the failure if nothing explains it until then
    TimePoint due;
  };
  /// Its broken links, and what may explain them.
  struct Trouble {
    std::optional<ErrorRecord> lost; ///< what broke, if it is Lost
    std::optional<ErrorRecord> changed; ///< bytes of it came changed; only if it has Left
    std::optional<Suspicion> suspicion;
  };
  std::unique_ptr<Trouble> trouble; ///< null as a rule
  [[nodiscard]] bool isAway() const noexcept {
    return presence != Presence::Here;
  }

  // Places of unexpected operations: matching.h.
  size_t collectives = 0; ///< unexpected operations that it has sent something about
  size_t messages = 0; ///< the same of messages, which have places of their own
  /// Questions for messages that this rank has sent it since it last waited for none, less those that brought none: each may bring one
  /// more than fits. At most Limits::places().
  size_t asked = 0;
};

/// What the owner of the tables has to do, in order.
struct Action {
  enum class Kind {
    Send, ///< a frame without payload to `peer`
    Notice, ///< report `record`: a goodbye may still explain it. What arrives still counts, unless Tables::failed
    Doubt, ///< the group has failed if `record.peer` is still there: see Membership::doubted
    Overdue, ///< the deadline of operation `op_id` has passed. Again each second until it has ended: a report may be lost
    MaySend, ///< operation `op_id` may be able to send to `peer` now
  };
  /// How a frame travels.
  enum class Way {
    Needed, ///< over the bulk link, opened if there is none: an operation cannot go on without it
    BulkLink, ///< the same, but it may be lost: nothing depends on it
    OpenLink, ///< any way that needs no new connection, over control links if need be; it may be lost, too
  };
  Kind kind = Kind::Send;
  int peer = -1;
  Way way = Way::Needed;
  uint64_t op_id = 0;
  FrameHeader header;
  ErrorRecord record;
};

/// The same of credit, before it is known whether the operation is still under way.
struct CreditAction {
  enum class Kind {
    Grant, ///< tell `peer`: so many bytes of operation `op_id` in all; for op_id 0, so many bytes of the pool are free again
    MaySend, ///< as Action
  };
  Kind kind = Kind::Grant;
  int peer = -1;
  uint64_t op_id = 0;
  int64_t nbytes = 0;
};

/// Everything that one rank knows of the operations and the ranks of its group: a table of operations and one of ranks. The functions of
/// matching.h, credit.h, waiting.h and leaving.h change the rows; they know neither links nor a clock. (Of a row, Transfer and Transfers change
/// how many frames have moved and those that came early, Messages and PointToPoint what a rank's has of messages, and DataPlane::noteReading
/// PeerRow::reading.) What follows from an event they list as actions, which the owner takes when the event is over: so nothing that it does
/// on the way can change a row under their hands.
///
/// An operation's row: unexpected -> entered -> recent -> forgotten. Its address does not change while it is entered.
/// Thread: the owner's; no locks.
struct Tables {
  static constexpr size_t kRecent = 256;
  static constexpr size_t kForgotten = 32768;
  /// In a group so large that nobody asks all ranks, an operation asks once, and only along its edges.
  static constexpr int kAskEveryoneMaxSize = 256;

  /// The identity outlives this.
  Tables(const GroupIdentity& identity, const Limits& limits)
      : identity(identity), limits(limits), peers(static_cast<size_t>(identity.size)) {}
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  /// Null if this rank has not entered it.
  [[nodiscard]] OperationRow* find(uint64_t op_id) noexcept {
    const auto found = entered.find(op_id);
    return found == entered.end() ? nullptr : &found->second;
  }
  [[nodiscard]] const OperationRow* find(uint64_t op_id) const noexcept {
    return const_cast<Tables*>(this)->find(op_id);
  }
  /// What other ranks have sent about an operation that is not entered here; null if nothing.
  [[nodiscard]] UnexpectedRow* findUnexpected(uint64_t op_id) noexcept {
    const auto found = unexpected.find(op_id);
    return found == unexpected.end() ? nullptr : &found->second;
  }
  [[nodiscard]] const UnexpectedRow* findUnexpected(uint64_t op_id) const noexcept {
    return const_cast<Tables*>(this)->findUnexpected(op_id);
  }
  [[nodiscard]] PeerRow& peer(int rank) noexcept {
    return peers[static_cast<size_t>(rank)];
  }
  [[nodiscard]] const PeerRow& peer(int rank) const noexcept {
    return peers[static_cast<size_t>(rank)];
  }
  [[nodiscard]] bool mayAskEveryone() const noexcept {
    return identity.size <= kAskEveryoneMaxSize;
  }
  /// Those of matching, waiting and leaving first, then those of credit. Nothing depends on the order between the two.
  [[nodiscard]] std::vector<Action> takeActions();

  /// The state kept for operations that have not ended here or are not entered here.
  struct Usage {
    size_t operations = 0;
    size_t unexpected = 0; ///< operations that are not entered here
    struct Unexpected {
      uint64_t id = 0;
      Collective kind = Collective::Barrier;
      int peer = -1; ///< the lowest that has sent something about it
      bool answered = false; ///< that it is not entered here
      size_t frames = 0;
    };
    Unexpected first_unexpected; ///< with the lowest id, if there are some
    size_t places_taken = 0; ///< of unexpected operations
    size_t asked = 0; ///< see PeerRow::asked
    size_t credited_unexpected = 0; ///< see PeerRow
    size_t history = 0; ///< operations that have ended and are kept
    size_t forgotten = 0; ///< derived ids of older ones
    int64_t eager_in = 0; ///< bytes in the pools of all peers
    size_t past = 0; ///< see PeerRow::past
    size_t most_past = 0; ///< as many as there are frames in a pool, of each peer
    size_t granted_early = 0; ///< see PeerRow
  };
  [[nodiscard]] Usage usage() const noexcept;

  const GroupIdentity& identity;
  const Limits limits;

  std::map<uint64_t, OperationRow> entered; ///< by id, oldest first, derived ones last
  /// Whose input has not come, oldest first: watched_operations.h. They are not entered: to other ranks this rank is late.
  std::vector<std::shared_ptr<Operation>> held;
  std::map<uint64_t, UnexpectedRow> unexpected; ///< by id, as `entered`
  std::vector<PeerRow> peers; ///< by rank

  // Of what has been entered and is over: matching.h.
  std::unordered_map<uint64_t, Descriptor> recent; ///< by id: the last kRecent that have ended, for comparison
  std::deque<uint64_t> recent_order; ///< their ids, oldest first
  std::unordered_set<uint64_t> forgotten; ///< derived ids of the last kForgotten before those
  std::deque<uint64_t> forgotten_order; ///< the same, oldest first
  OperationId last_entered;
  std::optional<Descriptor> last_descriptor;
  int64_t highest_sequence = 0; ///< of the counted operations that were entered

  // When the next question and the next deadline are due: waiting.h.
  TimePoint next_tick = TimePoint::max();
  TimePoint next_asks = TimePoint::max(); ///< when the oldest operation that may not ask yet wants to
  TimePoint next_deadline = TimePoint::max(); ///< no operation's is earlier

  // Of messages and their senders.
  std::map<uint64_t, std::shared_ptr<Operation>> receives; ///< that have not begun, by ticket
  size_t receives_from_any = 0; ///< of these, those without a message
  size_t away = 0; ///< ranks that are not Here
  size_t suspicions = 0; ///< ranks that are under suspicion

  std::vector<Action> actions; ///< of matching, waiting and leaving
  std::vector<CreditAction> credit_actions;
  bool failed = false; ///< matching, waiting or an exception here has found a failure: nothing counts any more
};

/// Frames that went eagerly say so, so that both sides count the same bytes against the pool.
inline constexpr uint64_t kEagerFlag = 1;

} // namespace pycomm
