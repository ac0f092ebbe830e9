#include "elastic/step_ledger.h"

namespace pycomm::elastic {

void StepLedger::launch(Round round) noexcept {
  round_ = round;
  state_.launched = round != Round::Admission;
  state_.finished = false;
}

std::optional<Wish> StepLedger::finish(uint64_t epoch) noexcept {
  const bool counts = !sealed_ && epoch == epoch_ && round_.has_value();
  if (!counts) {
    return std::nullopt;
  }
  state_.finished = true;
  if (round_ == Round::Step && leaving_ == Leaving::Asked) {
    leaving_ = Leaving::Announced;
  }
  return Wish{leaving_ == Leaving::Announced, admits_, *round_};
}

StepLedger::Committed StepLedger::commit(uint64_t epoch, const Wish& all) noexcept {
  if (!mayCommit() || epoch != epoch_) {
    return Committed::TooLate;
  }
  const bool stops = round_ == Round::Admission && all.admits;
  settle();
  admission_is_due_ = all.admits && !stops;
  leaving_ = leaving_ == Leaving::Announced ? Leaving::Left : leaving_;
  return stops ? Committed::Admits : all.leaves ? Committed::Leaves : Committed::GoesOn;
}

void StepLedger::settle() noexcept {
  ++state_.committed;
  round_.reset();
  state_.launched = false;
  state_.finished = false;
}

StepLedger::Outcome StepLedger::install(const View& next) noexcept {
  sealed_ = false;
  epoch_ = next.epoch;
  admission_is_due_ = false; // other members may not have heard of it
  if (next.step == state_.committed + 1) {
    settle();
    return Outcome::Commit;
  }
  state_.finished = false; // what had ended in the old epoch is the sum of other members
  if (round_ == Round::Admission) { // all go on without it
    round_.reset();
  }
  return round_ ? Outcome::Redo : Outcome::Nothing;
}

void StepLedger::leave() noexcept {
  leaving_ = leaving_ == Leaving::No ? Leaving::Asked : leaving_;
}

void StepLedger::left(const View& next) noexcept {
  if (state_.launched) {
    (void)install(next); // the step with which it leaves counts
  }
  leaving_ = Leaving::Left;
}

} // namespace pycomm::elastic
