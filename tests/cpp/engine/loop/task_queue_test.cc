#include "engine/loop/task_queue.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <thread>
#include <vector>

namespace pycomm {
namespace {

// How many copies of `held` are alive beside it.
long others(const std::shared_ptr<int>& held) {
  return held.use_count() - 1;
}

TEST(Task, HoldsSmallAndLargeClosuresAndLetsThemGoOnce) {
  const auto held = std::make_shared<int>(0);
  {
    Task small([held] { ++*held; });
    Task large([held, padding = std::array<char, 500>()] { *held += 10 + padding[0]; });
    Task only_moved([held, own = std::make_unique<int>(100)] { *held += *own; });
    EXPECT_EQ(others(held), 3);
    Task moved_small(std::move(small));
    Task moved_large(std::move(large));
    EXPECT_EQ(others(held), 3);
    moved_small();
    moved_large();
    only_moved();
  }
  EXPECT_EQ(*held, 111);
  EXPECT_EQ(others(held), 0);
}

TEST(TaskQueue, RunsInOrderAndLetsEachGoBeforeTheNext) {
  TaskQueue queue;
  EXPECT_TRUE(queue.empty());
  EXPECT_FALSE(queue.runAll());
  const auto held = std::make_shared<int>(0);
  std::vector<int> ran;
  queue.push([&ran, held] { ran.push_back(0); });
  queue.push([&] {
    ran.push_back(1);
    EXPECT_EQ(others(held), 0);
  });
  EXPECT_FALSE(queue.empty());
  EXPECT_TRUE(queue.runAll());
  EXPECT_TRUE(queue.empty());
  EXPECT_EQ(ran, (std::vector<int>{0, 1}));
}

TEST(TaskQueue, ATaskMayPutAnotherInAndRunIt) {
  TaskQueue queue;
  std::vector<int> ran;
  queue.push([&] {
    queue.push([&] { ran.push_back(0); });
    EXPECT_TRUE(queue.runAll());
    ran.push_back(1);
  });
  queue.push([&] { ran.push_back(2); });
  EXPECT_TRUE(queue.runAll());
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2}));
}

TEST(TaskQueue, KeepsTheOrderOfEachThread) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  TaskQueue queue;
  std::array<int, kThreads> next{};
  int wrong = 0;
  int ran = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kEach; ++i) {
        queue.push([&, thread, i] {
          wrong += next[static_cast<size_t>(thread)]++ == i ? 0 : 1;
          ++ran;
        });
      }
    });
  }
  while (ran < kThreads * kEach) {
    if (!queue.runAll()) {
      std::this_thread::yield();
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(queue.empty());
}

TEST(TaskQueue, DropsWhatNeverRan) {
  const auto held = std::make_shared<int>(0);
  {
    TaskQueue queue;
    queue.push([held] { FAIL(); });
    EXPECT_EQ(others(held), 1);
  }
  EXPECT_EQ(others(held), 0);
}

} // namespace
} // namespace pycomm
