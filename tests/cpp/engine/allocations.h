#pragma once

#include <atomic>
#include <cstdint>

namespace pycomm::testing {

// operator new of the whole test program, as the calling thread sees it.

/// The allocation that is to fail, counted from here: 1 is the next. Returns whether the one asked for before has failed. -1: none fails.
bool failAllocation(int64_t nth) noexcept;

/// The thread's next allocation lasts until `go`, and says with `begun` that it has begun. Both outlive it.
void holdNextAllocation(std::atomic<bool>& begun, const std::atomic<bool>& go) noexcept;

} // namespace pycomm::testing
