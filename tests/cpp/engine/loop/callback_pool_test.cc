#include "engine/loop/callback_pool.h"

#include <gtest/gtest.h>
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
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "allocations.h"
#include "transport/process.h"

namespace pycomm {
namespace {

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
  EXPECT_TRUE(pool.stop(Deadline::after(20000)));
}

// A task that writes a file says afterwards where it is, by another task.
TEST(CallbackPool, StopRunsWhatItsLastTasksSubmit) {
  CallbackPool pool;
  std::atomic<int> ran{0};
  pool.submit([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100)); // stop() has begun meanwhile
    pool.submit([&] { pool.submit([&] { ++ran; }); });
  });
  EXPECT_TRUE(pool.stop(Deadline::after(20000)));
  EXPECT_EQ(ran, 1);
  pool.submit([&] { ++ran; });
  EXPECT_EQ(ran, 1) << "no thread is there to run it";
}

// A daemon thread of the program's that comes with a callback when the pool has stopped.
TEST(CallbackPool, CloseWaitsForATaskThatRunsOnItsCallersThread) {
  CallbackPool pool;
  ASSERT_TRUE(pool.stop(Deadline::after(20000)));
  std::promise<void> begun;
  std::promise<void> end;
  std::atomic<bool> owned{false};
  std::thread caller([&] {
    CallbackPool::Placed task([&] {
      owned = CallbackPool::ownsThisThread();
      begun.set_value();
      end.get_future().wait();
    });
    pool.submitOrRun(task);
  });
  begun.get_future().wait();
  EXPECT_TRUE(owned);
  EXPECT_FALSE(pool.stop(Deadline::after(10))) << "it has not returned";
  EXPECT_FALSE(pool.close(Deadline::after(10)));
  end.set_value();
  EXPECT_TRUE(pool.close(Deadline::after(20000)));
  caller.join();
  EXPECT_FALSE(CallbackPool::ownsThisThread());
  CallbackPool::Placed late([&] { owned = CallbackPool::ownsThisThread(); });
  pool.submitOrRun(late);
  EXPECT_FALSE(owned) << "no pool waits for it any more";
  EXPECT_TRUE(pool.stop(Deadline::after(0)));
}

TEST(CallbackPool, TakesATaskThatHasItsPlaceWithoutMemory) {
  CallbackPool pool;
  std::atomic<int> ran{0};
  std::vector<CallbackPool::Placed> tasks;
  for (int i = 0; i < 1000; ++i) {
    tasks.emplace_back([&] { ++ran; });
  }
  testing::failAllocation(1);
  for (CallbackPool::Placed& task : tasks) {
    EXPECT_TRUE(pool.submit(task));
  }
  EXPECT_FALSE(testing::allocationFailed());
  testing::failAllocation(0);
  EXPECT_TRUE(pool.stop(Deadline::after(20000)));
  EXPECT_EQ(ran, 1000);
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

/// A thread that was joined is listed a moment longer, until the kernel has had a core for it.
void waitUntilNoneIsNamed(const std::string& thread_name) {
  for (const Deadline most = Deadline::after(20000); threadsNamed(thread_name) > 0 && !most.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(threadsNamed(thread_name), 0) << "of an earlier test";
}

TEST(CallbackPool, ABurstMakesNoThreadForEachTask) {
  waitUntilNoneIsNamed("pycomm-callback");
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
  EXPECT_TRUE(pool.stop(Deadline::after(20000)));
}

TEST(CallbackPool, ABurstBehindCallbacksThatBlockMakesFewThreads) {
  waitUntilNoneIsNamed("pycomm-callback");
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
  const int threads = threadsNamed("pycomm-callback");
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
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
  EXPECT_TRUE(pool.stop(Deadline::after(20000)));
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
  good = child.join();
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
        const bool stopped = pool.stop(Deadline::after(20000));
        std::fprintf(stderr, "%d ran, stopped: %d\n", ran.load(), stopped ? 1 : 0);
        return all_ran && stopped && blockedSignals() == before;
      },
      good);
  if (!tried) {
    GTEST_SKIP() << "only root can become a user with a limit of its own";
  }
  EXPECT_TRUE(good);
}

} // namespace
} // namespace pycomm
