#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/host/host_memory.h"
#include "transport/memory/shared_arena.h"

namespace pycomm::testing {
namespace {

using std::chrono::seconds;

class HostBellTest : public ::testing::Test {
 protected:
  HostBellTest() {
    arena_.commit(0, HostView::commonNbytes(kSize));
  }
  HostView view(int rank) {
    return HostView{arena_.at(0), rank, kSize};
  }
  [[nodiscard]] uint32_t rung() {
    return view(0).progress(0).bell.load();
  }

  static constexpr int kSize = 3;

 private:
  SharedArena arena_ = SharedArena::create(HostView::totalNbytes(kSize));
};

TEST_F(HostBellTest, OnlyARankThatIsWaitedForRings) {
  const HostBell bell(view(0));
  EXPECT_EQ(bell.expect(hostBit(2)), 0U);
  HostBell(view(1)).ringOthers();
  EXPECT_EQ(rung(), 0U);
  HostBell(view(2)).ringOthers();
  EXPECT_EQ(rung(), 1U);
  bell.ignore();
  HostBell(view(2)).ringOthers();
  EXPECT_EQ(rung(), 1U) << "nobody waits any more";
}

TEST_F(HostBellTest, AThreadOfTheSameProcessRingsIfOneSleeps) {
  const HostBell bell(view(0));
  bell.ringSelf();
  EXPECT_EQ(rung(), 0U);
  EXPECT_EQ(bell.expect(0), 0U);
  bell.ringSelf();
  EXPECT_EQ(rung(), 1U);
  bell.ringOthers();
  EXPECT_EQ(rung(), 1U) << "its own bell is not one of the others'";
}

// What rings between expect() and sleep() is not lost: the value of the bell has changed.
TEST_F(HostBellTest, DoesNotSleepIfItWasRungSinceItLooked) {
  const HostBell bell(view(0));
  const uint32_t before = bell.expect(hostBit(1));
  HostBell(view(1)).ringOthers();
  const auto begin = std::chrono::steady_clock::now();
  bell.sleep(before, seconds(30));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20));
}

TEST_F(HostBellTest, TheRankThatIsWaitedForWakesTheSleeper) {
  std::atomic<bool> woken{false};
  std::thread sleeper([&] {
    const HostBell bell(view(0));
    bell.sleep(bell.expect(hostBit(1)), seconds(30));
    bell.ignore();
    woken = true;
  });
  const auto begin = std::chrono::steady_clock::now();
  while (!woken) {
    HostBell(view(1)).ringOthers();
    std::this_thread::yield();
  }
  sleeper.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20));
}

} // namespace
} // namespace pycomm::testing
