#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "transport/link.h"

namespace pycomm {

/// After a link breaks, how long the peer's goodbye may take on another link: a rank that leaves says it on its bulk links, and kGoodbye later
/// on its control links. Other ranks pass it on.
inline constexpr std::chrono::milliseconds kGoodbyeWithin = 2 * kGoodbye;

/// ErrorRecord::cause of a PEER_DEAD that the kernel of the peer's host has reported to a neighbour there: the process has ended, and writes
/// nothing any more. The end of a connection proves less.
inline constexpr const char* kEndedByKernel = "the kernel has ended its process";

/// Failure detector of one rank: which ranks are alive, and the one cause of a failure. Without I/O and without a clock of its own.
///
/// The first error wins and sticks. "First" must mean the same on every rank, although news travels: so each rank
/// forwards a new report at once over its control links, waits 5 ms for others, and then picks by a fixed order (`precedes`). A rank
/// that reported a cause is never blamed for hanging up afterwards: its silence is a consequence.
///
/// Doubt. A control link that was reset may have swallowed a goodbye. So the report of that death says so (its phase is "reset"), and every
/// rank that has it waits up to 40 ms for the goodbye. If another sign of the death is found, the rank reports the same cause without
/// doubt, and the ranks choose at once.
///
/// Heartbeats: a control link that was silent for `dead_after_ms` makes its rank unresponsive. The peer's heartbeats come from a
/// native thread, so a held interpreter lock does not silence them.
///
/// Goodbyes: a rank passes each one on to its neighbours, once. So a goodbye that a link loses comes another way, and ranks without a link
/// to the one that left learn of it, too. A report that such a rank is dead counts no more: its writer did not have the goodbye yet.
///
/// Reports that come when the choice is due do not count: other ranks have chosen without them. They are kept until the choice is made,
/// because a goodbye may come first and leave nothing to choose; then they count as if the explained report had never been.
class Membership {
 public:
  static constexpr int kDeadAfterMs = kOneTryMs; ///< of silence: what heartbeat_timeout is by default
  /// Heartbeats in that time: some may be late, and the thread that looks has to get a core in between.
  static constexpr int kHeartbeatsWithin = 6;

  struct Config {
    int rank = 0;
    JobRanks job; ///< what records call the ranks: all else here has the group's own numbers
    std::vector<std::string> hosts;
    std::vector<int> neighbours; ///< ranks with a control link
    std::string group;
    int merge_ms = 5;
    int merge_mismatches_ms = 25; ///< longer, because many pairs of ranks find one mismatch at once
    int dead_after_ms = kDeadAfterMs;
    int heartbeat_every_ms = kDeadAfterMs / kHeartbeatsWithin;
  };

  struct Action {
    enum class Kind {
      Flood, ///< send `record` to every neighbour but `except`
      Heartbeat, ///< send a heartbeat to every neighbour
      Left, ///< tell every neighbour but `except` that rank `left` has left in order
      Leaving, ///< tell them, but not that rank, that it will leave because of `record`
      Fail, ///< the group has failed with `record`
    };
    Kind kind = Kind::Flood;
    int except = -1;
    int left = -1;
    ErrorRecord record;
  };

  Membership(Config config, TimePoint now);

  /// Seen here: a link that broke, a mismatch, a deadline, abort().
  void noticed(ErrorRecord record, TimePoint now);
  /// A failure if the peer is a neighbour that has not left. If it is not a neighbour, its neighbours report it.
  void doubted(ErrorRecord record, TimePoint now);
  /// Heard from a neighbour.
  void reported(int from, ErrorRecord record, TimePoint now);
  /// A neighbour sent something, anything.
  void alive(int from, TimePoint now);
  /// A control link ended; after a goodbye that is no fault. `broke`: it was reset, which may have swallowed the goodbye: see Doubt. Else the
  /// end proves a death, also of a peer whose link was reset before.
  void controlClosed(int peer, const std::string& cause, TimePoint now, bool broke = false);
  /// A rank said goodbye to this one, on a link of any kind, or to others: `from` passes that on. It is passed on once, and not after the
  /// group has failed. False if it was known.
  bool saidGoodbye(int peer) {
    return saidGoodbye(peer, peer);
  }
  bool saidGoodbye(int peer, int from);

  void tick(TimePoint now);
  [[nodiscard]] TimePoint nextTick() const noexcept;

  /// False for a rank that does not exist: a report may name any.
  [[nodiscard]] bool hasLeft(int peer) const noexcept {
    const Rank* const found = find(peer);
    return found != nullptr && found->left;
  }
  /// A rank will leave because it could not join or something else in its process has failed: a report that it has left says so. `from` passes that on, -1 for
  /// this rank itself. It is passed on once.
  void willLeave(int peer, const ErrorRecord& why, int from);
  /// There is to be a control link to that rank.
  [[nodiscard]] bool isNeighbour(int peer) const noexcept {
    const Rank* const found = find(peer);
    return found != nullptr && found->is_neighbour;
  }
  /// The neighbour has missed a heartbeat: it may be stopped. No failure yet, but nothing should be sent by way of it.
  [[nodiscard]] bool isSilent(int peer, TimePoint now) const noexcept;
  /// By rank: when it was last heard. TimePoint::max() if that says nothing: it is no neighbour, has not connected, or has left.
  [[nodiscard]] std::vector<TimePoint> heardAt() const;
  [[nodiscard]] const std::optional<ErrorRecord>& failure() const noexcept {
    return failure_;
  }
  [[nodiscard]] std::vector<Action> takeActions();
  /// The reports that were flooded so far, for a neighbour whose link comes only now.
  [[nodiscard]] std::vector<ErrorRecord> news() const;

 private:
  /// All that this rank knows of one rank.
  struct Rank {
    bool left = false; ///< it said goodbye
    bool spoke = false; ///< it reported one of candidates_, its own or another's
    std::unique_ptr<const ErrorRecord> leaves_because; ///< see willLeave()

    // Of a neighbour:
    bool is_neighbour = false;
    bool connected = false; ///< heard at least once: before that, the code that connects knows better why it is silent
    bool over = false; ///< nothing more is expected from it
    TimePoint heard_at;
  };
  struct Candidate {
    ErrorRecord record;
    TimePoint due; ///< when this rank chooses, if this is the only candidate
    [[nodiscard]] bool mayHaveLeft() const noexcept {
      return Membership::mayHaveLeft(record);
    }
  };

  /// A report that came when the choice was due.
  struct Late {
    ErrorRecord record;
    int from;
    TimePoint came_at;
  };

  [[nodiscard]] static bool isSameNews(const ErrorRecord& a, const ErrorRecord& b) noexcept;
  /// Whether `a` is the deeper cause of the two. Strict, total over what ranks can notice, and the same on all ranks.
  static bool precedes(const ErrorRecord& a, const ErrorRecord& b);
  /// The report of a link that was reset, which a goodbye may explain; no other one has that phase.
  [[nodiscard]] static bool mayHaveLeft(const ErrorRecord& record) noexcept {
    return record.code == ErrorCode::PeerDead && record.phase == ErrorPhase::Reset;
  }
  void learn(ErrorRecord record, int from, TimePoint now);
  /// Late reports count after all if goodbyes have explained the candidates that were to be chosen from.
  void learnLate();
  void confirm(Candidate& known, int from, TimePoint now);
  void flood(const ErrorRecord& record, int except);
  void dropExplained() noexcept;
  void choose();
  [[nodiscard]] bool isExplained(const ErrorRecord& record) const;
  [[nodiscard]] bool doubts(int peer) const noexcept;
  [[nodiscard]] bool isOwn(const ErrorRecord& record) const noexcept {
    return record.rank == config_.job.of(config_.rank);
  }
  void sign(ErrorRecord& record, int peer) const;
  [[nodiscard]] TimePoint decideAt() const noexcept;
  [[nodiscard]] ErrorRecord cutOff(ErrorRecord record, TimePoint::duration silence) const;
  /// Null for a rank that does not exist.
  [[nodiscard]] const Rank* find(int rank) const noexcept {
    return rank >= 0 && static_cast<size_t>(rank) < ranks_.size() ? &ranks_[static_cast<size_t>(rank)] : nullptr;
  }
  [[nodiscard]] Rank* find(int rank) noexcept {
    return const_cast<Rank*>(std::as_const(*this).find(rank));
  }
  /// Null also for a rank without a control link.
  [[nodiscard]] Rank* neighbour(int rank) noexcept;
  /// `rank` as records call it.
  [[nodiscard]] bool hasSpoken(int rank) const noexcept;
  void spoke(int rank) noexcept; ///< in the group

  const Config config_;
  std::vector<Rank> ranks_; ///< by rank
  std::vector<Candidate> candidates_; ///< in the order in which they came
  std::vector<Late> late_; ///< until the choice, which ignores them, or learnLate()
  TimePoint heartbeat_at_;
  std::optional<ErrorRecord> failure_;
  std::vector<Action> actions_;
};

/// Ranks to keep control links with: ±1, ±2, ±4, … around the circle, so that news reaches all of N ranks in log2 N hops; and the
/// next and the previous of `local_ranks` (all ranks of this one's host, itself among them, rising), so that every rank that shares a
/// host has somebody there who notices its death at once.
[[nodiscard]] std::vector<int> controlNeighbours(int rank, int size, const std::vector<int>& local_ranks = {});

} // namespace pycomm
