#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace pycomm::testing {

// operator new and delete of the whole test program.

/// From now on the thread's `nth` allocation fails, and no other: 1 is the next one. 0: none fails. `second`: so does the one so many
/// after it, unless that is 0.
void failAllocation(int64_t nth, int64_t second = 0) noexcept;
/// How many of those that were to fail have.
[[nodiscard]] int failedAllocations() noexcept;
[[nodiscard]] inline bool allocationFailed() noexcept {
  return failedAllocations() > 0;
}

/// Whether `body` throws std::bad_alloc when its `nth` allocation fails.
template <typename Body>
[[nodiscard]] bool throwsWithoutMemory(int64_t nth, const Body& body) {
  bool threw = false;
  failAllocation(nth);
  try {
    body();
  } catch (const std::bad_alloc&) {
    threw = true;
  }
  failAllocation(0);
  return threw;
}

/// The thread's next allocation lasts until `go`, and says with `begun` that it has begun. Both outlive it.
void holdNextAllocation(std::atomic<bool>& begun, const std::atomic<bool>& go) noexcept;

/// Bytes that the thread has allocated, less those that it has freed.
[[nodiscard]] int64_t heldNbytes() noexcept;

/// From now on each thread that frees so many bytes at once calls `freed`. Null: none does.
void watchFrees(size_t nbytes, void (*freed)()) noexcept;

} // namespace pycomm::testing
