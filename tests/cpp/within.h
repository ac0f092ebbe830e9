#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "base/deadline.h"

namespace pycomm::testing {

inline int64_t elapsedMs(TimePoint begin) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}

/// How EXPECT_WITHIN_MS compares, and the text that tools/cpp.py looks for.
inline ::testing::AssertionResult isWithin(const char* what, const char*, int64_t took_ms, int64_t limit_ms) {
  if (took_ms < limit_ms) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "TookTooLong: " << what << " is " << took_ms << " ms, the limit is "
                                       << limit_ms << " ms";
}

} // namespace pycomm::testing

/// A bound on elapsed time. Any thread may lose its core for half a second, so tools/cpp.py runs a test once more if all
/// its failures are of this kind. It runs nothing else again: a wrong value fails at once.
#define EXPECT_WITHIN_MS(took_ms, limit_ms) EXPECT_PRED_FORMAT2(::pycomm::testing::isWithin, took_ms, limit_ms)
