#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/descriptor.h"
#include "engine/issue_context.h"
#include "engine/prepared_schedule.h"
#include "transport/wire.h"

namespace pycomm {

/// Matching and flow control of one group on one rank, without I/O and without a clock of its own: events in, actions out.
/// The lane feeds it; so can a simulator.
///
/// Matching. Every frame carries its operation's descriptor. Whatever arrives is compared with the local operation of that id,
/// or remembered until there is one. Schedules may differ between the two sides of a mistake, so edges alone do not meet every
/// mistake: a rank that has waited 2 ms tells the ranks it waits for what it is waiting in, and they compare, or answer that they
/// have not entered it. Of each peer, so many collectives are remembered as there are places for, and as many messages: any number of
/// the former may be ahead, and the sender of the latter keeps to the bound.
///
/// Flow control. The reader never stops reading a link, so everything sent must have a place to go:
///   - the first 64 KiB of an edge may go eagerly, into a pool of 1 MiB that each receiver keeps for each peer. A frame costs its
///     payload and 64 bytes more, so the pool also bounds how many frames a peer can be ahead by, empty ones among them;
///   - more goes against credit: the receiver of an edge says how many bytes of it may be sent in all (like a QUIC stream limit),
///     once its operation is posted, and raises that as it consumes.
/// Pool room is given back in lumps as it is consumed. When more than half of the pool holds bytes of operations not posted here,
/// every posted operation gets explicit credit, so that a sender that finds the pool full can still finish what is waited for.
/// Credit is for what has yet to arrive: an edge that has all its frames gets none. So credit that arrives after its operation
/// has ended was granted while the last frames were on their way; the sender knows those operations (Peer::past) and drops it.
///
/// Thread: the owner's; no locks.
class Protocol {
 public:
  struct Config {
    int rank = 0;
    int size = 1;
    uint32_t group = 0;
    uint16_t epoch = 0;
    std::vector<std::string> hosts; ///< of each rank, for messages
    int64_t window_nbytes = 4 << 20;
    int64_t eager_nbytes = 64 << 10;
    int64_t eager_pool_nbytes = 16 * ((64 << 10) + sizeof(FrameHeader)); ///< 16 of the largest eager frames
    int64_t frame_nbytes = sizeof(FrameHeader); ///< what an eager frame costs in the pool beside its payload
    size_t max_asking = 64; ///< counted operations, the oldest, in which a rank asks others whether they have entered
    size_t max_ahead = 4096; ///< operations that a peer has not posted, as far as is known, and may have credit for
    int waiting_after_ms = 2;
    int standoff_after_ms = 10000; ///< see Protocol::standOff
  };

  enum class Verdict {
    Accept, ///< data of an operation posted here
    Hold, ///< data of an operation not posted here yet: keep it, it fits the pool
    Ignore, ///< nothing more to do; drop a payload
  };

  enum class Permission { No, Eager, Credit };

  struct Action {
    enum class Kind {
      Send, ///< a frame without payload to `peer`
      Fail, ///< the group has failed: `record`
      Pump, ///< operation `op_id` may be able to send to `peer` now
    };
    Kind kind = Kind::Send;
    int peer = -1;
    uint64_t op_id = 0;
    FrameHeader header;
    ErrorRecord record;
  };

  explicit Protocol(Config config);

  // ---- events
  void posted(const OperationId& id, const Descriptor& descriptor, const PreparedSchedule& schedule, TimePoint now);
  void ended(uint64_t op_id);
  /// An operation of this rank's that went another way, and is over. Told late, and only if somebody asks.
  void passed(const OperationId& id, const Descriptor& descriptor);
  [[nodiscard]] Verdict arrived(int peer, const FrameHeader& header, TimePoint now);
  /// The bytes of one data frame have been used and their memory is free again. A frame of 0 bytes is told of, too.
  void consumed(uint64_t op_id, int peer, int64_t nbytes, bool eager);
  /// This rank asks that peer for messages under a tag.
  void asked(int peer) {
    ++peers_[static_cast<size_t>(peer)].asked;
  }
  void tick(TimePoint now);

  // ---- questions
  /// A Fail action was made: nothing is accepted or sent any more.
  [[nodiscard]] bool failed() const noexcept {
    return failed_;
  }
  [[nodiscard]] Permission maySend(uint64_t op_id, int peer, int64_t nbytes) const;
  /// So much may go eagerly now, in so many frames.
  [[nodiscard]] bool hasRoom(int peer, int64_t nbytes, size_t frames) const;
  /// A frame of this operation has arrived, and it is not posted here.
  [[nodiscard]] bool hasHeardOf(uint64_t op_id) const {
    return heard_.count(op_id) != 0;
  }
  /// The answer to a rank that waits in something that this rank has not entered: what it posted last.
  void answerNotEntered(int peer, uint64_t op_id);
  /// What such an answer says, in words.
  [[nodiscard]] static std::string lastText(const FrameHeader& not_entered);
  void sent(uint64_t op_id, int peer, int64_t nbytes, Permission used);
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return next_tick_;
  }
  /// Which of the ranks that a stuck operation waits for said that it has not entered it: (rank, what it did last).
  struct Missing {
    int peer;
    std::string last;
  };
  [[nodiscard]] std::optional<Missing> missing(uint64_t op_id) const;
  /// The same of that one.
  [[nodiscard]] std::optional<Missing> missing(uint64_t op_id, int peer) const;

  /// A frame header of this group for an operation posted here, to `peer`.
  [[nodiscard]] FrameHeader headerFor(uint64_t op_id, FrameType type, int peer) const;

  /// What is remembered of operations that have not ended here or are not posted here.
  struct Usage {
    size_t operations = 0;
    size_t heard = 0;
    int64_t eager_in = 0; ///< bytes in the pools of all peers
    size_t past = 0; ///< see Peer::past
    size_t ahead = 0; ///< see Peer::ahead
  };
  [[nodiscard]] Usage usage() const;

  [[nodiscard]] std::vector<Action> takeActions();

 private:
  static constexpr int64_t kNoLimit = -1;
  struct EdgeState {
    int peer = -1;
    int64_t total = 0;
    size_t frames = 0; ///< that the edge has
    size_t passed = 0; ///< frames that have arrived here, or were sent
    int64_t moved = 0; ///< bytes. Incoming: consumed here; outgoing: sent
    int64_t limit = kNoLimit; ///< bytes of this edge that may be sent in all: as told to the peer, or as told by it
    bool shown = false; ///< incoming: the peer has posted the operation, as a frame of it shows
    bool ahead = false; ///< incoming: counted in Peer::ahead
  };
  struct Op {
    OperationId id;
    Descriptor descriptor;
    std::vector<EdgeState> incoming;
    std::vector<EdgeState> outgoing;
    TimePoint since; ///< posted, or last byte moved
    bool told_waiting = false; ///< the ranks on unfinished edges know
    bool told_everyone = false;
    bool told_again = false; ///< the same once more, after standoff_after_ms
    std::vector<Missing> missing;
  };
  /// What has been heard of an operation that is not posted here.
  struct HeardFrom {
    Descriptor descriptor;
    int64_t limit = kNoLimit;
    size_t frames = 0; ///< that are held
  };
  struct Heard {
    std::map<int, HeardFrom> ranks; ///< the lowest that differs is named
    TimePoint since; ///< first heard of
  };
  /// An operation that has ended here, for which credit may still come: all that was sent went eagerly.
  struct Past {
    uint64_t op_id;
    int64_t sent; ///< Peer::eager_sent at its end
  };
  struct Peer {
    int64_t eager_out = 0; ///< in the peer's pool because of us
    int64_t eager_in = 0; ///< in our pool because of it, not yet consumed
    int64_t eager_used = 0; ///< consumed, not yet given back
    int64_t eager_sent = 0; ///< ever
    /// The oldest first. Once more than a pool has been sent after an operation, the peer has given back room for some of that, so
    /// it has read that operation's frames before, and credit that it granted until then has come.
    std::deque<Past> past;
    size_t ahead = 0; ///< edges that have credit, while nothing shows that the peer has posted their operations
    size_t collectives = 0; ///< entries of heard_ that it is in
    size_t messages = 0; ///< the same of messages, which have places of their own
    size_t asked = 0; ///< questions for messages, each of which may bring one more than fits
    size_t limits = 0; ///< entries of collectives with credit
    [[nodiscard]] size_t& heard(bool message) noexcept {
      return message ? messages : collectives;
    }
  };

  [[nodiscard]] static EdgeState stateOf(const Edge& edge) {
    EdgeState state;
    state.peer = edge.peer;
    state.total = edge.nbytes;
    state.frames = edge.steps.size();
    return state;
  }
  void keepRecent(uint64_t op_id, const Descriptor& descriptor);
  static EdgeState* edgeTo(std::vector<EdgeState>& edges, int peer);
  void announce(Op& op);
  /// In an all_to_all each pair of ranks agrees on a number of elements of its own. Frames of it say in `numel` how many the
  /// sender has for this peer, and that is what the peer compares with what it expects from the sender.
  void addressTo(int peer, FrameHeader& header) const;
  [[nodiscard]] static Descriptor expectedFrom(Op& op, int peer);
  void grant(Op& op, EdgeState& edge);
  void grantAllFrom(int peer);
  void shown(Op& op, int peer);
  void forget(EdgeState& edge);
  [[nodiscard]] std::map<int, HeardFrom> takeHeard(uint64_t op_id);
  [[nodiscard]] bool crowded(int peer) const;
  [[nodiscard]] bool isPast(int peer, uint64_t op_id) const;
  void keepPast(const EdgeState& edge, uint64_t op_id);
  [[nodiscard]] int64_t cost(int64_t nbytes, size_t frames = 1) const noexcept {
    return nbytes + config_.frame_nbytes * static_cast<int64_t>(frames);
  }
  void compare(const Descriptor& mine, int peer, const Descriptor& theirs, const OperationId& id);
  void fail(ErrorRecord record);
  void send(int peer, const FrameHeader& header);
  void tellWaiting(Op& op, TimePoint now);
  [[nodiscard]] Verdict dataArrived(int peer, const FrameHeader& header, Op* op, TimePoint now);
  void creditArrived(int peer, const FrameHeader& header, Op* op, TimePoint now);
  void waitingArrived(int peer, const FrameHeader& header, Op* op, TimePoint now);
  /// Null if that is a violation.
  [[nodiscard]] HeardFrom* remember(int peer, const FrameHeader& header, TimePoint now);
  void standOff(const Op& op, int peer, TimePoint now);
  [[nodiscard]] ErrorRecord violation(int peer, const FrameHeader& header, const std::string& what) const;

  const Config config_;
  std::map<uint64_t, Op> ops_; ///< oldest first: room that comes back is for those that other ranks enter next
  std::unordered_map<uint64_t, Heard> heard_;
  std::unordered_map<uint64_t, Descriptor> recent_; ///< operations that ended here, the last kRecent
  std::deque<uint64_t> recent_order_;
  std::vector<Peer> peers_;
  OperationId last_posted_;
  int64_t highest_sequence_ = 0; ///< of the counted operations posted here
  std::optional<Descriptor> last_descriptor_;
  TimePoint next_tick_ = TimePoint::max();
  TimePoint next_asks_ = TimePoint::max(); ///< when the oldest operation that may not ask yet wants to
  std::vector<Action> actions_;
  bool failed_ = false;
};

/// Frames that went eagerly say so, so that both sides count the same bytes against the pool.
inline constexpr uint64_t kEagerFlag = 1;

} // namespace pycomm
