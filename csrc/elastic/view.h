#pragma once

#include <bitset>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/error.h"

namespace pycomm::elastic {

/// Adds a value to a digest. Two processes of one build, of whatever machine, get the same.
[[nodiscard]] uint64_t mixed(uint64_t digest, uint64_t value) noexcept;

/// One process and group, for ever: random, so a process that starts again is another one.
struct Incarnation {
  uint64_t high = 0;
  uint64_t low = 0;
  friend constexpr auto operator<=>(const Incarnation&, const Incarnation&) = default;
};

inline constexpr size_t kMaxMembers = 256;
/// Members of one view, by position.
using MemberSet = std::bitset<kMaxMembers>;

/// The members of one epoch, in the order of their ranks, and the step after which it begins. All members vote.
struct View {
  uint64_t epoch = 0;
  uint64_t parent = 0; ///< id() of the view that decided this one
  std::vector<Incarnation> members;
  /// The last committed step. A member that has not committed it has finished it, and commits it now. A member that has launched the
  /// next one sums it again.
  int64_t step = 0;
  ErrorCode cause = ErrorCode::Ok; ///< why the epoch before ended; Ok for members that leave or join at a commit
  MemberSet left; ///< of the view before, by position: the members that have left in order

  /// A digest of all of it and of all views before, so that two views of one epoch are told apart.
  [[nodiscard]] uint64_t id() const noexcept;
  /// -1 for a process that is no member.
  [[nodiscard]] int position(const Incarnation& of) const noexcept;
  [[nodiscard]] bool has(const Incarnation& of) const noexcept {
    return position(of) >= 0;
  }
  friend bool operator==(const View&, const View&) = default;
};

/// How many members are gone and how many have come, in all views that this process has been a member of.
struct Changes {
  int left = 0; ///< in order
  int lost = 0; ///< otherwise
  int joined = 0;

  /// The view after `before` is `next`.
  void count(const View& before, const View& next) noexcept;
  friend bool operator==(const Changes&, const Changes&) = default;
};

/// Votes that these voters have. Each has two, and the lowest-ranked voter of the view one more, which decides between two halves. The
/// order does not depend on who is dead: two halves that know of different deaths must not both win.
[[nodiscard]] int votesOf(const MemberSet& voters) noexcept;

/// Whether `voters` are a quorum of the first `size` members less those in `dead`. Two quorums have a voter in common if they have the
/// same `dead`, or if the one with more votes in `dead` also counts what the dead have accepted: see Ballot.
[[nodiscard]] bool isQuorum(const MemberSet& voters, size_t size, const MemberSet& dead) noexcept;

/// The number of a proposal. First come the votes of the dead that the proposer does not count. So of two proposals that count different
/// bases, the one with the smaller base has the greater number and must ask first what the other one may have decided.
class Ballot {
 public:
  constexpr Ballot() = default;
  constexpr Ballot(int dead_votes, uint32_t round, int proposer)
      : number_(
            (static_cast<uint64_t>(dead_votes) << 48) | (static_cast<uint64_t>(round) << 16) |
            static_cast<uint64_t>(proposer)) {}
  [[nodiscard]] static constexpr Ballot of(uint64_t number) noexcept {
    Ballot ballot;
    ballot.number_ = number;
    return ballot;
  }

  [[nodiscard]] constexpr uint64_t number() const noexcept {
    return number_;
  }
  [[nodiscard]] constexpr int deadVotes() const noexcept {
    return static_cast<int>(number_ >> 48);
  }
  [[nodiscard]] constexpr uint32_t round() const noexcept {
    return static_cast<uint32_t>(number_ >> 16);
  }
  [[nodiscard]] constexpr int proposer() const noexcept {
    return static_cast<int>(number_ & 0xffff);
  }
  /// False for the ballot below all others: nothing was promised or accepted.
  [[nodiscard]] constexpr bool given() const noexcept {
    return number_ != 0;
  }
  friend constexpr auto operator<=>(const Ballot&, const Ballot&) = default;

 private:
  uint64_t number_ = 0;
};

/// What a voter has accepted.
struct Accepted {
  Ballot ballot;
  View next;
  friend bool operator==(const Accepted&, const Accepted&) = default;
};

/// How far a process is with its steps.
struct StepState {
  int64_t committed = 0; ///< the last step that it has committed
  bool launched = false; ///< of the next step, something; nothing of an Admission
  bool finished = false; ///< of the next step or Admission, all buckets, and in this epoch
  friend bool operator==(const StepState&, const StepState&) = default;
};

} // namespace pycomm::elastic
