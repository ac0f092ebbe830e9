#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "elastic/step_ledger.h"

namespace pycomm {

/// What a reducer asks of its group if steps survive deaths. One object per wrapper.
///
///     begin() -> buckets -> end() [-> Redo: buckets again -> end()] -> Commit
///
/// The members of the group, its rank() and its size(), change inside these calls only. Called on the training thread, without the
/// interpreter's lock; the calls may block. The reducer keeps its turn meanwhile.
class StepAgreement {
 public:
  virtual ~StepAgreement() = default;

  using Round = elastic::Round;
  enum class Outcome {
    Commit, ///< all members have finished the step, with the same bits: it counts
    CommitLast, ///< the same, and it is the last one of these members: awaitMembers() waits for the next ones, and returns true
    Redo, ///< the group has other members: sum all buckets again, in the new group, and call end() again
  };

  /// Before a step launches anything: waits until it may begin (min_ranks). True if the members have changed since the last call of
  /// either. Throws an Error: QuorumLost, LeftBehind, TooFew. `round`: a step or one between two, the same on all members.
  virtual bool begin(Round round) = 0;
  /// Behind CommitLast: waits for the next members, also if they are too few. Nothing begins, as the program may do what it likes between two
  /// steps. Returns and throws as begin().
  virtual bool awaitMembers() {
    return false;
  }

  /// The end of a step. `error`: null if all of its buckets ended well here, in the present epoch; else the first exception, as a Work
  /// raises it.
  ///
  /// Blocks for the commit round; after a failure, until the survivors have agreed and, with Redo, the next group is there.
  ///
  /// Rethrows `error` if it is one of the program (COLLECTIVE_MISMATCH, TIMEOUT, an exception that is not of the network: see
  /// Agreement::changesMembers()). Else throws QuorumLost, LeftBehind, TooFew as Errors.
  [[nodiscard]] virtual Outcome end(const std::exception_ptr& error) = 0;
  /// Whether all members have said, at the end of the last step, that some process wants to join and is reached: the same on all of them.
  /// Any later round, or change of members, ends that.
  [[nodiscard]] virtual bool admissionIsDue() const {
    return false;
  }
  /// The members stop for processes that join, if that is still due once the present ones have met: see Round::Admission. If the members change
  /// meanwhile, all go on without it, and are asked again. Returns and throws as begin(), and end(); nothing is under way then.
  virtual bool admit() {
    return false;
  }
  /// Before a step of which no pass has been made, behind admit(): waits until processes that join want the state of this rank, and returns how
  /// many; or until the members are enough for a step: then 0. The caller gives them the state, and asks again. Throws as begin().
  virtual size_t newcomers() {
    return 0;
  }

  /// The program is at a place where it lets processes join. All members are there as often between two rounds, if nobody joins there: the next
  /// end() throws CollectiveMismatch where they were not.
  virtual void joinPoint() {}

  /// The members as of the last call of either, by rank: the number that each had in the group when the wrapper was made. So the first ones are
  /// 0, 1, 2, ... and {0, 2} says that 1 has gone.
  [[nodiscard]] virtual std::vector<int> members() const = 0;

  /// How long the present members took to meet, since they were known; 0 for the first ones.
  [[nodiscard]] virtual int64_t meetingNs() const {
    return 0;
  }

  /// Asks to leave in order, with the next step that this rank finishes: the others sum nothing again. Idempotent. Any thread, also while
  /// another one is in begin() or end().
  virtual void leave() = 0;
  /// Whether it has: the step that end() has committed was this rank's last, and begin() throws. Any thread.
  [[nodiscard]] virtual bool hasLeft() const = 0;
  /// Whether this process is a member no more, for whatever reason: it has left, closed or failed, or is a child of fork(). Any thread.
  [[nodiscard]] virtual bool isOver() const {
    return false;
  }
  /// How many members are gone and have come since the wrapper was made, as of the last call of begin() or end(). Also counts a process that
  /// has joined and is gone again since the call before: members() does not show it, but it shows others that were faster.
  [[nodiscard]] virtual elastic::Changes changes() const = 0;

  /// Leaves the group at once. begin() and end() throw from now on.
  virtual void close() noexcept = 0;
};

} // namespace pycomm
