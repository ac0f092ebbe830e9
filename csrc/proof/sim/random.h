#pragma once

#include <cstddef>
#include <cstdint>

namespace pycomm::sim {

/// The only source of randomness in a simulation: SplitMix64 (Steele, Lea, Flood 2014). The same seed gives the same
/// numbers with every compiler and library, unlike the distributions of <random>.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  [[nodiscard]] uint64_t next() noexcept {
    state_ += 0x9e3779b97f4a7c15ULL;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  /// In [0, bound); 0 for a bound of 0.
  [[nodiscard]] int64_t below(int64_t bound) noexcept {
    return bound <= 0 ? 0 : static_cast<int64_t>(next() % static_cast<uint64_t>(bound));
  }
  /// In [low, high].
  [[nodiscard]] int64_t within(int64_t low, int64_t high) noexcept {
    return low + below(high - low + 1);
  }
  /// In [low, high], small values as likely as large ones.
  [[nodiscard]] int64_t scaled(int64_t low, int64_t high) noexcept {
    int bits = 0;
    while ((high - low) >> bits > 0) {
      ++bits;
    }
    const int64_t reach = int64_t{1} << within(0, bits);
    return low + below(reach - 1 < high - low ? reach : high - low + 1);
  }
  [[nodiscard]] bool chance(int percent) noexcept {
    return below(100) < percent;
  }
  template <typename T, size_t N>
  [[nodiscard]] T pick(const T (&values)[N]) noexcept {
    return values[static_cast<size_t>(below(static_cast<int64_t>(N)))];
  }
  /// An independent stream, so that drawing more numbers in one place changes nothing in another.
  [[nodiscard]] Random fork() noexcept {
    return Random(next());
  }

 private:
  uint64_t state_;
};

} // namespace pycomm::sim
