#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>

namespace pycomm::testing {

/// Tests with many cases run a fifth of them on each day, as the Python tests do (tests/rig/shares.py).
inline constexpr uint64_t kShares = 5;

/// The share of this run: SHARE from the environment, else the number of the day (UTC) modulo kShares.
inline uint64_t todaysShare() {
  const char* given = std::getenv("SHARE");
  if (given != nullptr && *given != '\0') {
    return std::strtoull(given, nullptr, 10) % kShares;
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::hours>(now).count() / 24) % kShares;
}

} // namespace pycomm::testing
