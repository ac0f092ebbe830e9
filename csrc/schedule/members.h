#pragma once

#include <cstdint>

namespace pycomm {

/// The participants in the rounds of an algorithm that needs a power of two. If size is not a power of two, the first
/// ranks form pairs. The odd rank of a pair gives its operand to the even one before the rounds and gets its result
/// after them. So each member stands for one rank or two consecutive ones. Six ranks: members {0, 1}, {2, 3}, {4}, {5}.
struct Members {
  int32_t count = 1; ///< the largest power of two that does not exceed size
  int32_t pairs = 0; ///< ranks 0 .. 2 * pairs - 1 form one member per two ranks

  explicit Members(int32_t size) {
    while (count * 2 <= size) {
      count *= 2;
    }
    pairs = size - count;
  }
  [[nodiscard]] bool paired(int32_t rank) const {
    return rank < 2 * pairs;
  }
  [[nodiscard]] bool isOdd(int32_t rank) const {
    return paired(rank) && rank % 2 == 1;
  }
  [[nodiscard]] int32_t memberOf(int32_t rank) const {
    return paired(rank) ? rank / 2 : rank - pairs;
  }
  /// The rank that acts for a member; for `count`, one past the last rank.
  [[nodiscard]] int32_t rankOf(int32_t member) const {
    return member < pairs ? 2 * member : member + pairs;
  }
};

} // namespace pycomm
