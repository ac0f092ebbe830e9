#include "elastic/step_ledger.h"

#include <algorithm>

namespace pycomm::elastic {

void StepLedger::launch(int buckets) {
  finished_.assign(static_cast<size_t>(std::max(buckets, 0)), false);
  state_.launched = true;
  state_.finished = finished_.empty() && !sealed_;
}

void StepLedger::finish(uint64_t epoch, int bucket) {
  const bool counts = !sealed_ && epoch == epoch_ && state_.launched;
  if (!counts || bucket < 0 || static_cast<size_t>(bucket) >= finished_.size()) {
    return;
  }
  finished_[static_cast<size_t>(bucket)] = true;
  state_.finished = std::all_of(finished_.begin(), finished_.end(), [](bool ended) { return ended; });
}

bool StepLedger::commit(uint64_t epoch) noexcept {
  if (!mayCommit() || epoch != epoch_) {
    return false;
  }
  settle();
  return true;
}

void StepLedger::settle() noexcept {
  ++state_.committed;
  state_.launched = false;
  state_.finished = false;
  finished_.clear();
}

StepLedger::Outcome StepLedger::install(const View& next) noexcept {
  sealed_ = false;
  epoch_ = next.epoch;
  if (next.step == state_.committed + 1) {
    settle();
    return Outcome::Commit;
  }
  finished_.clear(); // what had ended in the old epoch is the sum of other members
  state_.finished = false;
  return state_.launched ? Outcome::Redo : Outcome::Nothing;
}

} // namespace pycomm::elastic
