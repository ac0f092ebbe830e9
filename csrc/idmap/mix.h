#pragma once

#include <cstdint>

namespace pycomm {

/// A bijection of 0 … 2^63 − 1 that spreads neighbours over the whole range, so that a range of mixed ids is an even share of the
/// ids. It is part of every checkpoint: it must never change.
constexpr uint64_t kIdMask = (uint64_t{1} << 63) - 1;

constexpr uint64_t mixId(uint64_t id) noexcept {
  // Shifts to the right and odd factors can be undone in 63 bits. The factors are splitmix64's (Steele, Lea and Flood 2014).
  id ^= id >> 30;
  id = (id * 0xbf58476d1ce4e5b9U) & kIdMask;
  id ^= id >> 27;
  id = (id * 0x94d049bb133111ebU) & kIdMask;
  id ^= id >> 31;
  return id;
}

/// x with `odd` · x = 1 modulo 2^64, by Newton's method.
constexpr uint64_t inverseOf(uint64_t odd) noexcept {
  uint64_t inverse = odd; // right in the lowest 3 bits, and in twice as many after each round
  for (int round = 0; round < 5; ++round) {
    inverse *= 2 - odd * inverse;
  }
  return inverse;
}

constexpr uint64_t unmixId(uint64_t mixed) noexcept {
  const auto undo = [](uint64_t value, int shift) {
    uint64_t found = value;
    for (int done = shift; done < 63; done += shift) {
      found = value ^ (found >> shift);
    }
    return found;
  };
  uint64_t id = undo(mixed, 31);
  id = (id * inverseOf(0x94d049bb133111ebU)) & kIdMask;
  id = undo(id, 27);
  id = (id * inverseOf(0xbf58476d1ce4e5b9U)) & kIdMask;
  return undo(id, 30);
}

} // namespace pycomm
