#pragma once

#include <cstdint>
#include <optional>

#include "elastic/view.h"

namespace pycomm::elastic {

/// What a round of the members ends. The same on all of them.
enum class Round : uint8_t {
  Step, ///< ranks leave with it
  BetweenSteps, ///< a mean, say: nobody leaves or joins with it
  Admission, ///< nothing but a place in the program at which the members stop for processes that join
};

/// What a process adds to a commit round, and what the round says of all.
struct Wish {
  bool leaves = false; ///< of all: some member leaves
  bool admits = false; ///< some newcomer can be reached; of all: from every member
  Round round = Round::Step; ///< that it ends
};

/// How far one process is with its rounds, a step among them: the pure half of a step that is a transaction, and the rules of leaving and
/// joining. Without I/O, clock or threads.
///
/// A step launches its buckets; when all have ended well in one epoch, the process enters commit(step), an all-reduce over the members.
/// That cannot end anywhere before all members have entered it. So if any process has committed a step, all members of its epoch had
/// finished all of its buckets, in that epoch and with the same bits.
///
/// Example, of 3 ranks. All finish step 7 and enter commit(7). It ends on rank 0, rank 2 dies. Ranks 0 and 1 seal: (7, nothing) and
/// (6, finished). The next view says step 7, so rank 1 commits it, too. Had rank 1 not finished a bucket, rank 0 could not have committed,
/// the next view would say step 6, and both would sum all buckets of step 7 again.
///
/// Rounds between steps count as steps here, so in one epoch the n-th round is of one kind on all members. An Admission is in no program: all
/// members make it before their next forward pass if the last round of the epoch says so to all of them. One that fails is dropped, since a
/// member that learned the end of that last round from the next view does not know that it was due. So it is nothing that members wait for: a
/// launched Admission is no launched step.
class StepLedger {
 public:
  enum class Outcome {
    Nothing, ///< nothing was under way, or it is committed already
    Commit, ///< the step that was under way counts: take its results over
    Redo, ///< sum all of its buckets again
  };
  /// What a commit round leads to.
  enum class Committed {
    TooLate, ///< the epoch is over
    GoesOn,
    Leaves, ///< some member leaves: the epoch ends here, see Agreement::boundary()
    Admits, ///< the same, and the members wait for newcomers
  };

  /// Of a process that holds what the others held after step `committed`.
  explicit StepLedger(int64_t committed = 0) noexcept {
    load(committed);
  }
  /// A newcomer holds that now.
  void load(int64_t committed) noexcept {
    state_.committed = committed;
  }

  // ---- the program

  /// The next round begins. After Redo it is still under way.
  void launch(Round round = Round::Step) noexcept;
  /// All that the round sums has ended well in this epoch: what this process adds to the commit round. nullopt if that comes too late.
  [[nodiscard]] std::optional<Wish> finish(uint64_t epoch) noexcept;
  [[nodiscard]] bool isUnderWay() const noexcept {
    return round_.has_value();
  }
  /// The process may enter commit.
  [[nodiscard]] bool mayCommit() const noexcept {
    return !sealed_ && state_.finished;
  }
  /// The commit round of this epoch has ended well, with what it says of all: what the step changes may be shown.
  [[nodiscard]] Committed commit(uint64_t epoch, const Wish& all) noexcept;
  /// Whether the last round of the present epoch says that all members admit. They make an Admission before their next forward pass.
  [[nodiscard]] bool admissionIsDue() const noexcept {
    return admission_is_due_;
  }

  // ---- members

  /// From here on nothing of this epoch counts. Called once the planes have failed all operations.
  [[nodiscard]] const StepState& seal() noexcept {
    sealed_ = true;
    return state_;
  }
  /// The next epoch begins with this view, of which the process is a member.
  [[nodiscard]] Outcome install(const View& next) noexcept;
  /// Of Agreement::admits(), after its last event.
  void setAdmits(bool admits) noexcept {
    admits_ = admits;
  }
  /// The process is asked to leave: with the next Step that it finishes. Idempotent.
  void leave() noexcept;
  /// It has finished its last step, or committed it: see Agreement::leave().
  [[nodiscard]] bool leaves() const noexcept {
    return leaving_ == Leaving::Announced || leaving_ == Leaving::Left;
  }
  /// The others go on without it, in this view.
  void left(const View& next) noexcept;
  [[nodiscard]] bool hasLeft() const noexcept {
    return leaving_ == Leaving::Left;
  }

  [[nodiscard]] const StepState& state() const noexcept {
    return state_;
  }

 private:
  void settle() noexcept;

  enum class Leaving {
    No,
    Asked,
    Announced, ///< with the step that this process has finished
    Left,
  };

  StepState state_;
  uint64_t epoch_ = 0;
  bool sealed_ = false;
  std::optional<Round> round_; ///< that is under way
  bool admits_ = false;
  bool admission_is_due_ = false;
  Leaving leaving_ = Leaving::No;
};

} // namespace pycomm::elastic
