// LoopOwnership: the thread that runs a loop. event_loop_test.cc shows that no wake-up is lost while threads race.
#include "engine/loop/loop_ownership.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "base/deadline.h"
#include "within.h"

namespace pycomm {
namespace {

using std::chrono::seconds;

class Owned : public ::testing::Test {
 protected:
  bool signalled() {
    EpollSet::Ready ready;
    epoll_.wait(ready, 0);
    epoll_.handle(ready);
    return ready.count > 0;
  }
  /// Runs park() on a thread of its own.
  std::future<void> parked() {
    return std::async(std::launch::async, [this] { ownership_.park(stopping_); });
  }
  static bool endsSoon(const std::future<void>& future) {
    return future.wait_for(seconds(10)) == std::future_status::ready;
  }
  static bool goesOn(const std::future<void>& future) {
    return future.wait_for(std::chrono::milliseconds(30)) == std::future_status::timeout;
  }

  EpollSet epoll_;
  LoopOwnership ownership_{epoll_};
  std::atomic<bool> stopping_{false};
};

TEST_F(Owned, OneCallerAtATime) {
  ASSERT_TRUE(ownership_.take());
  EXPECT_FALSE(ownership_.take());
  EXPECT_FALSE(ownership_.takeIfFree());
  ownership_.release();
  EXPECT_TRUE(ownership_.takeIfFree());
  EXPECT_FALSE(ownership_.take());
  ownership_.release();
}

TEST_F(Owned, TheOwnThreadHasNoRoundWhileACallerOwnsIt) {
  bool ran = false;
  ownership_.runRound([&] { ran = true; });
  EXPECT_TRUE(ran);
  ASSERT_TRUE(ownership_.take());
  ran = false;
  std::future<void> round = std::async(std::launch::async, [&] { ownership_.runRound([&] { ran = true; }); });
  EXPECT_TRUE(goesOn(round)); // it waits for the caller
  ownership_.release();
  EXPECT_TRUE(endsSoon(round));
}

TEST_F(Owned, ACallerWaitsForARoundUnlessItWantsNot) {
  std::promise<void> in_round;
  std::promise<void> go_on;
  std::thread own([&] {
    ownership_.runRound([&] {
      in_round.set_value();
      go_on.get_future().wait();
    });
  });
  in_round.get_future().wait();
  EXPECT_FALSE(ownership_.takeIfFree());
  std::future<bool> taken = std::async(std::launch::async, [&] { return ownership_.take(); });
  EXPECT_EQ(taken.wait_for(std::chrono::milliseconds(30)), std::future_status::timeout);
  go_on.set_value();
  ASSERT_EQ(taken.wait_for(seconds(10)), std::future_status::ready);
  EXPECT_TRUE(taken.get());
  own.join();
  EXPECT_FALSE(ownership_.takeIfFree()); // the other thread has it
}

TEST_F(Owned, WakesTheOwnerAndOnlyIfItSleeps) {
  ownership_.wakeOwner(); // the own thread is awake
  EXPECT_FALSE(signalled());
  ownership_.setThreadSleeps(true);
  ownership_.wakeOwner();
  EXPECT_TRUE(signalled());

  ASSERT_TRUE(ownership_.takeIfFree());
  ownership_.wakeOwner(); // the driver is awake, and the own thread is not asked
  EXPECT_FALSE(signalled());
  ownership_.setDriverSleeps(true);
  ownership_.wakeOwner();
  EXPECT_TRUE(signalled());
  ownership_.release();
}

TEST_F(Owned, TheOwnThreadIsParkedWhileACallerDrives) {
  std::future<void> free = parked();
  EXPECT_TRUE(endsSoon(free)); // nobody drives
  ASSERT_TRUE(ownership_.take());
  std::future<void> park = parked();
  EXPECT_TRUE(goesOn(park));
  ownership_.release();
  EXPECT_TRUE(endsSoon(park));
}

// A drive of tens of milliseconds: the thread has gone to sleep until it is notified, which must come well before its bound of a second.
TEST_F(Owned, TheEndOfALongDriveIsNotified) {
  ASSERT_TRUE(ownership_.take());
  std::future<void> park = parked();
  EXPECT_TRUE(goesOn(park));
  const TimePoint began = Clock::now();
  ownership_.release();
  EXPECT_TRUE(endsSoon(park));
  EXPECT_WITHIN_MS(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count(), 500);
}

TEST_F(Owned, WorkThatNobodyDrivesEndsThePark) {
  ASSERT_TRUE(ownership_.take());
  std::future<void> park = parked();
  EXPECT_TRUE(goesOn(park));
  ownership_.wakeThread();
  EXPECT_TRUE(endsSoon(park));
  EXPECT_TRUE(signalled()); // a thread in EpollSet::sleep() would wake, too
  ownership_.release();
}

TEST_F(Owned, AThreadThatIsWokenBeforeItParksDoesNotPark) {
  ASSERT_TRUE(ownership_.take());
  ownership_.wakeThread();
  EXPECT_TRUE(endsSoon(parked()));
  std::future<void> next = parked();
  EXPECT_TRUE(goesOn(next)) << "a wake-up is for one round";
  ownership_.release();
  EXPECT_TRUE(endsSoon(next));
}

} // namespace
} // namespace pycomm
