#include "engine/monitor/missing_neighbours.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace pycomm {
namespace {

TEST(MissingNeighbours, AreThoseWithoutALinkAtTheDeadline) {
  MissingNeighbours missing({1, 2, 4});
  missing.connected(2);
  missing.connected(3); // a bulk link's peer, say
  const AbortToken none;
  EXPECT_EQ(missing.wait(Deadline::after(1), none), (std::vector<int>{1, 4}));
}

TEST(MissingNeighbours, WaitEndsWhenTheLastHasConnectedOrTheGroupHasFailed) {
  const AbortToken none;
  MissingNeighbours missing({1});
  std::thread peer([&] { missing.connected(1); });
  EXPECT_TRUE(missing.wait(Deadline::after(60000), none).empty());
  peer.join();

  AbortToken abort;
  MissingNeighbours forever({1});
  std::thread failure([&] {
    (void)abort.abort(ErrorRecord());
    forever.failed();
  });
  const TimePoint begin = Clock::now();
  EXPECT_EQ(forever.wait(Deadline::after(60000), abort), std::vector<int>{1});
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
  failure.join();
}

} // namespace
} // namespace pycomm
