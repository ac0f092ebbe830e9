#include "engine/monitor/unexpected_operations.h"

#include <gtest/gtest.h>

#include <chrono>

namespace pycomm {
namespace {

Descriptor descriptorOf(Collective kind, int64_t numel = 0) {
  Descriptor descriptor;
  descriptor.kind = kind;
  descriptor.numel = numel;
  return descriptor;
}

class UnexpectedOperationsTest : public ::testing::Test {
 protected:
  const Descriptor barrier = descriptorOf(Collective::Barrier);
  const Descriptor message = descriptorOf(Collective::Send);
  const TimePoint now = Clock::now();
  UnexpectedOperations unexpected{2, 4};
};

TEST_F(UnexpectedOperationsTest, KeepsEachRanksDescriptorUntilItIsTaken) {
  EXPECT_TRUE(unexpected.add(3, 7, barrier, now));
  EXPECT_TRUE(unexpected.add(1, 7, barrier, now + std::chrono::seconds(1)));
  unexpected.refused(1, 7);
  EXPECT_EQ(unexpected.ranks(7), (std::vector<int>{1, 3}));
  const UnexpectedOperations::Entry taken = unexpected.take(7);
  EXPECT_EQ(taken.ranks.size(), 2U);
  EXPECT_EQ(taken.since, now);
  EXPECT_EQ(taken.last, now + std::chrono::seconds(1));
  EXPECT_EQ(taken.refused, std::set<int>{1});
  EXPECT_FALSE(unexpected.has(7));
  EXPECT_TRUE(unexpected.take(7).ranks.empty());
}

TEST_F(UnexpectedOperationsTest, APeerMayNotContradictItself) {
  EXPECT_TRUE(unexpected.add(1, 7, barrier, now));
  EXPECT_TRUE(unexpected.add(1, 7, barrier, now));
  EXPECT_FALSE(unexpected.add(1, 7, descriptorOf(Collective::AllReduce), now));
  EXPECT_TRUE(unexpected.add(2, 7, descriptorOf(Collective::AllReduce), now))
      << "two ranks may: this rank compares them";
}

TEST_F(UnexpectedOperationsTest, EachPeerHasPlacesForCollectivesAndForMessages) {
  for (const uint64_t op_id : {1, 2}) {
    EXPECT_TRUE(unexpected.hasPlace(1, op_id, false));
    EXPECT_TRUE(unexpected.add(1, op_id, barrier, now));
  }
  EXPECT_FALSE(unexpected.hasPlace(1, 3, false));
  EXPECT_TRUE(unexpected.hasPlace(1, 2, false)) << "it is kept already";
  EXPECT_TRUE(unexpected.hasPlace(2, 3, false)) << "another peer's";
  EXPECT_TRUE(unexpected.hasPlace(1, 3, true)) << "messages have their own";
  static_cast<void>(unexpected.take(1));
  EXPECT_TRUE(unexpected.hasPlace(1, 3, false));
}

TEST_F(UnexpectedOperationsTest, AQuestionForMessagesMakesAPlaceForOneMore) {
  for (const uint64_t op_id : {1, 2}) {
    EXPECT_TRUE(unexpected.add(1, op_id, message, now));
  }
  EXPECT_FALSE(unexpected.hasPlace(1, 3, true));
  unexpected.askedForMessages(1);
  EXPECT_TRUE(unexpected.hasPlace(1, 3, true));
  EXPECT_TRUE(unexpected.add(1, 3, message, now));
  EXPECT_FALSE(unexpected.hasPlace(1, 4, true));
}

TEST_F(UnexpectedOperationsTest, AQuestionThatComesAgainMayBeAnsweredLateOnceMore) {
  EXPECT_TRUE(unexpected.add(1, 7, barrier, now));
  int visits = 0;
  const auto visit = [&](uint64_t op_id, UnexpectedOperations::Entry& one, const Descriptor& theirs) {
    EXPECT_EQ(op_id, 7U);
    EXPECT_EQ(theirs.kind, Collective::Barrier);
    visits += one.answered_late.insert(1).second ? 1 : 0;
    return true;
  };
  unexpected.forEachOf(1, visit);
  unexpected.forEachOf(1, visit);
  unexpected.forEachOf(2, visit);
  EXPECT_EQ(visits, 1);
  EXPECT_TRUE(unexpected.add(1, 7, barrier, now));
  unexpected.forEachOf(1, visit);
  EXPECT_EQ(visits, 2);
}

} // namespace
} // namespace pycomm
