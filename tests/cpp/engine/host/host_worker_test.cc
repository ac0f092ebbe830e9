#include "engine/host/host_worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

namespace pycomm {
namespace {

constexpr std::chrono::seconds kSoon{20};

TEST(HostWorker, WorkRunsAfterAWakeAndAgainWhileItAsksForThat) {
  std::atomic<int> runs{0};
  std::promise<void> third;
  HostWorker worker([&] {
    if (++runs == 3) {
      third.set_value();
    }
    return runs < 3;
  });
  EXPECT_EQ(runs, 0);
  worker.wake([] {});
  EXPECT_EQ(third.get_future().wait_for(kSoon), std::future_status::ready);
  worker.stop();
  EXPECT_EQ(runs, 3);
}

TEST(HostWorker, ATaskThatWasTakenRunsAlthoughStopComesFirst) {
  std::promise<void> begun;
  std::promise<void> go_on;
  std::atomic<bool> second{false};
  HostWorker worker([] { return false; });
  ASSERT_TRUE(worker.run([&] {
    begun.set_value();
    go_on.get_future().wait_for(kSoon);
  }));
  ASSERT_EQ(begun.get_future().wait_for(kSoon), std::future_status::ready);
  ASSERT_TRUE(worker.run([&] { second = true; }));
  const std::future<void> stopping = std::async(std::launch::async, [&] { worker.stop(); });
  while (worker.run([] {})) { // until stop() has begun
    std::this_thread::yield();
  }
  go_on.set_value();
  stopping.wait_for(kSoon);
  EXPECT_TRUE(second);
}

TEST(HostWorker, AfterStopNothingIsTaken) {
  std::atomic<int> runs{0};
  HostWorker worker([&] {
    ++runs;
    return false;
  });
  worker.stop();
  worker.stop();
  worker.wake([] {});
  EXPECT_FALSE(worker.run([&] { ++runs; }));
  EXPECT_EQ(runs, 0);
}

} // namespace
} // namespace pycomm
