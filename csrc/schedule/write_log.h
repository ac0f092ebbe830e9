#pragma once

#include <algorithm>
#include <vector>

#include "schedule/partition.h"
#include "schedule/schedule_builder.h"

namespace pycomm {

/// Which step wrote which elements of a buffer, for algorithms in which one round sends what several earlier ones wrote,
/// cut in other places. Cost: a look at each entry.
class WriteLog {
 public:
  void add(Run run, StepId step) {
    if (step != kNoStep) {
      entries_.push_back({run, step});
    }
  }
  /// The steps that a reader of `run` must wait for. For an empty run: all steps so far. Without them, a rank whose part is
  /// empty would end before all ranks have entered.
  [[nodiscard]] Deps writersOf(Run run) const {
    Deps deps;
    for (const Entry& entry : entries_) {
      const int64_t end = std::min(entry.run.offset + entry.run.numel, run.offset + run.numel);
      if (run.numel == 0 || end > std::max(entry.run.offset, run.offset)) {
        deps.push_back(entry.step);
      }
    }
    return deps;
  }

 private:
  struct Entry {
    Run run;
    StepId step;
  };
  std::vector<Entry> entries_;
};

} // namespace pycomm
