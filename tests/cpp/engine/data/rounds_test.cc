// When an operation that waits asks the other ranks.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "engine/data/rank_tables.h"

namespace pycomm::testing {
namespace {

using std::chrono::milliseconds;

class RoundsTest : public ::testing::Test {
 protected:
  static RankTables::Config configOf(int size) {
    RankTables::Config config;
    config.size = size;
    config.hosts.resize(static_cast<size_t>(size));
    return config;
  }
  [[nodiscard]] TimePoint at(int ms) const {
    return start_ + milliseconds(ms);
  }
  /// It receives from rank 1.
  void enter(Collective kind = Collective::Barrier, Deadline deadline = Deadline::never()) {
    Descriptor descriptor;
    descriptor.kind = kind;
    PreparedSchedule schedule;
    schedule.incoming.emplace_back();
    schedule.incoming.back().peer = 1;
    schedule.incoming.back().steps.resize(1);
    rank.posted(OperationId{1, 1}, descriptor, schedule, at(0), deadline);
  }
  /// How many ranks it asks at this time.
  size_t asks(int ms) {
    rank.tick(at(ms));
    size_t asked = 0;
    for (const Action& action : rank.takeActions()) {
      asked += action.kind == Action::Kind::Send ? 1 : 0;
    }
    return asked;
  }
  [[nodiscard]] TimePoint next() const {
    return waiting::nextQuestion(rank.tables, *rank.tables.find(1));
  }
  void answers(int peer, uint64_t last) {
    FrameHeader answer = matching::headerFor(rank.tables, rank.tables.find(1), FrameType::NotEntered, peer);
    answer.aux = last;
    rank.answered(peer, answer, at(1));
  }

  RankTables rank{configOf(4)};

 private:
  const TimePoint start_ = Clock::now();
};

TEST_F(RoundsTest, AsksAlongItsEdgesOnceAndAllRanksThreeTimes) {
  enter();
  EXPECT_EQ(next(), at(2));
  EXPECT_EQ(asks(1), 0U);
  EXPECT_EQ(asks(2), 1U);
  EXPECT_EQ(asks(3), 0U);
  waiting::came(*rank.tables.find(1), 2);
  for (const int ms : {200, 2000, 10250}) {
    EXPECT_EQ(next(), at(ms));
    EXPECT_EQ(asks(ms - 1), 0U);
    EXPECT_EQ(asks(ms), ms == 2000 ? 2U : 3U) << "the second round leaves out those that have come";
  }
  EXPECT_EQ(next(), TimePoint::max());
  EXPECT_EQ(asks(100000), 0U);
}

TEST_F(RoundsTest, RoundsThatItSleptThroughAreOne) {
  enter();
  EXPECT_EQ(asks(5000), 1U + 3U);
  EXPECT_EQ(asks(5000), 0U);
}

TEST_F(RoundsTest, NoFurtherRoundShortlyBeforeTheDeadline) {
  enter(Collective::Barrier, Deadline::at(at(2200)));
  EXPECT_EQ(asks(200), 1U + 3U);
  EXPECT_EQ(asks(2000), 0U) << "answers would come too late";
}

TEST_F(RoundsTest, AMessageAsksAlongEdgesOnly) {
  enter(Collective::Send);
  EXPECT_EQ(asks(200), 1U);
  EXPECT_EQ(next(), TimePoint::max());
}

TEST(RoundsOfALargeGroup, AreNone) {
  for (const int size : {Tables::kAskEveryoneMaxSize, Tables::kAskEveryoneMaxSize + 1}) {
    RankTables::Config config;
    config.size = size;
    config.hosts.resize(static_cast<size_t>(size));
    RankTables rank(config);
    const TimePoint start = Clock::now();
    rank.posted(OperationId{1, 1}, Descriptor(), PreparedSchedule(), start);
    rank.tick(start + milliseconds(200));
    EXPECT_EQ(rank.takeActions().size(), size > Tables::kAskEveryoneMaxSize ? 0U : 255U);
  }
}

TEST_F(RoundsTest, BytesThatArriveBeginTheWaitAnew) {
  enter();
  EXPECT_EQ(asks(2), 1U);
  answers(2, 0);
  waiting::progressed(*rank.tables.find(1), at(100));
  EXPECT_FALSE(rank.missing(1)) << "who is missing may have come";
  EXPECT_EQ(asks(299), 0U);
  EXPECT_EQ(asks(300), 3U);
}

TEST_F(RoundsTest, TheLowestRankThatLacksItIsNamedUntilItComes) {
  enter();
  answers(3, 7);
  answers(2, 0);
  answers(2, 8);
  EXPECT_EQ(rank.missing(1)->peer, 2);
  EXPECT_NE(rank.missing(1, 2)->last.find("#8"), std::string::npos) << rank.missing(1, 2)->last;
  waiting::came(*rank.tables.find(1), 2);
  EXPECT_TRUE(waiting::hasCome(*rank.tables.find(1), 2));
  EXPECT_FALSE(rank.missing(1, 2));
  EXPECT_EQ(rank.missing(1)->peer, 3);
}

} // namespace
} // namespace pycomm::testing
