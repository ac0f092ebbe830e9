// What a rank remembers of operations that have ended.
#include <gtest/gtest.h>

#include <new>
#include <vector>

#include "allocations.h"
#include "engine/data/rank_tables.h"

namespace pycomm::testing {
namespace {

Descriptor numbered(int64_t numel) {
  Descriptor descriptor;
  descriptor.numel = numel;
  return descriptor;
}

OperationId counted(int64_t sequence) {
  return OperationId{static_cast<uint64_t>(sequence), sequence};
}

OperationId derived(uint64_t number) {
  return OperationId{kDerivedIdBit | number, -1};
}

struct HistoryTest : ::testing::Test {
  HistoryTest() : rank(ofTwo()) {}
  static RankTables::Config ofTwo() {
    RankTables::Config config;
    config.size = 2;
    config.hosts.resize(2);
    return config;
  }
  void enter(const OperationId& id, int64_t numel = 1) {
    rank.posted(id, numbered(numel), PreparedSchedule(), TimePoint());
  }
  void end(const OperationId& id, int64_t numel = 1) {
    enter(id, numel);
    rank.ended(id.id);
  }
  /// The operation that an answer names.
  [[nodiscard]] FrameHeader last() const {
    FrameHeader header;
    matching::writeLast(rank.tables, header);
    return header;
  }
  [[nodiscard]] bool isBehind(uint64_t op_id) const {
    return matching::isBehind(rank.tables, op_id);
  }
  [[nodiscard]] bool hasEnded(uint64_t op_id) const {
    return matching::hasEnded(rank.tables, op_id);
  }

  RankTables rank;
};

TEST_F(HistoryTest, NamesTheOperationThatWasEnteredLast) {
  EXPECT_EQ(last().aux, 0U);
  enter(counted(1), 10);
  enter(derived(5), 20);
  EXPECT_EQ(last().aux, kDerivedIdBit | 5);
  EXPECT_EQ(Descriptor::readFrom(last()), numbered(20));
}

TEST_F(HistoryTest, AnIdIsBehindOnceALaterOneWasEntered) {
  enter(counted(3));
  enter(derived(5));
  EXPECT_TRUE(isBehind(2));
  EXPECT_TRUE(isBehind(3));
  EXPECT_FALSE(isBehind(4));
  EXPECT_FALSE(isBehind(kDerivedIdBit | 5)) << "these have no order";
}

TEST_F(HistoryTest, RemembersThatOlderOnesHaveEndedToo) {
  const size_t ended = Tables::kRecent + Tables::kForgotten + 1;
  for (uint64_t i = 0; i < ended; ++i) {
    end(derived(i));
  }
  EXPECT_FALSE(isBehind(kDerivedIdBit | 0)) << "the bound";
  EXPECT_TRUE(isBehind(kDerivedIdBit | 1));
  EXPECT_FALSE(isBehind(kDerivedIdBit | ended));
  EXPECT_EQ(rank.usage().history, Tables::kRecent);
  EXPECT_EQ(rank.usage().forgotten, Tables::kForgotten);
  EXPECT_EQ(rank.tables.recent.size(), Tables::kRecent);
  EXPECT_EQ(rank.tables.forgotten.size(), Tables::kForgotten);
}

TEST_F(HistoryTest, OneThatIsReportedLateIsTheLastOnlyIfNoneIsLater) {
  enter(counted(5), 1);
  rank.passed(counted(4), numbered(2));
  EXPECT_EQ(last().aux, 5U);
  EXPECT_TRUE(hasEnded(4));
  rank.passed(counted(6), numbered(3));
  EXPECT_EQ(last().aux, 6U);
  EXPECT_TRUE(isBehind(6));
}

TEST_F(HistoryTest, RemembersTheLast256ThatHaveEnded) {
  for (int64_t sequence = 1; sequence <= 257; ++sequence) {
    end(counted(sequence), sequence);
  }
  EXPECT_FALSE(hasEnded(1));
  EXPECT_TRUE(hasEnded(2));
  EXPECT_TRUE(hasEnded(257));
  EXPECT_EQ(rank.tables.recent.at(257), numbered(257));
  EXPECT_EQ(rank.tables.recent.size(), 256U);
}

// Each allocation of an end fails once, while operations are remembered, age and are forgotten.
TEST_F(HistoryTest, WithoutMemoryNoHalfOfAnOperationIsRemembered) {
  int strikes = 0;
  std::vector<uint64_t> remembered;
  for (uint64_t i = 0; i < 3 * Tables::kRecent; ++i) {
    enter(derived(i));
    failAllocation(1 + static_cast<int64_t>(i % 4));
    try {
      rank.ended(kDerivedIdBit | i);
      remembered.push_back(kDerivedIdBit | i);
    } catch (const std::bad_alloc&) {
      ++strikes;
    }
    failAllocation(0);
    for (const uint64_t op_id : remembered) {
      ASSERT_TRUE(hasEnded(op_id) || isBehind(op_id)) << op_id << " is forgotten with the end of " << i;
    }
    ASSERT_EQ(rank.tables.recent.size(), rank.tables.recent_order.size()) << i;
    ASSERT_EQ(rank.tables.forgotten.size(), rank.tables.forgotten_order.size()) << i;
    ASSERT_LE(rank.tables.recent.size(), Tables::kRecent) << i;
  }
  EXPECT_GE(strikes, 100);
}

TEST_F(HistoryTest, WithoutMemoryToRememberItOneThatPassedIsStillUnexpected) {
  FrameHeader question;
  question.type = FrameType::Waiting;
  question.op_id = 4;
  numbered(1).writeTo(question);
  EXPECT_TRUE(rank.keepUnexpected(1, question, TimePoint()));
  bool threw = true;
  int strikes = 0;
  for (int64_t nth = 1; threw; ++nth) {
    ASSERT_LT(nth, 100);
    threw = throwsWithoutMemory(nth, [&] { rank.passed(counted(4), numbered(1)); });
    strikes += threw ? 1 : 0;
    EXPECT_EQ(rank.isUnexpected(4), threw) << nth;
    EXPECT_EQ(hasEnded(4), !threw) << nth;
  }
  EXPECT_GE(strikes, 1);
}

} // namespace
} // namespace pycomm::testing
