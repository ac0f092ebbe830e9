#include "engine/data/point_to_point.h"

#include <gtest/gtest.h>

#include "engine/data/transfer.h"

namespace pycomm::testing {
namespace {

constexpr uint32_t kGroup = 99;

/// The messages of one rank.
class Names {
 public:
  Names(int rank, int size, uint32_t group) : identity_(of(rank, size, group)) {}
  PointToPoint* operator->() {
    return &names_;
  }
  PointToPoint& operator*() {
    return names_;
  }

 private:
  static GroupIdentity of(int rank, int size, uint32_t group) {
    GroupIdentity identity;
    identity.rank = rank;
    identity.size = size;
    identity.hash = group;
    return identity;
  }
  const GroupIdentity identity_;
  Tables tables_{identity_, Limits()};
  PointToPoint names_{tables_};
};

PointToPoint::Name named(uint64_t id) {
  return {id << 1, static_cast<uint32_t>(id)};
}

TEST(PointToPoint, TheKthReceiveIsForTheKthSend) {
  Names sender(0, 3, kGroup);
  Names receiver(2, 3, kGroup);
  for (uint64_t k = 0; k < 6; ++k) {
    const PointToPoint::Name sent = sender->nameSend(2);
    EXPECT_EQ(sent.index, k);
    if (k % 2 == 0) { // the receive is posted before its message arrives, or after
      receiver->postReceive(k, 0, 7);
      EXPECT_EQ(receiver->waitingFor(0), 1U);
      EXPECT_TRUE(receiver->takeMatches().empty());
    }
    receiver->arrived(0, 7, sent);
    if (k % 2 == 1) {
      receiver->postReceive(k, 0, 7);
    }
    const auto matches = receiver->takeMatches();
    ASSERT_EQ(matches.size(), 1U);
    EXPECT_EQ(matches[0].ticket, k);
    EXPECT_EQ(matches[0].name.id, sent.id);
    EXPECT_EQ(matches[0].name.index, k);
    EXPECT_EQ(receiver->waitingFor(0), 0U);
  }
}

TEST(PointToPoint, NamesDifferByRankAndCount) {
  Names zero(0, 3, kGroup);
  Names one(1, 3, kGroup);
  Names elsewhere(0, 3, kGroup + 1);
  const uint64_t id = zero->nameSend(2).id;
  EXPECT_NE(id, zero->nameSend(2).id);
  EXPECT_NE(id, zero->nameSend(1).id);
  EXPECT_NE(id, one->nameSend(2).id);
  EXPECT_NE(id, elsewhere->nameSend(2).id);
}

TEST(PointToPoint, OnlyTheNameOfAMessageToThisRankIsOne) {
  Names sender(0, 3, kGroup);
  Names receiver(2, 3, kGroup);
  for (int k = 0; k < 3; ++k) {
    const PointToPoint::Name sent = sender->nameSend(2);
    for (const PointToPoint* const either : {&*sender, &*receiver}) {
      EXPECT_TRUE(either->isNameOf(0, 2, sent));
      EXPECT_FALSE(either->isNameOf(1, 2, sent)) << "another sender's";
      EXPECT_FALSE(either->isNameOf(0, 1, sent)) << "to another rank";
      EXPECT_FALSE(either->isNameOf(2, 0, sent)) << "the other way";
      EXPECT_FALSE(either->isNameOf(0, 2, {sent.id, sent.index + 1}));
      EXPECT_FALSE(either->isNameOf(0, 2, {sent.id ^ PointToPoint::kSelfBit, sent.index}));
    }
  }
  EXPECT_FALSE(receiver->isNameOf(0, 2, {9, 0})) << "a collective's";
  const PointToPoint::Name own = receiver->nameSend(2); // its receive's differs in one bit
  EXPECT_TRUE(receiver->isNameOf(2, 2, {own.id | PointToPoint::kSelfBit, own.index}));
  EXPECT_TRUE(receiver->isNameOf(2, 2, own));
  EXPECT_FALSE(receiver->isNameOf(2, 2, {own.id, own.index + 1}));
}

TEST(PointToPoint, AnyRankTakesWhatWasHeardFirst) {
  Names receiver(2, 4, kGroup);
  receiver->arrived(3, 7, named(30));
  receiver->arrived(1, 7, named(10));
  receiver->arrived(0, 8, named(1)); // another tag
  receiver->postReceive(10, PointToPoint::kAnyRank, 7);
  receiver->postReceive(11, PointToPoint::kAnyRank, 7);
  receiver->postReceive(12, PointToPoint::kAnyRank, 7);
  auto matches = receiver->takeMatches();
  ASSERT_EQ(matches.size(), 2U);
  EXPECT_EQ(matches[0].from, 3);
  EXPECT_EQ(matches[0].name.id, named(30).id);
  EXPECT_EQ(matches[1].from, 1);
  receiver->arrived(0, 7, named(2));
  matches = receiver->takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].ticket, 12U);
  EXPECT_EQ(matches[0].from, 0);
}

TEST(PointToPoint, MessagesOfOneSenderAndTagKeepTheirOrder) {
  Names receiver(2, 3, kGroup);
  for (uint64_t k = 0; k < 4; ++k) {
    receiver->arrived(0, 7, named(2 * k));
    receiver->arrived(0, 8, named(2 * k + 1));
  }
  for (uint64_t k = 0; k < 4; ++k) {
    receiver->postReceive(k, k % 2 == 0 ? 0 : PointToPoint::kAnyRank, 8);
    const auto matches = receiver->takeMatches();
    ASSERT_EQ(matches.size(), 1U);
    EXPECT_EQ(matches[0].name.id, named(2 * k + 1).id);
  }
}

TEST(PointToPoint, AReceiveFromOneRankDoesNotOvertakeOneFromAny) {
  Names receiver(2, 3, kGroup);
  receiver->postReceive(10, PointToPoint::kAnyRank, 7);
  receiver->postReceive(11, 0, 7);
  receiver->arrived(0, 7, named(1));
  auto matches = receiver->takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].ticket, 10U);
  receiver->arrived(1, 7, named(5)); // for nobody
  EXPECT_TRUE(receiver->takeMatches().empty());
  receiver->arrived(0, 7, named(2));
  matches = receiver->takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].ticket, 11U);
  EXPECT_EQ(matches[0].name.id, named(2).id);
}

TEST(PointToPoint, AReceiveFromOneRankIsNotKeptBackByOneFromAnother) {
  Names receiver(2, 3, kGroup);
  receiver->postReceive(10, 0, 7);
  receiver->postReceive(11, 1, 7);
  receiver->arrived(1, 7, named(5));
  const auto matches = receiver->takeMatches();
  ASSERT_EQ(matches.size(), 1U);
  EXPECT_EQ(matches[0].ticket, 11U);
  EXPECT_EQ(receiver->waitingUnder(7), (std::vector<std::pair<int, uint64_t>>{{0, 10}}));
  EXPECT_TRUE(receiver->waitingUnder(8).empty());
}

TEST(PointToPoint, KnowsWhatItHasSent) {
  Names sender(0, 3, kGroup);
  EXPECT_FALSE(sender->hasSent(2, 0));
  static_cast<void>(sender->nameSend(2));
  EXPECT_TRUE(sender->hasSent(2, 0));
  EXPECT_FALSE(sender->hasSent(2, 1));
  EXPECT_FALSE(sender->hasSent(1, 0));
}

// A program that uses the step as tag: what is kept does not grow with the tags that were ever used.
TEST(PointToPoint, ATagThatNobodyWaitsUnderCostsNothing) {
  Names receiver(1, 2, kGroup);
  for (uint32_t tag = 0; tag < 10000; ++tag) {
    receiver->postReceive(2 * tag, 0, tag);
    receiver->arrived(0, tag, named(2 * tag));
    receiver->arrived(0, tag, named(2 * tag + 1));
    receiver->postReceive(2 * tag + 1, PointToPoint::kAnyRank, tag);
    ASSERT_EQ(receiver->takeMatches().size(), 2U);
    ASSERT_EQ(receiver->tags(), 0U);
  }
}

TEST(PointToPoint, AMessageToOneselfHasTwoIds) {
  Names alone(0, 1, kGroup);
  const PointToPoint::Name sent = alone->nameSend(0);
  EXPECT_EQ(sent.id & PointToPoint::kSelfBit, 0U);
  EXPECT_NE(sent.id, PointToPoint::kAskId);
}

} // namespace
} // namespace pycomm::testing
