#include "base/wait_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "within.h"

namespace pycomm::testing {
namespace {

constexpr int64_t kMs = 1000 * 1000;

void rest(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

TEST(WaitClock, WaitsAreNoBusyTimeAndThoseWithinOthersCountOnce) {
  const WaitClock::Instant begin = WaitClock::now();
  rest(20);
  {
    const WaitClock::Waiting outer;
    rest(400);
    {
      const WaitClock::Waiting inner; // as of a signal handler that runs in a wait
      rest(400);
    }
    rest(400);
  }
  const int64_t busy = WaitClock::busyNs(begin, WaitClock::now());
  EXPECT_GE(busy, 20 * kMs);
  EXPECT_WITHIN_MS(busy / kMs, 400); // none of the three rests, and none twice
}

TEST(WaitClock, WaitsOfAnotherThreadAreItsOwn) {
  const WaitClock::Instant begin = WaitClock::now();
  WaitClock::Instant there;
  std::thread([&] {
    const WaitClock::Waiting waiting;
    rest(100);
  }).join();
  std::thread([&] {
    {
      const WaitClock::Waiting waiting;
      rest(1);
    }
    there = WaitClock::now();
  }).join();
  EXPECT_GE(WaitClock::busyNs(begin, WaitClock::now()), 100 * kMs);
  EXPECT_GE(WaitClock::busyNs(begin, there), 100 * kMs) << "counters of two threads have no difference";
}

} // namespace
} // namespace pycomm::testing
