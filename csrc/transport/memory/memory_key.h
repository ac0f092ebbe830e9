#pragma once

#include <cstdint>

namespace pycomm {

/// A process of this user on this host needs it to map memory of a group. In a group with a secret it is derived from the secret.
struct MemoryKey {
  uint64_t high = 0;
  uint64_t low = 0;

  /// The time that this takes does not depend on where they differ.
  [[nodiscard]] bool operator==(const MemoryKey& other) const noexcept {
    return ((high ^ other.high) | (low ^ other.low)) == 0;
  }
};

} // namespace pycomm
