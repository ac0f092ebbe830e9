// Operations that only other ranks have entered: what is kept of them, and how much.
#include <gtest/gtest.h>

#include <chrono>
#include <new>
#include <string>

#include "allocations.h"
#include "engine/data/rank_tables.h"
#include "engine/data/usage.h"

namespace pycomm::testing {
namespace {

FrameHeader headerOf(uint64_t op_id, Collective kind) {
  Descriptor descriptor;
  descriptor.kind = kind;
  FrameHeader header;
  header.type = FrameType::Waiting;
  header.op_id = op_id;
  descriptor.writeTo(header);
  return header;
}

class UnexpectedTest : public ::testing::Test {
 protected:
  static RankTables::Config twoPlaces() {
    RankTables::Config config;
    config.size = 4;
    config.hosts.resize(4);
    config.eager_pool_nbytes = 2 * config.frame_nbytes;
    config.max_ahead = 0;
    return config;
  }
  [[nodiscard]] bool keep(int peer, uint64_t op_id, Collective kind = Collective::Barrier) {
    return rank.keepUnexpected(peer, headerOf(op_id, kind), now);
  }
  [[nodiscard]] bool hasPlace(int peer, uint64_t op_id, bool message) const {
    return matching::hasPlace(rank.tables, peer, op_id, message);
  }
  void enter(uint64_t op_id) {
    Descriptor descriptor;
    rank.posted(OperationId{op_id, static_cast<int64_t>(op_id)}, descriptor, PreparedSchedule(), now);
  }

  TimePoint now = Clock::now();
  RankTables rank{twoPlaces()};
};

TEST_F(UnexpectedTest, AReportNamesTheFirstOperation) {
  EXPECT_TRUE(keep(3, 7));
  EXPECT_TRUE(keep(2, 7));
  EXPECT_TRUE(keep(1, kDerivedIdBit | 5, Collective::AllReduce));
  Usage usage;
  usage.tables = rank.usage();
  EXPECT_EQ(
      heldText(usage),
      "unexpected operations: 2 (the first is counted operation 7, barrier, of rank 2, 0 frames), "
      "places of unexpected operations: 3");
  enter(7);
  rank.asked(1, headerOf(kDerivedIdBit | 5, Collective::AllReduce), now);
  usage.tables = rank.usage();
  EXPECT_NE(
      heldText(usage).find("(the first is derived operation 5, all_reduce, of rank 1, 0 frames, answered)"),
      std::string::npos)
      << heldText(usage);
}

TEST_F(UnexpectedTest, EachRanksDescriptorIsKeptUntilTheOperationIsEntered) {
  const TimePoint first = now;
  EXPECT_TRUE(keep(3, 7));
  now += std::chrono::seconds(1);
  rank.asked(1, headerOf(7, Collective::Barrier), now);
  const UnexpectedRow* const kept = rank.tables.findUnexpected(7);
  ASSERT_NE(kept, nullptr);
  EXPECT_EQ(kept->peers.size(), 2U);
  EXPECT_EQ(kept->since, first);
  EXPECT_EQ(kept->last, now);
  EXPECT_TRUE(kept->peers.at(1).refused);
  EXPECT_FALSE(kept->peers.at(3).refused);
  enter(7);
  EXPECT_FALSE(rank.isUnexpected(7));
  EXPECT_EQ(rank.usage().places_taken, 0U);
  EXPECT_EQ(rank.tables.find(7)->came, (std::set<int>{1, 3}));
}

TEST_F(UnexpectedTest, WithoutMemoryNothingIsKept) {
  bool threw = true;
  int strikes = 0;
  for (int64_t nth = 1; threw; ++nth) {
    ASSERT_LT(nth, 100);
    threw = throwsWithoutMemory(nth, [&] { EXPECT_TRUE(keep(3, 7)); });
    strikes += threw ? 1 : 0;
    EXPECT_EQ(rank.usage().unexpected, threw ? 0U : 1U) << nth;
    EXPECT_EQ(rank.usage().places_taken, threw ? 0U : 1U) << nth;
  }
  EXPECT_GE(strikes, 2);
}

TEST(UnexpectedCredit, CountsUntilTheOperationIsEntered) {
  RankTables::Config config;
  config.size = 2;
  config.hosts.resize(2);
  RankTables rank(config);
  EXPECT_EQ(rank.granted(7, 1, 100), nullptr);
  EXPECT_EQ(rank.usage().credited_unexpected, 1U);
  rank.posted(OperationId{7, 7}, Descriptor(), PreparedSchedule(), Clock::now());
  EXPECT_EQ(rank.usage().credited_unexpected, 0U);
}

TEST_F(UnexpectedTest, APeerMayNotContradictItself) {
  EXPECT_TRUE(keep(1, 7));
  EXPECT_TRUE(keep(1, 7));
  EXPECT_TRUE(keep(2, 7, Collective::AllReduce)) << "two ranks may: this rank compares them";
  EXPECT_FALSE(rank.failed());
  EXPECT_FALSE(keep(1, 7, Collective::AllReduce));
  EXPECT_TRUE(rank.failed());
}

TEST_F(UnexpectedTest, EachPeerHasPlacesForCollectivesAndForMessages) {
  for (const uint64_t op_id : {1, 2}) {
    EXPECT_TRUE(hasPlace(1, op_id, false));
    EXPECT_TRUE(keep(1, op_id));
  }
  EXPECT_FALSE(hasPlace(1, 3, false));
  EXPECT_TRUE(hasPlace(1, 2, false)) << "it is kept already";
  EXPECT_TRUE(hasPlace(2, 3, false)) << "another peer's";
  EXPECT_TRUE(hasPlace(1, 3, true)) << "messages have their own";
  enter(1);
  EXPECT_TRUE(hasPlace(1, 3, false));
}

TEST_F(UnexpectedTest, AQuestionForMessagesMakesAPlaceForOneMore) {
  for (const uint64_t op_id : {1, 2}) {
    EXPECT_TRUE(keep(1, op_id, Collective::Send));
  }
  EXPECT_FALSE(hasPlace(1, 3, true));
  rank.asked(1);
  EXPECT_TRUE(hasPlace(1, 3, true));
  EXPECT_TRUE(keep(1, 3, Collective::Send));
  EXPECT_FALSE(hasPlace(1, 4, true));
}

TEST_F(UnexpectedTest, WhatEndedLongAgoIsStillBehindAlthoughARankSpeaksOfIt) {
  const uint64_t old = kDerivedIdBit | 1;
  for (uint64_t i = 1; i <= Tables::kRecent + 1; ++i) {
    rank.posted(OperationId{kDerivedIdBit | i, -1}, Descriptor(), PreparedSchedule(), now);
    rank.ended(kDerivedIdBit | i);
  }
  EXPECT_TRUE(matching::isBehind(rank.tables, old));
  EXPECT_TRUE(keep(1, old)); // as its data, or credit for it, would be
  EXPECT_TRUE(matching::isBehind(rank.tables, old));
  EXPECT_TRUE(rank.isUnexpected(old));
  EXPECT_EQ(rank.usage().forgotten, 1U);
}

} // namespace
} // namespace pycomm::testing
