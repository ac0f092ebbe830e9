#include "engine/loop/event_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "allocations.h"
#include "base/unique_fd.h"
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

// A group closes by tasks that it waits for, also if there is no memory.
TEST(EventLoop, ToRunATaskAndWaitForItTakesNoMemory) {
  EventLoop loop("test");
  std::vector<int> ran;
  ran.reserve(3);
  testing::failAllocation(1);
  for (int i = 0; i < 3; ++i) {
    loop.run([&] { ran.push_back(i); });
  }
  const bool allocated = testing::allocationFailed();
  testing::failAllocation(0);
  EXPECT_FALSE(allocated);
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2}));
}

TEST(EventLoop, ATaskThatIsWaitedForRunsAfterThoseBeforeItAndItsExceptionTravels) {
  EventLoop loop("test");
  for (int i = 0; i < 200; ++i) {
    std::atomic<bool> posted_ran{false};
    loop.post([&] { posted_ran = true; });
    EXPECT_THROW(
        loop.run([&] {
          EXPECT_TRUE(posted_ran);
          throw std::bad_alloc();
        }),
        std::bad_alloc);
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
          ++done;
          mine = true; // last: its caller may end this test
        });
        if (!loop.drive([&] { return mine.load(); }, Deadline::after(20000))) {
          loop.nudge();
          const Deadline deadline = Deadline::after(20000);
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
    std::atomic<bool> seen = false; // the loop's thread may find the descriptor ready again after the drive
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
    ASSERT_TRUE(loop.drive([&] { return handler.seen.load(); }, Deadline::after(10000)));
    EXPECT_TRUE(handler.seen.load());
    EXPECT_GT(looker.looks, 0);
    loop.run([&] {
      loop.unwatch(ready.get());
      loop.removeTicker(looker);
    });
  }
}

// What a driver waits for may be done by a task of another thread or at a deadline, in the middle of polling: it must not poll on, and then
// sleep, until something else happens.
TEST(EventLoop, ADriverSeesWhatATaskOrATickHasDone) {
  struct Worker final : Loop::Ticker {
    void onThrown(const std::exception_ptr&) noexcept override {}
    [[nodiscard]] TimePoint nextTick() const noexcept override {
      return by_tick && armed && !done ? TimePoint() : TimePoint::max();
    }
    void tick(TimePoint) noexcept override {
      done = true;
    }
    // Asked right before the loop runs what was posted.
    [[nodiscard]] bool pollShared() noexcept override {
      if (!by_tick && armed && !posted) {
        posted = true;
        loop->postQuietly([this] { done = true; });
      }
      return false;
    }
    EventLoop* loop = nullptr;
    bool by_tick = false;
    std::atomic<bool> armed = false;
    bool posted = false;
    std::atomic<bool> done = false;
  };
  for (const bool by_tick : {false, true}) {
    EventLoop loop("test");
    loop.setSpin(std::chrono::seconds(2));
    Worker worker;
    worker.loop = &loop;
    worker.by_tick = by_tick;
    loop.run([&] { loop.addTicker(worker); });
    const TimePoint begin = Clock::now();
    ASSERT_TRUE(loop.drive(
        [&] {
          const bool done = worker.done;
          worker.armed = true; // from now on, when nobody looks
          return done;
        },
        Deadline::after(10000)));
    EXPECT_TRUE(worker.done.load());
    EXPECT_WITHIN_MS(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count(), 1000);
    loop.run([&] { loop.removeTicker(worker); });
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

// A driver may leave behind a timer that is earlier than the end of the thread's sleep, with nothing under way.
TEST(EventLoop, KeepsATimerThatADriverHasSet) {
  EventLoop loop("test");
  Alarm alarm;
  loop.run([&] { loop.addTicker(alarm); });
  int late = 0;
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10)); // until the thread sleeps, for a second
    alarm.rang = false;
    const TimePoint began = Clock::now();
    const auto set = [&] {
      alarm.due = Clock::now() + std::chrono::milliseconds(40);
      return true;
    };
    while (!loop.drive(set, Deadline::after(10000))) {
      std::this_thread::yield();
    }
    while (!alarm.rang && Clock::now() - began < std::chrono::seconds(10)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(alarm.rang);
    late += Clock::now() - began > std::chrono::milliseconds(500) ? 1 : 0;
  }
  EXPECT_LT(late, 2); // a busy machine may stop a thread for that long, but not again and again
  loop.run([&] { loop.removeTicker(alarm); });
}

// A thread that sleeps until later than that would sit out the second that a loop sleeps at most.
TEST(EventLoop, KeepsADeadlineThatIsNewAndThatNobodyDrives) {
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

TEST(EventLoop, APollRunsWhatWasPostedQuietlyAndWakesNoThread) {
  EventLoop loop("test-polls");
  loop.run([] {});
  // Whether the poll itself ran it. If the loop's thread is in a round, that is left to the thread.
  const auto pollRuns = [&loop] {
    std::atomic<bool> ran{false};
    bool here = false;
    loop.postQuietly([&, caller = std::this_thread::get_id()] {
      here = std::this_thread::get_id() == caller;
      ran = true;
    });
    loop.poll();
    for (const Deadline most = Deadline::after(20000); !ran && !most.expired();) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(ran);
    return ran && here;
  };
  for (const Deadline most = Deadline::after(20000);
       !pollRuns() && !most.expired();) { // until its thread has gone to sleep
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const int64_t before = sleepsOf("test-polls");
  ASSERT_GE(before, 0);
  int here = 0;
  for (int i = 0; i < 200; ++i) {
    here += pollRuns() ? 1 : 0;
  }
  EXPECT_GT(here, 180);
  EXPECT_LT(sleepsOf("test-polls") - before, 20);
}

// The other operation has nobody who comes back for it, and it would wait for the next poll, or for the thread's grace after that.
TEST(EventLoop, APollForOneOfTwoOperationsLeavesTheOtherToTheThread) {
  EventLoop loop("test-two");
  loop.run([] {});
  loop.addBusy(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(50)); // its thread has gone to sleep
  const int64_t before = sleepsOf("test-two");
  ASSERT_GE(before, 0);
  for (int i = 0; i < 100; ++i) {
    loop.poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_LT(sleepsOf("test-two") - before, 20);
  loop.addBusy(1);
  int woken = 0;
  for (int i = 0; i < 20; ++i) {
    const int64_t slept = sleepsOf("test-two");
    loop.poll();
    bool wakes = false; // by itself it would wake after a second
    for (const Deadline most = Deadline::after(400); !wakes && !most.expired();) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      wakes = sleepsOf("test-two") > slept; // and it sleeps again
    }
    woken += wakes ? 1 : 0;
  }
  EXPECT_GE(woken, 15);
  loop.addBusy(-2);
}

// If another caller drives, that one runs it.
TEST(EventLoop, APollBesideADriverLeavesTheWorkToIt) {
  EventLoop loop("test");
  std::atomic<bool> driven{false};
  std::atomic<bool> ran{false};
  std::thread driver([&] {
    const auto done = [&] {
      driven = true;
      return ran.load();
    };
    EXPECT_TRUE(loop.drive(done, Deadline::after(20000)));
  });
  while (!driven) {
    std::this_thread::yield();
  }
  const TimePoint began = Clock::now();
  loop.postQuietly([&] { ran = true; });
  loop.poll();
  driver.join();
  EXPECT_TRUE(ran);
  EXPECT_WITHIN_MS(std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count(), 500);
}

TEST(EventLoop, PostAfterStopRunsHere) {
  EventLoop loop("test");
  loop.stop();
  bool ran = false;
  loop.post([&] { ran = true; });
  EXPECT_TRUE(ran);
}

} // namespace
} // namespace pycomm
