#include "engine/links/ring_route.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "base/error.h"
#include "transport/memory/shared_arena.h"

namespace pycomm::testing {
namespace {

/// Rank 1 of 4; ranks 1 to 3 share its host.
class RingRouteTest : public ::testing::Test {
 protected:
  RingRouteTest() {
    identity_.rank = 1;
    identity_.size = 4;
    identity_.name = "test";
  }
  static HostRings rings() {
    HostRings rings;
    rings.ranks = {1, 2, 3};
    rings.arena = std::make_shared<SharedArena>(SharedArena::create(HostRings::totalNbytes(3)));
    return rings;
  }
  static OutFrame frameOf(uint64_t op_id) {
    OutFrame frame;
    frame.header.op_id = op_id;
    return frame;
  }

  std::optional<SharedLink::Rings> take(int peer) {
    return route.take(peer, used_[peer]);
  }

 private:
  GroupIdentity identity_;
  std::map<int, bool> used_;

 protected:
  RingRoute route{identity_};
};

TEST_F(RingRouteTest, FramesForRanksOfTheHostWaitForTheDecisionInOrder) {
  route.share(rings());
  EXPECT_TRUE(route.isUndecided(2));
  EXPECT_FALSE(route.isUndecided(0)) << "another host's rank";
  EXPECT_FALSE(take(2).has_value());
  route.keep(2, frameOf(5), true);
  route.keep(3, frameOf(6), false);
  const std::vector<RingRoute::Kept> kept = route.decide(true);
  ASSERT_EQ(kept.size(), 2U);
  EXPECT_EQ(kept[0].frame.header.op_id, 5U);
  EXPECT_TRUE(kept[0].needed);
  EXPECT_EQ(kept[1].peer, 3);
  EXPECT_FALSE(kept[1].needed);
  EXPECT_FALSE(route.isUndecided(2));
  EXPECT_TRUE(route.decide(true).empty()) << "they are handed out once";
}

TEST_F(RingRouteTest, DroppedFramesDoNotLeave) {
  route.share(rings());
  route.keep(2, frameOf(5), true);
  route.dropKept();
  EXPECT_TRUE(route.decide(true).empty());
}

TEST_F(RingRouteTest, EachRingServesOneLink) {
  route.share(rings());
  static_cast<void>(route.decide(true));
  EXPECT_TRUE(take(2).has_value());
  EXPECT_FALSE(take(2).has_value()) << "a second writer would begin to count anew";
  EXPECT_TRUE(take(3).has_value());
  EXPECT_FALSE(take(0).has_value()) << "another host's rank";
}

TEST_F(RingRouteTest, IfARankLacksTheMemoryAllGoOverTcp) {
  route.share(rings());
  static_cast<void>(route.decide(false));
  EXPECT_FALSE(route.isUndecided(2));
  EXPECT_FALSE(take(2).has_value());
}

TEST_F(RingRouteTest, ALinkFromARankThatSharesNoMemoryBreaksTheProtocol) {
  EXPECT_THROW(static_cast<void>(route.incoming(2)), Error);
  route.share(rings());
  static_cast<void>(route.incoming(2)); // before the decision as well: that rank may know it already
  for (const int peer : {0, 1}) {
    try {
      static_cast<void>(route.incoming(peer));
      ADD_FAILURE() << "rank " << peer;
    } catch (const Error& error) {
      EXPECT_EQ(error.record().code, ErrorCode::ProtocolViolation);
      EXPECT_NE(error.record().summary.find("rank " + std::to_string(peer)), std::string::npos);
    }
  }
}

} // namespace
} // namespace pycomm::testing
