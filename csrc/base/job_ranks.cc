#include "base/job_ranks.h"

#include <algorithm>
#include <cstddef>

namespace pycomm {
namespace {

constexpr int kListedParts = 8;

} // namespace

int JobRanks::inGroup(int job_rank) const noexcept {
  if (by_rank_.empty()) {
    return job_rank;
  }
  const auto found = std::find(by_rank_.begin(), by_rank_.end(), job_rank);
  return found == by_rank_.end() ? -1 : static_cast<int>(found - by_rank_.begin());
}

std::string JobRanks::list() const {
  std::string out;
  int parts = 0;
  for (size_t first = 0; first < by_rank_.size();) {
    if (parts++ == kListedParts) {
      return out + " and " + std::to_string(by_rank_.size() - first) + " more";
    }
    size_t last = first;
    while (last + 1 < by_rank_.size() && by_rank_[last + 1] == by_rank_[last] + 1) {
      ++last;
    }
    last = last - first < 2 ? first : last; // "1, 2" and not "1-2"
    out += (out.empty() ? "" : ", ") + std::to_string(by_rank_[first]);
    out += last == first ? "" : "-" + std::to_string(by_rank_[last]);
    first = last + 1;
  }
  return out;
}

} // namespace pycomm
