// A program with hundreds of groups ends in time, or its launcher kills it and the others report a death.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/ranks.h"
#include "within.h"

namespace pycomm::testing {
namespace {

TEST(EngineShutdown, ManyGroupsCloseAtTheSameTime) {
  constexpr int kGroups = 60; // one after the other they take 20 ms each at the least, on a busy machine longer
  constexpr int kAlone = 5;
  SharedStore store;
  std::atomic<int> joined{0};
  std::atomic<int> closed{0};
  int64_t took_ms[2] = {};
  int64_t alone_ms[2] = {}; // of those that are closed one after the other
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      Engine engine;
      std::vector<std::shared_ptr<Group>> groups;
      for (int i = 0; i < kGroups + kAlone; ++i) {
        Group::Config config = groupConfig(rank, 2, "group " + std::to_string(i));
        config.transport = Transport::Tcp;
        groups.push_back(Group::join(engine, store, config));
        const auto operation = groups.back()->start(barrierCall());
        EXPECT_TRUE(groups.back()->wait(*operation, Deadline::after(20000)));
      }
      waitForAll(joined, 2);
      const TimePoint first = Clock::now();
      for (int i = 0; i < kAlone; ++i) {
        groups[static_cast<size_t>(i)]->close();
      }
      alone_ms[rank] = elapsedMs(first);
      waitForAll(closed, 2);
      const TimePoint begin = Clock::now();
      EXPECT_TRUE(engine.shutdown(Deadline::after(20000)));
      took_ms[rank] = elapsedMs(begin);
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  const int64_t one_by_one_ms = std::max<int64_t>(kGroups * 20, std::max(alone_ms[0], alone_ms[1]) * kGroups / kAlone);
  EXPECT_WITHIN_MS(std::max(took_ms[0], took_ms[1]), one_by_one_ms / 2);
}

} // namespace
} // namespace pycomm::testing
