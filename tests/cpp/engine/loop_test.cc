#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/unique_fd.h"
#include "engine/callback_pool.h"
#include "engine/event_loop.h"
#include "engine/issue_context.h"

namespace pycomm {
namespace {

TEST(EventLoop, RunsTasksOfEachThreadInOrder) {
  EventLoop loop("test");
  std::vector<int> seen[4];
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        loop.post([&, t, i] { seen[t].push_back(i); });
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  loop.run([] {});
  for (const std::vector<int>& order : seen) {
    ASSERT_EQ(order.size(), 2000U);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  }
}

TEST(EventLoop, DriversAndTheThreadShareTheWork) {
  EventLoop loop("test");
  loop.setSpin(std::chrono::microseconds(20), false);
  std::atomic<int> done{0};
  std::atomic<bool> overlap{false};
  std::atomic<int> inside{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        std::atomic<bool> mine{false};
        loop.postQuietly([&] {
          overlap = overlap || inside.fetch_add(1) != 0;
          inside.fetch_sub(1);
          mine = true;
          ++done;
        });
        if (!loop.drive([&] { return mine.load(); }, Deadline::after(5000))) {
          loop.nudge();
          const Deadline deadline = Deadline::after(5000);
          while (!mine && !deadline.expired()) {
            std::this_thread::yield();
          }
        }
        ASSERT_TRUE(mine) << "lost at " << i;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(done, 1500);
  EXPECT_FALSE(overlap);
}

// A driver asks its tickers first, but what none of them looks for is seen, too, and not only when it has stopped polling.
TEST(EventLoop, WhoLooksForOneThingSeesTheOthers) {
  struct Looker final : Loop::Ticker {
    [[nodiscard]] TimePoint nextTick() const noexcept override {
      return TimePoint::max();
    }
    void tick(TimePoint) noexcept override {}
    [[nodiscard]] Look look() noexcept override {
      ++looks;
      return Look::NotYet;
    }
    int looks = 0;
  };
  struct Seen final : Loop::Handler {
    void onReady(uint32_t) noexcept override {
      seen = true;
    }
    bool seen = false;
  };
  for (const bool crowded : {false, true}) {
    EventLoop loop("test");
    loop.setSpin(std::chrono::seconds(20), crowded);
    Looker looker;
    Seen handler;
    const UniqueFd ready(::eventfd(1, EFD_CLOEXEC));
    loop.postQuietly([&] {
      loop.addTicker(looker);
      loop.watch(ready.get(), EPOLLIN, handler);
    });
    ASSERT_TRUE(loop.drive([&] { return handler.seen; }, Deadline::after(10000)));
    EXPECT_TRUE(handler.seen);
    EXPECT_GT(looker.looks, 0);
    loop.run([&] {
      loop.unwatch(ready.get());
      loop.removeTicker(looker);
    });
  }
}

// The thread is asleep, or in the middle of a round: then the task is left to it.
TEST(EventLoop, RunsATaskWhereItIsPosted) {
  EventLoop loop("test");
  int here = 0;
  for (int i = 0; i < 200; ++i) {
    std::atomic<bool> ran{false};
    loop.postHere(
        [&, caller = std::this_thread::get_id()] {
          here += std::this_thread::get_id() == caller ? 1 : 0;
          ran = true;
        },
        i % 2 == 0);
    for (const Deadline deadline = Deadline::after(10000); !ran && !deadline.expired();) {
      std::this_thread::yield();
    }
    ASSERT_TRUE(ran);
  }
  EXPECT_GT(here, 0);
}

// A thread that sleeps until later than that would sit out the second that a loop sleeps at most.
TEST(EventLoop, KeepsADeadlineThatIsNewAndThatNobodyDrives) {
  struct Alarm final : Loop::Ticker {
    [[nodiscard]] TimePoint nextTick() const noexcept override {
      return due;
    }
    void tick(TimePoint) noexcept override {
      due = TimePoint::max();
      rang = true;
    }
    TimePoint due = TimePoint::max();
    std::atomic<bool> rang{false};
  };
  for (const bool patient : {false, true}) {
    EventLoop loop("test");
    Alarm alarm;
    loop.run([&] { loop.addTicker(alarm); });
    int late = 0;
    for (int i = 0; i < 6; ++i) {
      alarm.rang = false;
      const TimePoint began = Clock::now();
      loop.postHere(
          [&] {
            loop.addBusy(1);
            alarm.due = Clock::now() + std::chrono::milliseconds(5);
          },
          patient);
      while (!alarm.rang && Clock::now() - began < std::chrono::seconds(10)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      ASSERT_TRUE(alarm.rang);
      late += Clock::now() - began > std::chrono::milliseconds(800) ? 1 : 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(4)); // until the thread sleeps again
      loop.addBusy(-1);
    }
    EXPECT_LT(late, 3) << patient; // a busy machine may stop a thread for that long, but not again and again
    loop.run([&] { loop.removeTicker(alarm); });
  }
}

TEST(EventLoop, PostAfterStopRunsHere) {
  EventLoop loop("test");
  loop.stop();
  bool ran = false;
  loop.post([&] { ran = true; });
  EXPECT_TRUE(ran);
}

// A callback that waits for a callback that waits … : a bounded pool would hang.
TEST(CallbackPool, GrowsWhenAllThreadsAreBlocked) {
  CallbackPool pool;
  std::atomic<int> depth{0};
  std::function<void(int)> nest = [&](int level) {
    if (level == 0) {
      return;
    }
    std::atomic<bool> inner{false};
    pool.submit([&, level] {
      nest(level - 1);
      ++depth;
      inner = true;
    });
    while (!inner) {
      std::this_thread::yield();
    }
  };
  nest(20);
  EXPECT_EQ(depth, 20);
  EXPECT_TRUE(pool.stop(Deadline::after(5000)));
}

TEST(OperationIds, AreEqualOnAllRanksHoweverThreadsInterleave) {
  std::atomic<int64_t> counter_a{0};
  std::atomic<int64_t> counter_b{0};
  const OperationId user_a = takeOperationId(counter_a, 1);
  const OperationId user_b = takeOperationId(counter_b, 1);
  EXPECT_EQ(user_a.id, user_b.id);

  // Rank a: the callback issues between the user's two operations; rank b: after both.
  uint64_t callback_a = 0;
  uint64_t callback_b = 0;
  {
    const IssueScope scope(callbackContext(nullptr, user_a.id, 1));
    callback_a = takeOperationId(counter_a, 1).id;
  }
  const uint64_t second_a = takeOperationId(counter_a, 1).id;
  const uint64_t second_b = takeOperationId(counter_b, 1).id;
  {
    const IssueScope scope(callbackContext(nullptr, user_b.id, 1));
    callback_b = takeOperationId(counter_b, 1).id;
    EXPECT_NE(takeOperationId(counter_b, 1).id, callback_b);
  }
  EXPECT_EQ(second_a, second_b);
  EXPECT_EQ(callback_a, callback_b);
  EXPECT_NE(callback_a & kDerivedIdBit, 0U);
}

TEST(OperationIds, AChainGoesOnInItsCallbacks) {
  std::atomic<int64_t> counter{0};
  const auto chain = std::make_shared<IssueContext>(IssueContext::Kind::Chain, 42);
  const IssueScope scope(chain);
  const uint64_t first = takeOperationId(counter, 1).id;
  EXPECT_EQ(callbackContext(chain, first, 1), chain);
  EXPECT_EQ(counter.load(), 0);
}

} // namespace
} // namespace pycomm
