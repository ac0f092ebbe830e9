#pragma once

#include <cstdint>
#include <vector>

#include "elastic/view.h"

namespace pycomm::elastic {

/// How far one process is with its steps: the pure half of a step that is a transaction. Without I/O, clock or threads.
///
/// A step launches its buckets; when all have ended well in one epoch, the process enters commit(step), an all-reduce over the members.
/// That cannot end anywhere before all members have entered it. So if any process has committed a step, all members of its epoch had
/// finished all of its buckets, in that epoch and with the same bits.
///
/// Example, of 3 ranks. All finish step 7 and enter commit(7). It ends on rank 0, rank 2 dies. Ranks 0 and 1 seal: (7, nothing) and
/// (6, finished). The next view says step 7, so rank 1 commits it, too. Had rank 1 not finished a bucket, rank 0 could not have committed,
/// the next view would say step 6, and both would sum all buckets of step 7 again.
class StepLedger {
 public:
  enum class Outcome {
    Nothing, ///< nothing was under way, or it is committed already
    Commit, ///< the step that was under way counts: take its results over
    Redo, ///< sum all of its buckets again
  };

  /// Of a process that holds what the others held after step `committed`.
  explicit StepLedger(int64_t committed = 0) noexcept {
    state_.committed = committed;
  }

  /// The next step launches so many buckets, or launches them once more after Redo.
  void launch(int buckets);
  /// A bucket of this epoch has ended well. Not counted after seal(), nor if the epoch is another one.
  void finish(uint64_t epoch, int bucket);
  /// All buckets of the step have ended well: the process may enter commit.
  [[nodiscard]] bool mayCommit() const noexcept {
    return !sealed_ && state_.finished;
  }
  /// The commit round of this epoch has ended well: what the step changes may be shown. False if it came too late.
  [[nodiscard]] bool commit(uint64_t epoch) noexcept;

  /// From here on nothing of this epoch counts. Called once the planes have failed all operations.
  [[nodiscard]] const StepState& seal() noexcept {
    sealed_ = true;
    return state_;
  }
  /// The next epoch begins with this view, of which the process is a member.
  [[nodiscard]] Outcome install(const View& next) noexcept;

  [[nodiscard]] const StepState& state() const noexcept {
    return state_;
  }

 private:
  void settle() noexcept;

  StepState state_;
  uint64_t epoch_ = 0;
  std::vector<bool> finished_; ///< by bucket of the step that is launched
  bool sealed_ = false;
};

} // namespace pycomm::elastic
