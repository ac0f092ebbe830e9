#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pycomm {

/// Consecutive elements of a tensor.
struct Run {
  int64_t offset = 0;
  int64_t numel = 0;
};

/// Part `index` of `whole` cut into `parts`, whose lengths differ by at most one element; the longer ones come first.
[[nodiscard]] constexpr Run splitBalanced(Run whole, int64_t parts, int64_t index) noexcept {
  const int64_t shortest = whole.numel / parts;
  const int64_t longer = whole.numel % parts; // number of parts with one more element
  const int64_t before = index * shortest + (index < longer ? index : longer);
  return {whole.offset + before, shortest + (index < longer ? 1 : 0)};
}

/// The elements of a tensor that belong to each rank: one run per rank, in rank order, without gaps.
class Partition {
 public:
  [[nodiscard]] static Partition balanced(int64_t numel, int32_t size) {
    std::vector<Run> runs;
    for (int32_t rank = 0; rank < size; ++rank) {
      runs.push_back(splitBalanced({0, numel}, size, rank));
    }
    return Partition(std::move(runs));
  }

  /// Parts of `counts` elements, or of `numel` each for `size` ranks if `counts` is empty.
  [[nodiscard]] static Partition ofParts(int64_t numel, int32_t size, const std::vector<int64_t>& counts) {
    std::vector<Run> runs;
    int64_t offset = 0;
    for (int32_t rank = 0; rank < size; ++rank) {
      const int64_t count = counts.empty() ? numel : counts[static_cast<size_t>(rank)];
      runs.push_back({offset, count});
      offset += count;
    }
    return Partition(std::move(runs));
  }

  [[nodiscard]] Run operator[](int32_t rank) const {
    return runs_[static_cast<size_t>(rank)];
  }
  /// The parts of `count` ranks from `first` on, as one run.
  [[nodiscard]] Run span(int32_t first, int32_t count) const {
    if (count == 0) {
      return {first < static_cast<int32_t>(runs_.size()) ? (*this)[first].offset : numel(), 0};
    }
    const Run last = (*this)[first + count - 1];
    return {(*this)[first].offset, last.offset + last.numel - (*this)[first].offset};
  }
  [[nodiscard]] int64_t numel() const {
    return runs_.empty() ? 0 : runs_.back().offset + runs_.back().numel;
  }

 private:
  explicit Partition(std::vector<Run> runs) : runs_(std::move(runs)) {}
  std::vector<Run> runs_;
};

} // namespace pycomm
