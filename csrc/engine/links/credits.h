#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/operation/prepared_schedule.h"
#include "transport/frame_header.h"

namespace pycomm {

/// Flow control of one group on one rank: how much may be sent to whom. Events in, actions out: no I/O and no clock.
///
/// The reader never stops reading a link, so everything sent must have a place to go:
///   - the first 64 KiB of an edge may go eagerly, into a pool of 1 MiB that each receiver keeps for each peer. A frame costs its
///     payload and 64 bytes more, so the pool also bounds how many frames a peer can be ahead by, empty ones among them;
///   - more goes against credit: the receiver of an edge says how many bytes of it may be sent in all (like a QUIC stream limit),
///     once its operation is posted, and raises that as it consumes.
/// Pool room is given back in lumps as it is consumed. When more than half of the pool holds bytes of operations not posted here,
/// every posted operation gets explicit credit, so that a sender that finds the pool full can still finish what is waited for.
/// Credit is for what has yet to arrive: an edge that has all its frames gets none. So credit that arrives after its operation
/// has ended was granted while the last frames were on their way; the sender knows those operations (Peer::past) and drops it.
///
/// Example: rank 0 sends 100 bytes to rank 1. maySend() says Eager; 164 bytes of rank 1's pool are taken. Rank 1 consumes the frame, and
/// once it has consumed a quarter of its pool it sends a Grant for operation 0, which frees that room at rank 0.
///
/// Thread: the owner's; no locks.
class Credits {
 public:
  struct Config {
    int64_t window_nbytes = 4 << 20;
    int64_t eager_nbytes = 64 << 10;
    int64_t eager_pool_nbytes = 16 * ((64 << 10) + sizeof(FrameHeader)); ///< 16 of the largest eager frames
    int64_t frame_nbytes = sizeof(FrameHeader); ///< what an eager frame costs in the pool beside its payload
    size_t max_ahead = 4096; ///< operations that a peer has not posted, as far as is known, and may have credit for
  };

  enum class Permission { No, Eager, Credit };

  struct Action {
    enum class Kind {
      Grant, ///< tell `peer`: so many bytes of operation `op_id` in all; for op_id 0, so many bytes of the pool are free again
      MaySend, ///< operation `op_id` may be able to send to `peer` now
    };
    Kind kind = Kind::Grant;
    int peer = -1;
    uint64_t op_id = 0;
    int64_t nbytes = 0;
  };

  Credits(Config config, int size) : config_(config), peers_(static_cast<size_t>(size)) {}

  // ---- events
  /// `message`: a point-to-point operation. `shown_by`: ranks that have posted the operation, as a frame of it shows.
  void posted(uint64_t op_id, const PreparedSchedule& schedule, bool message, const std::vector<int>& shown_by);
  void ended(uint64_t op_id);
  /// As if it had not been posted. Takes no memory.
  void forget(uint64_t op_id) noexcept;
  /// The operation has ended on this rank without having been posted here: what was kept for it is dropped.
  void passed(uint64_t op_id);
  /// The header of a data frame has arrived. Null, or why no peer that keeps to the protocol sends it.
  [[nodiscard]] const char* arrived(uint64_t op_id, int peer, int64_t nbytes, bool eager);
  /// The bytes of one data frame have been used and their memory is free again. Called for frames of 0 bytes, too.
  void consumed(uint64_t op_id, int peer, int64_t nbytes, bool eager);
  /// The peer has granted credit: the counterpart of Action::Grant. Null, or why no peer that keeps to the protocol grants it.
  [[nodiscard]] const char* granted(uint64_t op_id, int peer, int64_t limit);
  /// The peer has sent something about a posted operation, so it has posted that, too.
  void shown(uint64_t op_id, int peer);
  void sent(uint64_t op_id, int peer, int64_t nbytes, Permission used);

  // ---- questions
  [[nodiscard]] Permission maySend(uint64_t op_id, int peer, int64_t nbytes) const;
  /// So much may go eagerly now, in so many frames.
  [[nodiscard]] bool hasRoom(int peer, int64_t nbytes, size_t frames) const;
  /// Credit for an operation that has ended here, and did without.
  [[nodiscard]] bool isPast(int peer, uint64_t op_id) const;
  /// The operation has still to send to `peer`, and has no credit for that.
  [[nodiscard]] bool lacksCredit(uint64_t op_id, int peer) const;
  /// A frame of the posted operation shows that `peer` has posted it.
  [[nodiscard]] bool hasShown(uint64_t op_id, int peer) const;

  /// What one edge of a posted operation moves in all; -1 if it has no such edge.
  [[nodiscard]] int64_t incomingNbytes(uint64_t op_id, int peer) const;
  [[nodiscard]] int64_t outgoingNbytes(uint64_t op_id, int peer) const;
  /// Peers from which bytes are due or to which frames have still to go, the former first; a peer may be in it twice.
  [[nodiscard]] std::vector<int> unfinished(uint64_t op_id) const;
  /// Receivers of a posted message for which it cannot go eagerly.
  [[nodiscard]] std::vector<int> withoutRoom(uint64_t op_id) const;

  [[nodiscard]] int64_t cost(int64_t nbytes, size_t frames = 1) const noexcept {
    return nbytes + config_.frame_nbytes * static_cast<int64_t>(frames);
  }
  struct Usage {
    int64_t eager_in = 0; ///< bytes in the pools of all peers
    size_t past = 0; ///< see Peer::past
    size_t most_past = 0; ///< as many as there are frames in a pool, of each peer
    size_t ahead = 0; ///< see Peer::ahead
    size_t with_credit = 0; ///< operations
    size_t unexpected_credit = 0; ///< operations that are not posted here, and have credit or frames
  };
  [[nodiscard]] Usage usage() const;
  [[nodiscard]] std::vector<Action> takeActions() {
    return std::exchange(actions_, {});
  }

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
    int64_t eager_sent = 0; ///< outgoing: Peer::eager_sent after its last frame
  };
  struct Op {
    std::vector<EdgeState> incoming;
    std::vector<EdgeState> outgoing;
    bool message = false;
  };
  /// What a peer has sent of an operation that is not posted here.
  struct Unexpected {
    int64_t limit = kNoLimit;
    size_t frames = 0; ///< unexpected ones
  };
  /// An operation that has ended here, for which credit may still come: all that was sent went eagerly.
  struct Past {
    uint64_t op_id;
    int64_t sent; ///< Peer::eager_sent after its last frame to that peer
  };
  struct Peer {
    int64_t eager_out = 0; ///< in the peer's pool because of us
    int64_t eager_in = 0; ///< in our pool because of it, not yet consumed
    int64_t eager_used = 0; ///< consumed, not yet given back
    int64_t eager_sent = 0; ///< ever
    /// In the order of their last frames. Once more than a pool has been sent after an operation's last frame, the peer has given back
    /// room for some of that, so it has read that frame before, and credit that it granted until then has come.
    std::deque<Past> past;
    size_t ahead = 0; ///< edges that have credit, while nothing shows that the peer has posted their operations
    size_t limits = 0; ///< entries of unexpected_ with credit
  };

  [[nodiscard]] static EdgeState stateOf(const Edge& edge);
  [[nodiscard]] static EdgeState* edgeTo(std::vector<EdgeState>& edges, int peer);
  [[nodiscard]] static const EdgeState* edgeTo(const std::vector<EdgeState>& edges, int peer);
  [[nodiscard]] const EdgeState* incoming(uint64_t op_id, int peer) const;
  [[nodiscard]] const EdgeState* outgoing(uint64_t op_id, int peer) const;
  [[nodiscard]] Peer& peer(int rank) {
    return peers_[static_cast<size_t>(rank)];
  }
  [[nodiscard]] const Peer& peer(int rank) const {
    return peers_[static_cast<size_t>(rank)];
  }
  void grant(uint64_t op_id, EdgeState& edge);
  void grantAllFrom(int rank);
  void noLongerAhead(EdgeState& edge);
  [[nodiscard]] std::map<int, Unexpected> takeUnexpected(uint64_t op_id);
  [[nodiscard]] bool crowded(int rank) const;
  void keepPast(const EdgeState& edge, uint64_t op_id, bool message);

  const Config config_;
  std::map<uint64_t, Op> ops_; ///< oldest first: room that comes back is for those that other ranks enter next
  std::unordered_map<uint64_t, std::map<int, Unexpected>> unexpected_; ///< of operations that are not posted here
  std::vector<Peer> peers_;
  std::vector<Action> actions_;
};

/// Frames that went eagerly say so, so that both sides count the same bytes against the pool.
inline constexpr uint64_t kEagerFlag = 1;

} // namespace pycomm
