#include "engine/data/waiting.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "engine/data/rank_tables.h"
#include "engine/data/watched_operations.h"

namespace pycomm::testing {
namespace {

using std::chrono::milliseconds;

constexpr size_t kPlaces = 3;

RankTables::Config rollConfig(int size) {
  RankTables::Config config;
  config.rank = 0;
  config.size = size;
  config.group = 7;
  config.eager_pool_nbytes = config.frame_nbytes; // kPlaces
  config.max_ahead = 1;
  for (int rank = 0; rank < size; ++rank) {
    config.hosts.push_back("host" + std::to_string(rank));
  }
  return config;
}

Descriptor barrierOf(uint32_t tag = 0) {
  Descriptor descriptor;
  descriptor.kind = Collective::Barrier;
  descriptor.tag = tag;
  return descriptor;
}

Descriptor someMessage() {
  Descriptor descriptor;
  descriptor.kind = Collective::Send;
  return descriptor;
}

FrameHeader rollFrame(uint64_t op_id, const Descriptor& descriptor, FrameType type = FrameType::Waiting) {
  FrameHeader header;
  header.type = type;
  header.group = 7;
  header.op_id = op_id;
  descriptor.writeTo(header);
  return header;
}

Edge edgeOf(int peer, int64_t nbytes = 0) {
  Edge edge;
  edge.peer = peer;
  edge.nbytes = nbytes;
  edge.steps.resize(1);
  return edge;
}

class WaitingTest : public ::testing::Test {
 protected:
  using Kind = Action::Kind;

  [[nodiscard]] TimePoint at(int ms) const {
    return start_ + milliseconds(ms);
  }
  /// Enters a barrier that receives from rank `from` and sends to rank `to`, or to nobody.
  void enter(int64_t sequence, Deadline deadline = Deadline::never(), int from = 1, int to = -1) {
    PreparedSchedule schedule;
    schedule.incoming.push_back(edgeOf(from));
    if (to >= 0) {
      schedule.outgoing.push_back(edgeOf(to));
    }
    roll.posted(OperationId{static_cast<uint64_t>(sequence), sequence}, barrierOf(), schedule, at(0), deadline);
  }
  void end(uint64_t op_id) {
    roll.ended(op_id);
  }
  std::vector<Action> taken(Kind kind) {
    std::vector<Action> some;
    for (Action& action : roll.takeActions()) {
      if (action.kind == kind) {
        some.push_back(std::move(action));
      }
    }
    return some;
  }
  /// The ranks that are asked, in order.
  std::vector<int> askedRanks() {
    std::vector<int> ranks;
    for (const Action& action : taken(Kind::Send)) {
      EXPECT_EQ(action.header.type, FrameType::Waiting);
      ranks.push_back(action.peer);
    }
    return ranks;
  }

  RankTables roll{rollConfig(4)};

 private:
  const TimePoint start_ = Clock::now();
};

TEST_F(WaitingTest, AsksTheRanksThatItWaitsForAfter2MsAndAllRanksAfter200) {
  enter(1);
  EXPECT_EQ(roll.nextTick(), at(2));
  roll.tick(at(1));
  EXPECT_EQ(askedRanks(), std::vector<int>());
  roll.tick(at(2));
  EXPECT_EQ(askedRanks(), std::vector<int>{1});
  EXPECT_EQ(roll.nextTick(), at(200));
  roll.tick(at(199));
  EXPECT_EQ(askedRanks(), std::vector<int>());
  roll.tick(at(200));
  EXPECT_EQ(askedRanks(), (std::vector<int>{1, 2, 3}));
}

TEST_F(WaitingTest, AsksAllRanksAgainButNotWhenAnAnswerWouldComeTooLate) {
  enter(1, Deadline::at(at(2201)));
  enter(2, Deadline::at(at(2200)));
  for (const int ms : {2, 200}) {
    roll.tick(at(ms));
    static_cast<void>(roll.takeActions());
  }
  FrameHeader answer = rollFrame(1, barrierOf(), FrameType::NotEntered);
  roll.answered(2, answer, at(201));
  answer.op_id = 2;
  roll.answered(2, answer, at(201));
  EXPECT_EQ(roll.nextTick(), at(2000));
  roll.tick(at(2000));
  EXPECT_EQ(askedRanks(), (std::vector<int>{1, 2, 3})) << "of one operation only";
  EXPECT_TRUE(roll.missing(1)) << "until another answer comes: the second one may be lost";
  EXPECT_TRUE(roll.missing(2)) << "the first answer must do";
}

TEST_F(WaitingTest, ALaterAnswerOfARankReplacesItsFirst) {
  enter(1);
  FrameHeader answer = rollFrame(1, barrierOf(), FrameType::NotEntered);
  answer.aux = 12;
  roll.answered(2, answer, at(200));
  answer.aux = 13;
  roll.answered(2, answer, at(2000));
  ASSERT_TRUE(roll.missing(1, 2));
  EXPECT_NE(roll.missing(1, 2)->last.find("#13"), std::string::npos) << roll.missing(1, 2)->last;
}

TEST_F(WaitingTest, ARankThatHasEnteredSinceIsNotMissing) {
  enter(1, Deadline::never(), 1, 3); // no bytes are due from rank 2
  const FrameHeader answer = rollFrame(1, barrierOf(), FrameType::NotEntered);
  roll.answered(2, answer, at(3));
  roll.answered(3, answer, at(3));
  ASSERT_EQ(roll.missing(1)->peer, 2);
  static_cast<void>(roll.arrived(2, rollFrame(1, barrierOf()), at(4))); // its question
  EXPECT_EQ(roll.missing(1)->peer, 3);
  roll.answered(2, answer, at(5)); // which was on its way for longer
  EXPECT_EQ(roll.missing(1)->peer, 3);
  EXPECT_FALSE(roll.missing(1, 2));
  static_cast<void>(roll.arrived(3, rollFrame(1, barrierOf(), FrameType::Credit), at(6)));
  EXPECT_FALSE(roll.failed());
  EXPECT_FALSE(roll.missing(1));
  roll.tick(at(200));
  static_cast<void>(roll.takeActions());
  roll.tick(at(2000));
  EXPECT_EQ(askedRanks(), std::vector<int>{1}) << "the others have entered it";
}

// Else two ranks that both have only old questions answer each other without end.
TEST_F(WaitingTest, AnOldQuestionIsAnsweredOnceMoreAndNotWithoutEnd) {
  const uint64_t theirs = kDerivedIdBit | 5;
  enter(1);
  EXPECT_TRUE(roll.keepUnexpected(2, rollFrame(theirs, barrierOf()), at(0)));
  const FrameHeader answer = rollFrame(1, barrierOf(), FrameType::NotEntered);
  for (int i = 0; i < 3; ++i) {
    roll.answered(2, answer, at(20000 + i));
  }
  EXPECT_EQ(taken(Kind::Send).size(), 1U);
  EXPECT_TRUE(
      roll.keepUnexpected(2, rollFrame(theirs, barrierOf()), at(30000))); // it asks again, and is stopped once more
  roll.answered(2, answer, at(35000));
  EXPECT_EQ(taken(Kind::Send).size(), 1U);
}

TEST_F(WaitingTest, AnAnswerAboutWhatIsForgottenIsNotAQuestion) {
  FrameHeader answer = rollFrame(kDerivedIdBit | 5, barrierOf());
  answer.aux = 1;
  roll.asked(2, answer, at(0));
  EXPECT_TRUE(roll.takeActions().empty());
  EXPECT_FALSE(roll.isUnexpected(kDerivedIdBit | 5));
}

TEST_F(WaitingTest, ARankThatCameFirstIsNotMissing) {
  EXPECT_TRUE(roll.keepUnexpected(2, rollFrame(1, barrierOf()), at(0)));
  enter(1);
  roll.answered(2, rollFrame(1, barrierOf(), FrameType::NotEntered), at(1));
  EXPECT_FALSE(roll.missing(1));
}

TEST_F(WaitingTest, OnlyAnEdgeThatWaitsForCreditNeedsALinkForItsQuestion) {
  PreparedSchedule schedule;
  schedule.incoming.push_back(edgeOf(1, 100));
  schedule.outgoing.push_back(edgeOf(2, 100));
  roll.posted(OperationId{1, 1}, barrierOf(), schedule, at(0));
  roll.tick(at(200));
  std::map<int, std::set<Action::Way>> ways;
  for (const Action& action : taken(Kind::Send)) {
    ways[action.peer].insert(action.way);
  }
  EXPECT_EQ(ways[1], std::set<Action::Way>{Action::Way::OpenLink});
  EXPECT_EQ(ways[2], std::set<Action::Way>{Action::Way::Needed}) << "it sends credit when it knows";
  EXPECT_EQ(ways[3], std::set<Action::Way>{Action::Way::OpenLink});

  roll.asked(1, rollFrame(7, barrierOf()), at(200));
  roll.asked(1, rollFrame(kDerivedIdBit | 8, someMessage()), at(200));
  const std::vector<Action> answers = taken(Kind::Send);
  ASSERT_EQ(answers.size(), 2U);
  EXPECT_EQ(answers[0].way, Action::Way::OpenLink);
  EXPECT_EQ(answers[1].way, Action::Way::BulkLink) << "a message";
}

// Nobody asks a second time there.
TEST(WaitingInALargeGroup, QuestionsAreNotLost) {
  for (const int size : {256, 257}) {
    RankTables roll{rollConfig(size)};
    PreparedSchedule schedule;
    schedule.incoming.push_back(edgeOf(1));
    const TimePoint start = Clock::now();
    roll.posted(OperationId{1, 1}, barrierOf(), schedule, start);
    roll.tick(start + milliseconds(2));
    roll.asked(1, rollFrame(7, barrierOf()), start + milliseconds(2));
    const std::vector<Action> actions = roll.takeActions();
    ASSERT_EQ(actions.size(), 2U);
    EXPECT_EQ(actions[0].header.type, FrameType::Waiting);
    EXPECT_EQ(actions[0].way, size > 256 ? Action::Way::Needed : Action::Way::OpenLink) << size;
    EXPECT_EQ(actions[1].header.type, FrameType::NotEntered);
    EXPECT_EQ(actions[1].way, size > 256 ? Action::Way::BulkLink : Action::Way::OpenLink) << size;
  }
}

// As of operations in shared memory, whose slots say who lacks.
TEST_F(WaitingTest, OneThatAsksOnlySomeRanksAsksNoOthers) {
  enter(1);
  roll.asksOnly(1, {}, at(0));
  roll.tick(at(250));
  EXPECT_TRUE(taken(Kind::Send).empty());
  for (const int ms : {300, 400, 500}) { // it is said again while it lasts
    roll.asksOnly(1, {2}, at(ms));
    roll.tick(at(ms));
  }
  std::vector<int> asked;
  for (const Action& action : taken(Kind::Send)) {
    asked.push_back(action.peer);
  }
  EXPECT_EQ(asked, (std::vector<int>{2, 2})) << "at once, and 200 ms later";
}

TEST_F(WaitingTest, OnlyOperationsThatAskKeepLaterOnesFromAsking) {
  const auto many = static_cast<int64_t>(rollConfig(4).max_asking);
  for (int64_t sequence = 1; sequence <= many; ++sequence) {
    enter(sequence);
    roll.asksOnly(static_cast<uint64_t>(sequence), {}, at(0));
  }
  enter(many + 1);
  roll.tick(at(2));
  const std::vector<Action> asked = taken(Kind::Send);
  ASSERT_EQ(asked.size(), 1U);
  EXPECT_EQ(asked[0].header.op_id, static_cast<uint64_t>(many + 1));
}

// Rank 1 waits in an operation that this rank has ended, and forgotten since; this rank waits for rank 1 in another one.
TEST_F(WaitingTest, WhatWasForgottenIsNotSaidToBeMissing) {
  const uint64_t forgotten = kDerivedIdBit | 1;
  for (uint64_t i = 1; i <= 300; ++i) {
    roll.posted(OperationId{kDerivedIdBit | i, -1}, barrierOf(), PreparedSchedule(), at(0));
    end(kDerivedIdBit | i);
  }
  enter(1);
  for (const int ms : {200, 10250}) {
    roll.asked(1, rollFrame(forgotten, barrierOf()), at(ms));
  }
  EXPECT_TRUE(taken(Kind::Send).empty());
  EXPECT_EQ(roll.usage().unexpected, 0U);
  roll.answered(1, rollFrame(1, barrierOf(), FrameType::NotEntered), at(10300));
  EXPECT_FALSE(roll.failed());
}

/// Two ranks in operations of two names: rank 0 waits in #1 and gets questions about rank 1's operation.
class DeadlockTest : public WaitingTest {
 protected:
  static constexpr uint64_t kTheirs = kDerivedIdBit | 8;
  void hearOfTheirs(int ms) {
    EXPECT_TRUE(roll.keepUnexpected(1, rollFrame(kTheirs, barrierOf()), at(ms)));
  }
  void answer(int ms) {
    static_cast<void>(roll.takeActions());
    roll.answered(1, rollFrame(1, barrierOf(), FrameType::NotEntered), at(ms));
  }
};

TEST_F(DeadlockTest, TwoThatWaitInDifferentOperationsFor10SecondsAreAMismatch) {
  enter(1);
  hearOfTheirs(200);
  hearOfTheirs(9900);
  answer(10199);
  EXPECT_FALSE(roll.failed());
  answer(10200);
  const std::vector<Action> failures = taken(Kind::Notice);
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0].record.code, ErrorCode::CollectiveMismatch);
}

TEST_F(DeadlockTest, OfSeveralTheOldestIsNamed) {
  const uint64_t mine = kDerivedIdBit | 1;
  roll.posted(OperationId{mine, -1}, barrierOf(), PreparedSchedule(), at(0));
  for (const uint64_t sequence : {2, 4, 7, 9}) {
    for (const int ms : {200, 9900}) {
      EXPECT_TRUE(roll.keepUnexpected(1, rollFrame(sequence, barrierOf()), at(ms)));
    }
  }
  roll.answered(1, rollFrame(mine, barrierOf(), FrameType::NotEntered), at(10200));
  const std::vector<Action> failures = taken(Kind::Notice);
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_NE(failures[0].record.summary.find(" #2"), std::string::npos) << failures[0].record.summary;
}

// The last question to all comes when the other has heard of this operation for that long, also if it heard of it in the first round.
TEST_F(DeadlockTest, TheLastQuestionFindsItOver) {
  enter(1);
  for (const int ms : {2, 200, 2000}) {
    roll.tick(at(ms));
    static_cast<void>(roll.takeActions());
  }
  EXPECT_EQ(roll.nextTick(), at(10250));
}

// A root has left its operation long ago, or its question was very late: this rank cannot know. The other does.
TEST_F(DeadlockTest, WhatWasNotHeardOfLatelyIsNoMismatchButIsAnsweredOnceMore) {
  enter(1);
  hearOfTheirs(0);
  hearOfTheirs(9000);
  answer(10250);
  EXPECT_FALSE(roll.failed());
  const std::vector<Action> answers = taken(Kind::Send);
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(answers[0].peer, 1);
  EXPECT_EQ(answers[0].header.type, FrameType::NotEntered);
  EXPECT_EQ(answers[0].header.op_id, kTheirs);
}

TEST_F(WaitingTest, TheLowestRankThatHasNotEnteredIsMissing) {
  enter(1);
  FrameHeader answer = rollFrame(1, barrierOf(), FrameType::NotEntered);
  answer.aux = 12;
  roll.answered(3, answer, at(3));
  answer.aux = 0;
  roll.answered(2, answer, at(3));
  ASSERT_TRUE(roll.missing(1));
  EXPECT_EQ(roll.missing(1)->peer, 2);
  EXPECT_EQ(roll.missing(1)->last, "no operation yet");
  ASSERT_TRUE(roll.missing(1, 3));
  EXPECT_NE(roll.missing(1, 3)->last.find("#12"), std::string::npos) << roll.missing(1, 3)->last;
  EXPECT_FALSE(roll.missing(1, 1));
  EXPECT_FALSE(roll.missing(2)) << "it is not entered here";
  waiting::progressed(*roll.tables.find(1), at(4));
  EXPECT_FALSE(roll.missing(1)) << "bytes have come";
}

// Its first report may be lost for want of memory on its way to the control plane.
TEST_F(WaitingTest, AnOverdueOperationIsReportedEachSecondUntilItHasEnded) {
  enter(1, Deadline::at(at(50)));
  for (const int ms : {50, 1050, 2050}) {
    roll.tick(at(ms - 1));
    EXPECT_TRUE(taken(Kind::Overdue).empty()) << ms;
    roll.tick(at(ms));
    EXPECT_EQ(taken(Kind::Overdue).size(), 1U) << ms;
    EXPECT_LE(roll.nextTick(), at(ms + 1000));
  }
  end(1);
  roll.tick(at(3050));
  EXPECT_TRUE(taken(Kind::Overdue).empty());
}

TEST_F(WaitingTest, ADeadlineIsReportedOnceWhenItHasPassed) {
  enter(1, Deadline::at(at(50)));
  enter(2, Deadline::at(at(40)));
  enter(3);
  end(2); // in time
  roll.tick(at(40));
  EXPECT_TRUE(taken(Kind::Overdue).empty());
  EXPECT_EQ(roll.nextTick(), at(50));
  roll.tick(at(50));
  const std::vector<Action> overdue = taken(Kind::Overdue);
  ASSERT_EQ(overdue.size(), 1U);
  EXPECT_EQ(overdue[0].op_id, 1U);
  roll.tick(at(60));
  EXPECT_TRUE(taken(Kind::Overdue).empty());
  EXPECT_EQ(roll.nextTick(), at(200));
}

TEST_F(WaitingTest, DeadlinesAreReportedAlsoAfterAFailure) {
  enter(1, Deadline::at(at(50)));
  matching::violated(roll.tables, 1, rollFrame(1, barrierOf()), "something");
  ASSERT_TRUE(roll.failed());
  roll.tick(at(50));
  EXPECT_EQ(taken(Kind::Overdue).size(), 1U);
}

TEST_F(WaitingTest, WhatArrivesIsComparedWithWhatIsEnteredEndedOrEnteredLater) {
  enter(1);
  static_cast<void>(roll.arrived(1, rollFrame(1, barrierOf()), at(1)));
  EXPECT_TRUE(roll.takeActions().empty()) << "it is entered here";
  end(1);
  static_cast<void>(roll.arrived(1, rollFrame(1, barrierOf()), at(1)));
  EXPECT_TRUE(roll.takeActions().empty()) << "it was";
  EXPECT_FALSE(roll.failed());

  EXPECT_TRUE(roll.keepUnexpected(3, rollFrame(2, barrierOf(9)), at(1)));
  EXPECT_TRUE(roll.isUnexpected(2));
  EXPECT_EQ(roll.tables.findUnexpected(2)->peers.count(3), 1U);
  enter(2);
  const std::vector<Action> failures = taken(Kind::Notice);
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0].record.code, ErrorCode::CollectiveMismatch);
  EXPECT_EQ(failures[0].record.peer, 3);
  EXPECT_FALSE(roll.isUnexpected(2));
}

TEST_F(WaitingTest, APeerThatContradictsItselfBreaksTheProtocol) {
  EXPECT_TRUE(roll.keepUnexpected(3, rollFrame(2, barrierOf(1)), at(1)));
  EXPECT_TRUE(roll.keepUnexpected(3, rollFrame(2, barrierOf(1)), at(1)));
  EXPECT_FALSE(roll.keepUnexpected(3, rollFrame(2, barrierOf(2)), at(1)));
  const std::vector<Action> failures = taken(Kind::Notice);
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0].record.code, ErrorCode::ProtocolViolation);
  EXPECT_NE(failures[0].record.summary.find("two different descriptors"), std::string::npos);
}

TEST_F(WaitingTest, AQuestionAboutWhatIsNotEnteredIsAnsweredAlsoIfThereIsNoPlaceForIt) {
  enter(1);
  for (uint64_t op_id = 2; op_id < 2 + 2 * kPlaces; ++op_id) {
    roll.asked(1, rollFrame(op_id, barrierOf()), at(1));
    const std::vector<Action> answers = taken(Kind::Send);
    ASSERT_EQ(answers.size(), 1U);
    EXPECT_EQ(answers[0].peer, 1);
    EXPECT_EQ(answers[0].header.type, FrameType::NotEntered);
    EXPECT_EQ(answers[0].header.op_id, op_id);
    EXPECT_EQ(answers[0].header.aux, 1U) << "the last one that was entered";
  }
  EXPECT_EQ(roll.usage().unexpected, kPlaces);
  roll.asked(1, rollFrame(1, barrierOf()), at(1));
  EXPECT_TRUE(taken(Kind::Send).empty()) << "it is entered here";
}

// Its input is on its way from a device, and a later operation has none there.
TEST_F(WaitingTest, AQuestionAboutAHeldOperationIsKeptAndAnsweredAlsoIfALaterOneIsEntered) {
  WatchedOperations watched(roll.tables);
  Operation::Request request;
  request.id = OperationId{4, 4};
  request.descriptor = barrierOf();
  const auto held = std::make_shared<Operation>(std::move(request));
  watched.hold(held);
  enter(5);
  roll.asked(1, rollFrame(4, barrierOf()), at(1));
  const std::vector<Action> answers = taken(Kind::Send);
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(answers[0].header.type, FrameType::NotEntered);
  EXPECT_EQ(answers[0].header.op_id, 4U);
  EXPECT_EQ(answers[0].header.aux, 5U) << "what it did last";
  EXPECT_TRUE(roll.isUnexpected(4));
  roll.asked(1, rollFrame(3, barrierOf()), at(1));
  EXPECT_TRUE(taken(Kind::Send).empty()) << "that one is over";
  EXPECT_TRUE(watched.release(held));
  enter(4);
  EXPECT_EQ(askedRanks(), std::vector<int>{1}) << "it has come now";
  EXPECT_FALSE(roll.isUnexpected(4));
}

TEST_F(WaitingTest, ASenderAnnouncesNoMoreMessagesThanThereArePlacesAndQuestions) {
  roll.asked(1);
  for (uint64_t i = 0; i < kPlaces + 1; ++i) {
    roll.asked(1, rollFrame(kDerivedIdBit | (4 + i), someMessage()), at(1));
    EXPECT_FALSE(roll.failed()) << i;
  }
  roll.asked(1, rollFrame(kDerivedIdBit | 100, someMessage()), at(1));
  EXPECT_TRUE(roll.failed());
}

TEST_F(WaitingTest, AnOperationThatWentAnotherWayIsComparedAndIsTheLastOne) {
  EXPECT_TRUE(roll.keepUnexpected(2, rollFrame(5, barrierOf()), at(0)));
  roll.passed(OperationId{5, 5}, barrierOf());
  EXPECT_FALSE(roll.failed());
  EXPECT_FALSE(roll.isUnexpected(5));
  roll.asked(1, rollFrame(4, barrierOf()), at(1));
  EXPECT_TRUE(taken(Kind::Send).empty()) << "a counted operation before the last one is over";
  roll.asked(1, rollFrame(6, barrierOf()), at(1));
  const std::vector<Action> answers = taken(Kind::Send);
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(answers[0].header.aux, 5U);
}

} // namespace
} // namespace pycomm::testing
