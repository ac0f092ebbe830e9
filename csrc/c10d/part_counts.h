#pragma once

#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/step.h"

namespace pycomm {

// How many elements each rank's part has, in collectives whose parts may be of different sizes.

[[nodiscard]] inline std::vector<int64_t> countsOf(const std::vector<at::Tensor>& parts) {
  std::vector<int64_t> counts;
  for (const at::Tensor& part : parts) {
    counts.push_back(part.numel());
  }
  return counts;
}

/// For a rank that is not the root of a gather or scatter: it knows its own part's size only. Its schedule needs no more, and the root
/// compares with each rank the size that passes between them.
[[nodiscard]] inline std::vector<int64_t> onlyOwnCount(const at::Tensor& part, int rank, int size) {
  std::vector<int64_t> counts(static_cast<size_t>(size), 0);
  counts[static_cast<size_t>(rank)] = part.numel();
  return counts;
}

/// For collectives in which every rank knows all sizes. Even parts have a form of their own, since more algorithms can run them.
inline void setParts(ScheduleRequest& schedule, const std::vector<at::Tensor>& parts) {
  std::vector<int64_t> counts = countsOf(parts);
  if (std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts.front(); })) {
    schedule.numel = counts.front();
  } else {
    schedule.counts = std::move(counts);
  }
}

} // namespace pycomm
