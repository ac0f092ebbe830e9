#include "engine/data/leaving.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "allocations.h"
#include "engine/data/point_to_point.h"
#include "engine/data/transfer.h"
#include "engine/operation/operation.h"
#include "engine/operation/prepared_schedule.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

GroupIdentity leavingIdentity(int size) {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = size;
  identity.name = "test";
  for (int rank = 0; rank < size; ++rank) {
    identity.hosts.push_back("host" + std::to_string(rank));
  }
  return identity;
}

std::shared_ptr<Operation> someOperation(int64_t sequence) {
  Operation::Request request;
  request.id = {static_cast<uint64_t>(sequence), sequence};
  request.descriptor.kind = Collective::AllReduce;
  return std::make_shared<Operation>(std::move(request));
}

PreparedSchedule scheduleWith(int peer) {
  PreparedSchedule schedule;
  schedule.outgoing.emplace_back();
  schedule.outgoing.back().peer = peer;
  return schedule;
}

ErrorRecord peerDead(int peer) {
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  record.rank = 0;
  record.peer = peer;
  record.cause = "EPIPE";
  return record;
}

class LeavingTest : public ::testing::Test {
 protected:
  using Kind = Action::Kind;
  using Reading = PeerRow::Reading;

  [[nodiscard]] TimePoint at(int ms) const {
    return start_ + milliseconds(ms);
  }
  /// The one action that there is.
  Action action() {
    std::vector<Action> actions = std::exchange(tables.actions, {});
    EXPECT_EQ(actions.size(), 1U);
    return actions.empty() ? Action() : std::move(actions.front());
  }
  bool quiet() {
    return std::exchange(tables.actions, {}).empty();
  }

  // What the operations of this rank still need.
  OperationRow& rowOf(const std::shared_ptr<Operation>& operation) {
    OperationRow& row = tables.entered[operation->request().id.id];
    row.operation = operation;
    return row;
  }
  static EdgeRow unfinished(int peer) {
    EdgeRow edge;
    edge.peer = peer;
    edge.frames = 1;
    return edge;
  }
  void sends(const std::shared_ptr<Operation>& operation, int peer) {
    rowOf(operation).outgoing.push_back(unfinished(peer));
  }
  void receives(const std::shared_ptr<Operation>& operation, int peer, int64_t nbytes = 0) {
    rowOf(operation).incoming.push_back(unfinished(peer));
    rowOf(operation).incoming.back().total = nbytes;
  }
  /// A receive that has no message yet.
  void receivesMessage(int peer, size_t nbytes = 0, uint64_t ticket = 1) {
    Operation::Request request;
    request.descriptor.kind = Collective::Send;
    request.receives = true;
    request.peer = peer;
    request.output.nbytes = nbytes;
    tables.receives.emplace(ticket, std::make_shared<Operation>(std::move(request)));
    ++(peer == PointToPoint::kAnyRank ? tables.receives_from_any : tables.peer(peer).receives);
  }
  void receivesFromAnyone() {
    receivesMessage(PointToPoint::kAnyRank);
  }
  /// Rank 1 is lost, and nothing waits.
  void beginAgainWithoutRank1() {
    tables.entered.clear();
    tables.receives.clear();
    tables.peer(1) = PeerRow();
    tables.away = tables.suspicions = 0;
    leaving::writingBroke(tables, 1, peerDead(1), at(0));
    leaving::tick(tables, at(40));
    ASSERT_TRUE(quiet());
  }
  [[nodiscard]] Reading& link(int peer) {
    return tables.peer(peer).reading;
  }
  [[nodiscard]] bool isAway(int peer) const {
    return tables.peer(peer).isAway();
  }

  const GroupIdentity identity = leavingIdentity(3);
  const std::shared_ptr<Operation> first = someOperation(1);
  const std::shared_ptr<Operation> second = someOperation(2);
  const PreparedSchedule with_rank_1 = scheduleWith(1);
  Tables tables{identity, Limits()};

 private:
  const TimePoint start_ = Clock::now();
};

TEST_F(LeavingTest, ARankThatNobodyNeedsLeavesInOrder) {
  leaving::saidGoodbye(tables, 1, at(0));
  EXPECT_TRUE(isAway(1));
  EXPECT_FALSE(isAway(2));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(leaving::nextTick(tables), TimePoint::max());
}

TEST_F(LeavingTest, ALinkThatBrokeIsExplainedByAGoodbyeWithin40Ms) {
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  EXPECT_EQ(leaving::nextTick(tables), at(40));
  leaving::tick(tables, at(39));
  EXPECT_TRUE(quiet());
  leaving::saidGoodbye(tables, 1, at(39));
  EXPECT_EQ(leaving::nextTick(tables), TimePoint::max());
  leaving::tick(tables, at(10000));
  EXPECT_TRUE(quiet());
}

TEST_F(LeavingTest, WithoutAGoodbyeAnOperationThatStillSendsMakesItADeath) {
  sends(first, 1);
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  const Action failure = action();
  EXPECT_EQ(failure.kind, Kind::Notice);
  EXPECT_EQ(failure.record.code, ErrorCode::PeerDead);
  EXPECT_EQ(failure.record.peer, 1);
  EXPECT_EQ(failure.record.cause, "EPIPE");
  EXPECT_FALSE(isAway(1)) << "the group agrees on that, not this rank";
}

TEST_F(LeavingTest, BytesThatThePeerOwesHave3SecondsToComeOnItsOwnLink) {
  receives(first, 1);
  link(1) = Reading::Open;
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(leaving::nextTick(tables), at(3040));
  leaving::tick(tables, at(3040));
  EXPECT_EQ(action().record.code, ErrorCode::PeerDead);
}

TEST_F(LeavingTest, ATickWithoutMemoryLosesNoSuspicion) {
  sends(first, 1);
  sends(first, 2);
  bool struck = true;
  int strikes = 0;
  for (int64_t nth = 1; struck && nth < 100; ++nth) {
    for (const int peer : {1, 2}) {
      leaving::writingBroke(tables, peer, peerDead(peer), at(0));
    }
    testing::failAllocation(nth);
    try {
      leaving::tick(tables, at(40));
    } catch (const std::bad_alloc&) {
      EXPECT_LE(leaving::nextTick(tables), at(40)) << "allocation " << nth;
    }
    struck = testing::allocationFailed();
    testing::failAllocation(0);
    strikes += struck ? 1 : 0;
    leaving::tick(tables, at(40));
    std::set<int> dead;
    for (const Action& found : std::exchange(tables.actions, {})) {
      dead.insert(found.record.peer);
    }
    EXPECT_EQ(dead, (std::set<int>{1, 2})) << "allocation " << nth;
    EXPECT_EQ(tables.suspicions, 0U);
  }
  EXPECT_GE(strikes, 2);
}

TEST_F(LeavingTest, IfThatLinkHasEndedTheyDoNotCome) {
  receives(first, 1);
  link(1) = Reading::Ended;
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  EXPECT_EQ(action().record.code, ErrorCode::PeerDead);
}

TEST_F(LeavingTest, APeerThatNothingIsDueFromIsLostAndDoubtedAfter3Seconds) {
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  EXPECT_TRUE(quiet());
  EXPECT_TRUE(isAway(1));
  leaving::tick(tables, at(3039));
  EXPECT_TRUE(quiet());
  leaving::tick(tables, at(3040));
  const Action doubt = action();
  EXPECT_EQ(doubt.kind, Kind::Doubt);
  EXPECT_EQ(doubt.record.code, ErrorCode::ConnectionReset);
  EXPECT_NE(doubt.record.summary.find("although that rank is still there"), std::string::npos) << doubt.record.summary;
}

TEST_F(LeavingTest, AnOperationThatNeedsALostPeerLaterFailsWithWhatBroke) {
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  ASSERT_TRUE(quiet());
  sends(second, 1);
  leaving::posted(tables, &with_rank_1, false, at(50));
  EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset);
}

// Else each call would look through all operations for each rank that has left.
TEST_F(LeavingTest, AnOperationThatIsPostedIsCheckedForTheRanksOfItsScheduleOnly) {
  leaving::saidGoodbye(tables, 1, at(0));
  leaving::saidGoodbye(tables, 2, at(0));
  ASSERT_TRUE(quiet());
  sends(first, 1); // which its post has not said: so only a look at rank 1 finds it
  const PreparedSchedule with_rank_2 = scheduleWith(2);
  leaving::posted(tables, &with_rank_2, false, at(1));
  EXPECT_TRUE(quiet());
  leaving::posted(tables, nullptr, true, at(2));
  EXPECT_TRUE(quiet()) << "a receive from any rank";
  leaving::posted(tables, &with_rank_1, false, at(3));
  EXPECT_EQ(action().record.peer, 1);
}

TEST_F(LeavingTest, AGoodbyeStillCountsAfterAPeerWasLost) {
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  ASSERT_TRUE(quiet());
  leaving::saidGoodbye(tables, 1, at(60));
  EXPECT_EQ(leaving::nextTick(tables), TimePoint::max());
  sends(second, 1);
  leaving::posted(tables, &with_rank_1, false, at(70));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(LeavingTest, AGoodbyeFailsTheFirstOperationThatHasToSendToThatRank) {
  sends(second, 2);
  leaving::saidGoodbye(tables, 2, at(0));
  const ErrorRecord record = action().record;
  EXPECT_EQ(record.code, ErrorCode::PeerLeft);
  EXPECT_EQ(record.peer, 2);
  EXPECT_EQ(record.sequence, 2);
  EXPECT_NE(
      record.summary.find("Rank 2 on host2 closed its process group while all_reduce #2 still needs it."),
      std::string::npos)
      << record.summary;
}

TEST_F(LeavingTest, AGoodbyeDoesNotEndWhatThePeersLinkStillBrings) {
  receives(first, 1);
  link(1) = Reading::Open;
  leaving::saidGoodbye(tables, 1, at(0));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(leaving::nextTick(tables), TimePoint::max()) << "its link is open: the end of that decides";
  link(1) = Reading::Ended;
  leaving::readingEnded(tables, 1, peerDead(1), at(5));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(LeavingTest, BytesThatAreChangedOnTheWayOfAPeerThatLeftAreNotItsFault) {
  ErrorRecord changed = peerDead(1);
  changed.code = ErrorCode::DataCorrupt;
  link(1) = Reading::Open;
  receives(first, 1);
  leaving::saidGoodbye(tables, 1, at(0));
  ASSERT_TRUE(quiet());
  link(1) = Reading::Ended;
  leaving::readingEnded(tables, 1, changed, at(5));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt);
}

TEST_F(LeavingTest, ChangedBytesOfAPeerThatLeftEndTheFirstOperationThatMayNeedThem) {
  ErrorRecord changed = peerDead(1);
  changed.code = ErrorCode::DataCorrupt;
  leaving::saidGoodbye(tables, 1, at(0));
  link(1) = Reading::Ended;
  leaving::readingEnded(tables, 1, changed, at(5));
  EXPECT_TRUE(quiet()) << "nobody needs them yet";

  sends(first, 1);
  leaving::posted(tables, &with_rank_1, false, at(6));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft) << "a send to it does not";
  tables.entered.clear();
  receives(first, 1);
  leaving::posted(tables, &with_rank_1, false, at(7));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt);
  tables.entered.clear();
  receivesFromAnyone();
  leaving::posted(tables, nullptr, true, at(8));
  EXPECT_TRUE(quiet()) << "another rank may serve it";
  link(2) = Reading::Ended;
  leaving::saidGoodbye(tables, 2, at(9));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt) << "no other rank may, any more";
}

TEST_F(LeavingTest, ChangedBytesEndAReceiveFromAnyRankThatWaitsForThemPerhaps) {
  ErrorRecord changed = peerDead(1);
  changed.code = ErrorCode::DataCorrupt;
  receivesFromAnyone();
  leaving::saidGoodbye(tables, 1, at(0));
  ASSERT_TRUE(quiet());
  link(1) = Reading::Ended;
  leaving::readingEnded(tables, 1, changed, at(5));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt);
}

TEST_F(LeavingTest, AGoodbyeMayOvertakeTheHelloOfTheLinkThatTheBytesComeOn) {
  receives(first, 1);
  leaving::saidGoodbye(tables, 1, at(0));
  EXPECT_EQ(leaving::nextTick(tables), at(3000));
  link(1) = Reading::Open;
  leaving::tick(tables, at(3000));
  EXPECT_TRUE(quiet()) << "the link has come";

  link(1) = Reading::NotOpened;
  leaving::posted(tables, &with_rank_1, false, at(3000));
  leaving::tick(tables, at(6000));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(LeavingTest, TheEndOfAPeersLinkWithoutAGoodbyeIsADeathAtOnce) {
  leaving::readingEnded(tables, 1, peerDead(1), at(0));
  EXPECT_EQ(action().record.code, ErrorCode::PeerDead);
}

TEST_F(LeavingTest, AReceiveFromAnyRankFailsWhenAllHaveLeftAndNoLinkIsOpen) {
  receivesFromAnyone();
  link(1) = Reading::Ended;
  link(2) = Reading::Open;
  leaving::saidGoodbye(tables, 1, at(0));
  EXPECT_TRUE(quiet()) << "rank 2 is there";
  leaving::saidGoodbye(tables, 2, at(1));
  EXPECT_TRUE(quiet()) << "its link may bring a message";
  link(2) = Reading::Ended;
  leaving::readingEnded(tables, 2, peerDead(2), at(2));
  const ErrorRecord record = action().record;
  EXPECT_EQ(record.code, ErrorCode::PeerLeft);
  EXPECT_EQ(record.peer, 2);
}

TEST_F(LeavingTest, AReceiveFromAnyRankWaits3SecondsForALinkThatHasNotCome) {
  receivesFromAnyone();
  link(1) = Reading::Ended;
  leaving::saidGoodbye(tables, 1, at(0));
  leaving::saidGoodbye(tables, 2, at(1));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(leaving::nextTick(tables), at(3001));
  leaving::tick(tables, at(3001));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(LeavingTest, ARankThatLeftStaysSoIfAnotherServesTheReceiveThatWaitedForItsLink) {
  receivesFromAnyone();
  leaving::saidGoodbye(tables, 2, at(0));
  leaving::saidGoodbye(tables, 1, at(1));
  ASSERT_EQ(leaving::nextTick(tables), at(3001));
  link(2) = Reading::Open; // and brings the message
  tables.receives.clear();
  tables.receives_from_any = 0;
  leaving::tick(tables, at(3001));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(leaving::nextTick(tables), TimePoint::max());
  sends(second, 1);
  leaving::posted(tables, &with_rank_1, false, at(4000));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(LeavingTest, OnlyAReceiveMakesAReceiveFromAnyRankGiveUpOnALostPeer) {
  leaving::saidGoodbye(tables, 2, at(0));
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  ASSERT_TRUE(quiet());
  link(2) = Reading::Ended;
  receivesFromAnyone();
  leaving::posted(tables, &with_rank_1, false, at(50)); // say, a message to oneself
  leaving::tick(tables, at(3040));
  EXPECT_EQ(action().kind, Kind::Doubt) << "rank 1 is lost, and has not said that it leaves";
}

// It has said nothing: its link to this rank may come yet, and if it does not, what broke is the reason.
TEST_F(LeavingTest, AnOperationThatWaitsForALostPeerFailsWithWhatBroke) {
  for (const bool comes : {false, true}) {
    beginAgainWithoutRank1();
    leaving::tick(tables, at(3040));
    ASSERT_EQ(action().kind, Kind::Doubt);
    receives(second, 1);
    leaving::posted(tables, &with_rank_1, false, at(4000));
    link(1) = comes ? Reading::Open : Reading::NotOpened;
    leaving::tick(tables, at(6999));
    EXPECT_TRUE(quiet());
    leaving::tick(tables, at(7000));
    if (comes) {
      EXPECT_TRUE(quiet()) << "so few bytes come without credit";
      continue;
    }
    const ErrorRecord record = action().record;
    EXPECT_EQ(record.code, ErrorCode::ConnectionReset) << record.text();
    EXPECT_NE(record.summary.find("although that rank is still there"), std::string::npos) << record.summary;
  }
}

// Credit travels on the link that broke. The peer's own link never ends while that rank lives.
TEST_F(LeavingTest, AnOperationThatTakesCreditFailsAtOnceIfThePeerIsLost) {
  const int64_t eager_nbytes = tables.limits.eager_nbytes;
  for (const bool begun : {false, true}) {
    for (const Reading reading : {Reading::Open, Reading::NotOpened}) {
      for (const int64_t nbytes : {eager_nbytes, eager_nbytes + 1}) {
        beginAgainWithoutRank1();
        link(1) = reading;
        if (begun) {
          receives(second, 1, nbytes);
        } else {
          receivesMessage(1, static_cast<size_t>(nbytes));
        }
        leaving::posted(tables, &with_rank_1, !begun, at(50));
        if (nbytes == eager_nbytes) {
          EXPECT_TRUE(quiet()) << begun;
        } else {
          EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset) << begun;
        }
      }
    }
  }
}

// Nor does the room in the pool that this rank would give back.
TEST_F(LeavingTest, SmallOperationsFailAtOnceIfALostPeerHasNoRoomForThem) {
  const int64_t nbytes = tables.limits.eager_nbytes;
  for (const int64_t used : {0, 4}) {
    for (const bool begun : {false, true}) {
      beginAgainWithoutRank1();
      link(1) = Reading::Open;
      tables.peer(1).eager_used = used * tables.limits.cost(nbytes);
      for (int64_t i = used; i < 16; ++i) {
        if (begun) {
          receives(someOperation(i), 1, nbytes);
        } else {
          receivesMessage(1, static_cast<size_t>(nbytes), static_cast<uint64_t>(i));
        }
        leaving::posted(tables, &with_rank_1, !begun, at(50));
        EXPECT_TRUE(quiet()) << i;
      }
      receivesMessage(1, 0, 17);
      leaving::posted(tables, &with_rank_1, true, at(50));
      EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset) << begun;
    }
  }
}

// A receive that begins is in both tables for a moment.
TEST_F(LeavingTest, AReceiveThatBeginsTakesTheRoomOfALostPeerOnce) {
  const int64_t nbytes = tables.limits.eager_nbytes;
  beginAgainWithoutRank1();
  link(1) = Reading::Open;
  for (uint64_t ticket = 1; ticket <= 16; ++ticket) {
    receivesMessage(1, static_cast<size_t>(nbytes), ticket);
  }
  const std::shared_ptr<Operation> begins = tables.receives.at(1);
  begins->identify(OperationId{7, -1}, nullptr, 1, 0);
  receives(begins, 1, nbytes);
  leaving::posted(tables, &with_rank_1, true, at(50));
  EXPECT_TRUE(quiet());
  receivesMessage(1, 0, 17);
  leaving::posted(tables, &with_rank_1, true, at(50));
  EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset);
}

// It counts in the pool already.
TEST_F(LeavingTest, WhatHasArrivedOfALostPeerTakesNoMoreRoom) {
  const int64_t nbytes = tables.limits.eager_nbytes;
  for (const int64_t frames : {1, 2}) { // the first has begun to arrive
    beginAgainWithoutRank1();
    link(1) = Reading::Open;
    for (int64_t i = 1; i <= 15; ++i) {
      receives(someOperation(i), 1, nbytes);
    }
    const int64_t first_nbytes = nbytes / frames;
    const int64_t total = nbytes - (frames - 1) * tables.limits.cost(0);
    Schedule schedule;
    for (int64_t begin = 0; begin < total; begin += first_nbytes) {
      Step& step = schedule.steps.emplace_back();
      step.kind = StepKind::Recv;
      step.recv_peer = 1;
      step.dst = Region{Buffer::Output, begin, std::min(first_nbytes, total - begin)};
    }
    Operation::Request request;
    request.id = {16, 16};
    request.schedule = prepare(std::move(schedule));
    const auto arrives = std::make_shared<Operation>(std::move(request));
    receives(arrives, 1, total);
    rowOf(arrives).incoming.back().frames = static_cast<size_t>(frames);
    rowOf(arrives).incoming.back().passed = 1;
    tables.peer(1).eager_in = tables.limits.cost(first_nbytes);
    leaving::posted(tables, &with_rank_1, false, at(50));
    EXPECT_TRUE(quiet()) << frames;
    receivesMessage(1, 0, 17);
    leaving::posted(tables, &with_rank_1, true, at(50));
    EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset) << frames;
  }
}

// It was granted when the link had broken: nothing that an operation waited for was due when the peer was lost.
TEST_F(LeavingTest, CreditForALostPeerDoesNotReachIt) {
  for (const int64_t nbytes : {tables.limits.eager_nbytes, tables.limits.eager_nbytes + 1}) {
    beginAgainWithoutRank1();
    link(1) = Reading::Open;
    const int operations = nbytes == tables.limits.eager_nbytes ? 17 : 1;
    for (int i = 0; i < operations; ++i) {
      const auto operation = someOperation(i);
      receives(operation, 1, nbytes);
      rowOf(operation).incoming.back().limit = nbytes;
    }
    leaving::posted(tables, &with_rank_1, false, at(50));
    EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset) << nbytes;
  }
}

TEST_F(LeavingTest, AnOperationThatComesWhileALostPeerIsDoubtedIsCheckedAfterwards) {
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  receives(second, 1);
  leaving::posted(tables, &with_rank_1, false, at(1000));
  leaving::tick(tables, at(3040));
  ASSERT_EQ(action().kind, Kind::Doubt);
  leaving::tick(tables, at(6040));
  EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset);
}

TEST_F(LeavingTest, AReceiveFromAnyRankThatHasOnlyALostPeerFailsWithWhatBroke) {
  leaving::saidGoodbye(tables, 2, at(0));
  link(2) = Reading::Ended;
  leaving::writingBroke(tables, 1, peerDead(1), at(0));
  leaving::tick(tables, at(40));
  receivesFromAnyone();
  leaving::tick(tables, at(3040));
  EXPECT_EQ(action().kind, Kind::Doubt);
  leaving::tick(tables, at(6040));
  const ErrorRecord record = action().record;
  EXPECT_EQ(record.code, ErrorCode::ConnectionReset) << record.text();
}

} // namespace
} // namespace pycomm
