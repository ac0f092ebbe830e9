#include "engine/point_to_point.h"

#include <gtest/gtest.h>

namespace pycomm::testing {
namespace {

constexpr uint32_t kGroup = 99;
constexpr int kAny = PointToPoint::kAnyRank;

TEST(PointToPoint, TheKthReceiveIsForTheKthSend) {
  PointToPoint sender(0, 3, kGroup);
  PointToPoint receiver(2, 3, kGroup);
  for (uint64_t k = 0; k < 5; ++k) {
    const PointToPoint::Name sent = sender.nameSend(2, 7);
    receiver.postReceive(k, 0, 7);
    const auto matches = receiver.takeMatches();
    ASSERT_EQ(matches.size(), 1U);
    EXPECT_EQ(matches[0].ticket, k);
    EXPECT_EQ(matches[0].name.id, sent.id);
    EXPECT_EQ(matches[0].name.index, k);
  }
}

TEST(PointToPoint, NamesDifferByRankTagAndCount) {
  PointToPoint zero(0, 3, kGroup);
  PointToPoint one(1, 3, kGroup);
  PointToPoint elsewhere(0, 3, kGroup + 1);
  const uint64_t id = zero.nameSend(2, 7).id;
  EXPECT_NE(id, zero.nameSend(2, 7).id);
  EXPECT_NE(id, zero.nameSend(2, 8).id);
  EXPECT_NE(id, zero.nameSend(1, 7).id);
  EXPECT_NE(id, one.nameSend(2, 7).id);
  EXPECT_NE(id, elsewhere.nameSend(2, 7).id);
}

TEST(PointToPoint, AnyRankTakesWhatWasHeardFirst) {
  PointToPoint receiver(2, 4, kGroup);
  receiver.heard(3, 7, 0);
  receiver.heard(1, 7, 0);
  receiver.heard(0, 8, 0); // another tag
  receiver.postReceive(10, kAny, 7);
  receiver.postReceive(11, kAny, 7);
  receiver.postReceive(12, kAny, 7);
  auto matches = receiver.takeMatches();
  ASSERT_EQ(matches.size(), 2U);
  EXPECT_EQ(matches[0].from, 3);
  EXPECT_EQ(matches[1].from, 1);
  receiver.heard(0, 7, 0);
  matches = receiver.takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].ticket, 12U);
  EXPECT_EQ(matches[0].from, 0);
}

TEST(PointToPoint, AnyRankWaitsForTheFirstOfASendersMessages) {
  PointToPoint receiver(2, 3, kGroup);
  receiver.postReceive(10, kAny, 7);
  receiver.heard(0, 7, 1); // small, and overtook the first on the wire
  EXPECT_TRUE(receiver.takeMatches().empty());
  receiver.heard(0, 7, 0);
  const auto matches = receiver.takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].name.index, 0U);
}

TEST(PointToPoint, AReceiveFromOneRankDoesNotOvertakeOneFromAny) {
  PointToPoint receiver(2, 3, kGroup);
  receiver.postReceive(10, kAny, 7);
  receiver.postReceive(11, 0, 7);
  receiver.postReceive(12, 0, 8); // another tag waits for nothing
  auto matches = receiver.takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].ticket, 12U);
  receiver.heard(0, 7, 0);
  matches = receiver.takeMatches();
  ASSERT_EQ(matches.size(), 2U);
  EXPECT_EQ(matches[0].ticket, 10U);
  EXPECT_EQ(matches[0].name.index, 0U);
  EXPECT_EQ(matches[1].ticket, 11U);
  EXPECT_EQ(matches[1].name.index, 1U);
}

TEST(PointToPoint, LateFramesArePast) {
  PointToPoint receiver(2, 3, kGroup);
  EXPECT_FALSE(receiver.isPast(false, 0, 7, 0));
  receiver.postReceive(10, 0, 7);
  EXPECT_TRUE(receiver.isPast(false, 0, 7, 0));
  receiver.heard(0, 7, 0); // of the message that is already matched: nobody's
  static_cast<void>(receiver.takeMatches());
  receiver.postReceive(11, kAny, 7);
  EXPECT_TRUE(receiver.takeMatches().empty());
}

TEST(PointToPoint, AMessageToOneselfHasTwoIds) {
  PointToPoint alone(0, 1, kGroup);
  const PointToPoint::Name sent = alone.nameSend(0, 7);
  alone.postReceive(10, 0, 7);
  const auto matches = alone.takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].name.id, sent.id ^ PointToPoint::kSelfBit);
}

} // namespace
} // namespace pycomm::testing
