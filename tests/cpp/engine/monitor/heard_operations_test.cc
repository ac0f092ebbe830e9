#include "engine/monitor/heard_operations.h"

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

class HeardOperationsTest : public ::testing::Test {
 protected:
  const Descriptor barrier = descriptorOf(Collective::Barrier);
  const Descriptor message = descriptorOf(Collective::Send);
  const TimePoint now = Clock::now();
  HeardOperations heard{2, 4};
};

TEST_F(HeardOperationsTest, KeepsEachRanksDescriptorUntilItIsTaken) {
  EXPECT_TRUE(heard.add(3, 7, barrier, now));
  EXPECT_TRUE(heard.add(1, 7, barrier, now + std::chrono::seconds(1)));
  heard.refused(1, 7);
  EXPECT_EQ(heard.ranks(7), (std::vector<int>{1, 3}));
  const HeardOperations::Heard taken = heard.take(7);
  EXPECT_EQ(taken.ranks.size(), 2U);
  EXPECT_EQ(taken.since, now);
  EXPECT_EQ(taken.last, now + std::chrono::seconds(1));
  EXPECT_EQ(taken.refused, std::set<int>{1});
  EXPECT_FALSE(heard.has(7));
  EXPECT_TRUE(heard.take(7).ranks.empty());
}

TEST_F(HeardOperationsTest, APeerMayNotContradictItself) {
  EXPECT_TRUE(heard.add(1, 7, barrier, now));
  EXPECT_TRUE(heard.add(1, 7, barrier, now));
  EXPECT_FALSE(heard.add(1, 7, descriptorOf(Collective::AllReduce), now));
  EXPECT_TRUE(heard.add(2, 7, descriptorOf(Collective::AllReduce), now)) << "two ranks may: this rank compares them";
}

TEST_F(HeardOperationsTest, EachPeerHasPlacesForCollectivesAndForMessages) {
  for (const uint64_t op_id : {1, 2}) {
    EXPECT_TRUE(heard.hasPlace(1, op_id, false));
    EXPECT_TRUE(heard.add(1, op_id, barrier, now));
  }
  EXPECT_FALSE(heard.hasPlace(1, 3, false));
  EXPECT_TRUE(heard.hasPlace(1, 2, false)) << "it is kept already";
  EXPECT_TRUE(heard.hasPlace(2, 3, false)) << "another peer's";
  EXPECT_TRUE(heard.hasPlace(1, 3, true)) << "messages have their own";
  static_cast<void>(heard.take(1));
  EXPECT_TRUE(heard.hasPlace(1, 3, false));
}

TEST_F(HeardOperationsTest, AQuestionForMessagesMakesAPlaceForOneMore) {
  for (const uint64_t op_id : {1, 2}) {
    EXPECT_TRUE(heard.add(1, op_id, message, now));
  }
  EXPECT_FALSE(heard.hasPlace(1, 3, true));
  heard.askedForMessages(1);
  EXPECT_TRUE(heard.hasPlace(1, 3, true));
  EXPECT_TRUE(heard.add(1, 3, message, now));
  EXPECT_FALSE(heard.hasPlace(1, 4, true));
}

TEST_F(HeardOperationsTest, AQuestionThatComesAgainMayBeAnsweredLateOnceMore) {
  EXPECT_TRUE(heard.add(1, 7, barrier, now));
  int visits = 0;
  const auto visit = [&](uint64_t op_id, HeardOperations::Heard& one, const Descriptor& theirs) {
    EXPECT_EQ(op_id, 7U);
    EXPECT_EQ(theirs.kind, Collective::Barrier);
    visits += one.answered_late.insert(1).second ? 1 : 0;
    return true;
  };
  heard.forEachOf(1, visit);
  heard.forEachOf(1, visit);
  heard.forEachOf(2, visit);
  EXPECT_EQ(visits, 1);
  EXPECT_TRUE(heard.add(1, 7, barrier, now));
  heard.forEachOf(1, visit);
  EXPECT_EQ(visits, 2);
}

} // namespace
} // namespace pycomm
