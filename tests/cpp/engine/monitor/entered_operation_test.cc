#include "engine/monitor/entered_operation.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace pycomm {
namespace {

using std::chrono::milliseconds;

class EnteredOperationTest : public ::testing::Test {
 protected:
  EnteredOperationTest() {
    config.size = 4;
  }
  [[nodiscard]] TimePoint at(int ms) const {
    return start_ + milliseconds(ms);
  }
  void enter(Collective kind = Collective::Barrier, Deadline deadline = Deadline::never()) {
    Descriptor descriptor;
    descriptor.kind = kind;
    op.enter(OperationId{1, 1}, descriptor, deadline, at(0));
  }
  /// The round that is taken at this time, or not.
  [[nodiscard]] bool round(int ms) {
    return op.takeRound(at(ms), config);
  }

  RollCallConfig config;
  EnteredOperation op;

 private:
  const TimePoint start_ = Clock::now();
};

TEST_F(EnteredOperationTest, AsksAlongItsEdgesOnceAndAllRanksThreeTimes) {
  enter();
  EXPECT_EQ(op.nextQuestion(config), at(2));
  EXPECT_FALSE(op.takeFirstQuestion(at(1), config));
  EXPECT_TRUE(op.takeFirstQuestion(at(2), config));
  EXPECT_FALSE(op.takeFirstQuestion(at(3), config));
  for (const int ms : {200, 2000, 10250}) {
    EXPECT_EQ(op.nextQuestion(config), at(ms));
    EXPECT_FALSE(round(ms - 1));
    EXPECT_TRUE(round(ms));
    EXPECT_EQ(op.roundLeavesOutKnown(), ms == 2000);
  }
  EXPECT_EQ(op.nextQuestion(config), TimePoint::max());
  EXPECT_FALSE(round(100000));
}

TEST_F(EnteredOperationTest, RoundsThatItSleptThroughAreOne) {
  enter();
  EXPECT_TRUE(round(5000));
  EXPECT_FALSE(round(5000));
}

TEST_F(EnteredOperationTest, NoFurtherRoundShortlyBeforeTheDeadline) {
  enter(Collective::Barrier, Deadline::at(at(2200)));
  EXPECT_TRUE(round(200));
  EXPECT_FALSE(round(2000)) << "answers would come too late";
}

TEST_F(EnteredOperationTest, AMessageOrALargeGroupAsksAlongEdgesOnly) {
  enter(Collective::Send);
  EXPECT_FALSE(round(200));
  enter();
  config.size = RollCallConfig::kAskEveryoneMaxSize + 1;
  EXPECT_FALSE(round(200));
  EXPECT_TRUE(op.takeFirstQuestion(at(2), config));
  EXPECT_EQ(op.nextQuestion(config), TimePoint::max());
}

TEST_F(EnteredOperationTest, BytesThatArriveBeginTheWaitAnew) {
  enter();
  op.lacks(2, "nothing");
  op.progressed(at(100));
  EXPECT_EQ(op.waited(at(150)), milliseconds(50));
  EXPECT_FALSE(op.missing()) << "who is missing may have come";
  EXPECT_FALSE(round(299));
  EXPECT_TRUE(round(300));
}

TEST_F(EnteredOperationTest, TheLowestRankThatLacksItIsNamedUntilItComes) {
  enter();
  op.lacks(3, "a barrier");
  op.lacks(2, "nothing");
  op.lacks(2, "a broadcast");
  EXPECT_EQ(op.missing()->peer, 2);
  EXPECT_EQ(op.missing(2)->last, "a broadcast");
  op.came(2);
  EXPECT_TRUE(op.hasCome(2));
  EXPECT_FALSE(op.missing(2));
  EXPECT_EQ(op.missing()->peer, 3);
}

} // namespace
} // namespace pycomm
