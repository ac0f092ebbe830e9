#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "engine/loop/callback_pool.h"
#include "engine/loop/event_loop.h"
#include "engine/operation/issue_context.h"
#include "transport/process.h"
#include "within.h"

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

TEST(EventLoop, GivesWhatItsTasksTickersAndHandlersThrowToTheirOwners) {
  struct Thrower final : Loop::Handler, Loop::Ticker {
    void onThrown(const std::exception_ptr& exception) noexcept override {
      try {
        std::rethrow_exception(exception);
      } catch (const std::bad_alloc&) {
        ++thrown;
      } catch (...) {
        thrown += 1000;
      }
    }
    void onReady(uint32_t) override {
      loop->unwatch(fd);
      throw std::bad_alloc();
    }
    [[nodiscard]] TimePoint nextTick() const noexcept override {
      return next;
    }
    void tick(TimePoint) override {
      next = TimePoint::max();
      throw std::bad_alloc();
    }
    [[nodiscard]] bool pollShared() override {
      if (std::exchange(polls, false)) {
        throw std::bad_alloc();
      }
      return false;
    }

    EventLoop* loop = nullptr;
    int fd = -1;
    TimePoint next = TimePoint::min();
    bool polls = true;
    std::atomic<int> thrown{0};
  };
  const UniqueFd readable(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
  EventLoop loop("test");
  Thrower thrower;
  thrower.loop = &loop;
  thrower.fd = readable.get();
  Loop::Handler& owner = thrower;
  loop.post(Loop::owned(owner, [] { throw std::bad_alloc(); }));
  loop.post([] { throw std::bad_alloc(); }); // nobody's: logged
  int ran = 0;
  loop.post([&] { ++ran; }); // in the same batch
  loop.run([&] {
    loop.addTicker(thrower);
    loop.watch(readable.get(), EPOLLIN, thrower);
  });
  for (const Deadline most = Deadline::after(10000); thrower.thrown < 4 && !most.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  loop.run([&] { loop.removeTicker(thrower); });
  EXPECT_EQ(thrower.thrown, 4);
  EXPECT_EQ(ran, 1);
}

TEST(EventLoop, DriversAndTheThreadShareTheWork) {
  EventLoop loop("test");
  loop.setSpin(std::chrono::microseconds(20));
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
    void onThrown(const std::exception_ptr&) noexcept override {}
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
    void onThrown(const std::exception_ptr&) noexcept override {}
    void onReady(uint32_t) noexcept override {
      seen = true;
    }
    bool seen = false;
  };
  for (const bool crowded : {false, true}) {
    EventLoop loop("test");
    loop.setSpin(std::chrono::seconds(20));
    loop.addCrowded(crowded ? 1 : 0);
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
    void onThrown(const std::exception_ptr&) noexcept override {}
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

/// How often a thread of this process has gone to sleep.
int64_t sleepsOf(const std::string& thread_name) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name;
    if (name != thread_name) {
      continue;
    }
    std::ifstream status(entry.path() / "status");
    for (std::string word; status >> word;) {
      if (word == "voluntary_ctxt_switches:") {
        int64_t sleeps = -1;
        status >> sleeps;
        return sleeps;
      }
    }
  }
  return -1;
}

TEST(EventLoop, TheThreadSleepsWhileACallerDrivesForLong) {
  EventLoop loop("test-sleeps");
  loop.run([] {});
  const int64_t before = sleepsOf("test-sleeps");
  ASSERT_GE(before, 0);
  std::atomic<bool> driven{false};
  std::thread other([&] {
    while (!driven) {
      std::this_thread::yield();
    }
    loop.post([] {}); // wakes the driver, and the loop's thread with it
  });
  const auto never = [&] {
    driven = true;
    return false;
  };
  EXPECT_TRUE(loop.drive(never, Deadline::after(1000)));
  other.join();
  EXPECT_LT(sleepsOf("test-sleeps") - before, 30);
  // And it takes over when the driver has left.
  std::atomic<bool> ran{false};
  const TimePoint left = Clock::now();
  loop.postQuietly([&] { ran = true; });
  while (!ran && Clock::now() - left < std::chrono::seconds(10)) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(ran);
  // A quiet task wakes nobody. If this thread was held up for longer than the grace of 1 ms, the loop's thread sleeps by then, for up to 1 s.
  EXPECT_WITHIN_MS(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - left).count(), 1200);
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

// A task that writes a file says afterwards where it is, by another task.
TEST(CallbackPool, StopRunsWhatItsLastTasksSubmit) {
  CallbackPool pool;
  std::atomic<int> ran{0};
  pool.submit([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100)); // stop() has begun meanwhile
    pool.submit([&] { pool.submit([&] { ++ran; }); });
  });
  EXPECT_TRUE(pool.stop(Deadline::after(5000)));
  EXPECT_EQ(ran, 1);
  pool.submit([&] { ++ran; });
  EXPECT_EQ(ran, 1) << "no thread is there to run it";
}

int threadsNamed(const std::string& thread_name) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(entry.path() / "comm") >> name; // empty if the thread has just ended
    count += name == thread_name ? 1 : 0;
  }
  return count;
}

TEST(CallbackPool, ABurstMakesNoThreadForEachTask) {
  CallbackPool pool;
  std::atomic<int> ran{0};
  const TimePoint began = Clock::now();
  for (int i = 0; i < 10000; ++i) {
    pool.submit([&] { ++ran; });
  }
  while (ran < 10000 && Clock::now() - began < std::chrono::seconds(20)) {
    std::this_thread::yield();
  }
  EXPECT_EQ(ran, 10000);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
  // Five at once; then one more only after none has taken a task for 5 ms, whatever else the machine does.
  EXPECT_LE(threadsNamed("pycomm-callback"), 5 + ms / 5) << "in " << ms << " ms";
  EXPECT_TRUE(pool.stop(Deadline::after(5000)));
}

TEST(CallbackPool, ABurstBehindCallbacksThatBlockMakesFewThreads) {
  CallbackPool pool;
  std::atomic<int> ran{0};
  std::promise<void> open;
  const std::shared_future<void> opened = open.get_future().share();
  const TimePoint began = Clock::now();
  for (int i = 0; i < 1000; ++i) {
    pool.submit([&] { // as those that wait for Python's lock
      opened.wait();
      ++ran;
    });
  }
  while (Clock::now() - began < std::chrono::milliseconds(300)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
  const int threads = threadsNamed("pycomm-callback");
  open.set_value();
  EXPECT_GT(threads, 5);
  int bound = 5; // a thread waits 5 ms longer than the one before it, but no longer than 50
  for (int64_t wait = 5, spent = 5; spent <= ms; wait = std::min<int64_t>(wait + 5, 50), spent += wait) {
    ++bound;
  }
  EXPECT_LE(threads, bound) << "in " << ms << " ms";
  while (ran < 1000 && Clock::now() - began < std::chrono::seconds(20)) {
    std::this_thread::yield();
  }
  EXPECT_EQ(ran, 1000);
  EXPECT_TRUE(pool.stop(Deadline::after(5000)));
}

/// Runs `body` in a child that may have no more threads than it has. False if this process may not arrange that.
bool withoutMoreThreads(const std::function<bool(const std::function<void()>& limit)>& body, bool& good) {
  if (::geteuid() != 0) {
    return false;
  }
  testing::Process child([&] {
    return body([] {
      // The kernel counts by user, and not at all for root.
      constexpr uid_t kNobodyElse = 61234;
      const rlimit none{0, 0};
      if (::setrlimit(RLIMIT_NPROC, &none) != 0 || ::setresuid(kNobodyElse, kNobodyElse, kNobodyElse) != 0) {
        throw std::runtime_error("the child cannot give up its rights");
      }
    });
  });
  good = child.join(20000);
  return true;
}

std::string blockedSignals() {
  sigset_t now;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &now);
  std::string text;
  for (int signal = 1; signal < 32; ++signal) {
    text.push_back(::sigismember(&now, signal) == 1 ? '1' : '0');
  }
  return text;
}

TEST(CallbackPool, WithoutMoreThreadsTasksRunAllTheSame) {
  bool good = false;
  const bool tried = withoutMoreThreads(
      [](const std::function<void()>& limit) {
        CallbackPool pool;
        limit();
        const std::string before = blockedSignals();
        std::atomic<int> ran{0};
        for (int i = 0; i < 100; ++i) {
          pool.submit([&] { ++ran; });
        }
        for (const Deadline deadline = Deadline::after(10000); ran < 100 && !deadline.expired();) {
          std::this_thread::yield();
        }
        const bool all_ran = ran == 100;
        const bool stopped = pool.stop(Deadline::after(5000));
        std::fprintf(stderr, "%d ran, stopped: %d\n", ran.load(), stopped ? 1 : 0);
        return all_ran && stopped && blockedSignals() == before;
      },
      good);
  if (!tried) {
    GTEST_SKIP() << "only root can become a user with a limit of its own";
  }
  EXPECT_TRUE(good);
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
