#pragma once

#include <algorithm>
#include <vector>

#include "schedule/partition.h"
#include "schedule/schedule_builder.h"

namespace pycomm {

/// Records which step wrote which elements of a buffer. For algorithms in which one round sends elements that several
/// earlier rounds wrote, cut at other places. Cost: one comparison per entry and call.
class WriteLog {
 public:
  void add(Run run, StepId step) {
    if (step != kNoStep) {
      entries_.push_back({run, step});
    }
  }
  /// The steps that a reader of `run` must wait for. For an empty run: all steps so far. Otherwise a rank whose part is
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
