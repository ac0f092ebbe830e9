#include "engine/monitor/departures.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>

#include "engine/operation/operation.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

GroupIdentity departuresIdentity(int size) {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = size;
  identity.name = "test";
  for (int rank = 0; rank < size; ++rank) {
    identity.hosts.push_back("host" + std::to_string(rank));
  }
  return identity;
}

std::unique_ptr<Operation> someOperation(int64_t sequence) {
  Operation::Request request;
  request.id = {static_cast<uint64_t>(sequence), sequence};
  request.descriptor.kind = Collective::AllReduce;
  return std::make_unique<Operation>(std::move(request));
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

/// What the operations of rank 0 still need, as the test says.
struct OpenDealings final : Departures::Dealings {
  using Reading = Departures::Reading;
  std::map<int, Reading> links; ///< those that are not NotOpened
  std::map<int, const Operation*> sends;
  std::map<int, const Operation*> receives;
  const Operation* from_anyone = nullptr;
  mutable std::set<int> asked; ///< peers that owing() was asked about

  static const Operation* of(const std::map<int, const Operation*>& some, int peer) {
    const auto found = some.find(peer);
    return found == some.end() ? nullptr : found->second;
  }
  [[nodiscard]] Reading reading(int peer) const noexcept override {
    const auto found = links.find(peer);
    return found == links.end() ? Reading::NotOpened : found->second;
  }
  [[nodiscard]] const Operation* owing(int peer) const noexcept override {
    asked.insert(peer);
    return of(sends, peer);
  }
  [[nodiscard]] const Operation* awaiting(int peer) const noexcept override {
    return of(receives, peer);
  }
  [[nodiscard]] const Operation* awaitingAnyone() const noexcept override {
    return from_anyone;
  }
};

class DeparturesTest : public ::testing::Test {
 protected:
  using Kind = Departures::Action::Kind;
  using Reading = Departures::Reading;

  [[nodiscard]] TimePoint at(int ms) const {
    return start_ + milliseconds(ms);
  }
  /// The one action that there is.
  Departures::Action action() {
    std::vector<Departures::Action> actions = departures.takeActions();
    EXPECT_EQ(actions.size(), 1U);
    return actions.empty() ? Departures::Action() : std::move(actions.front());
  }
  bool quiet() {
    return departures.takeActions().empty();
  }

  OpenDealings open;
  const std::unique_ptr<Operation> first = someOperation(1);
  const std::unique_ptr<Operation> second = someOperation(2);
  const PreparedSchedule with_rank_1 = scheduleWith(1);

 private:
  const TimePoint start_ = Clock::now();

 protected:
  Departures departures{departuresIdentity(3), open};
};

TEST_F(DeparturesTest, ARankThatNobodyNeedsLeavesInOrder) {
  departures.saidGoodbye(1, at(0));
  EXPECT_TRUE(departures.isAway(1));
  EXPECT_FALSE(departures.isAway(2));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(departures.nextTick(), TimePoint::max());
}

TEST_F(DeparturesTest, ALinkThatBrokeIsExplainedByAGoodbyeWithin40Ms) {
  open.sends[1] = nullptr;
  departures.writingBroke(1, peerDead(1), at(0));
  EXPECT_EQ(departures.nextTick(), at(40));
  departures.tick(at(39));
  EXPECT_TRUE(quiet());
  departures.saidGoodbye(1, at(39));
  EXPECT_EQ(departures.nextTick(), TimePoint::max());
  departures.tick(at(10000));
  EXPECT_TRUE(quiet());
}

TEST_F(DeparturesTest, WithoutAGoodbyeAnOperationThatStillSendsMakesItADeath) {
  open.sends[1] = first.get();
  departures.writingBroke(1, peerDead(1), at(0));
  departures.tick(at(40));
  const Departures::Action failure = action();
  EXPECT_EQ(failure.kind, Kind::Notice);
  EXPECT_EQ(failure.record.code, ErrorCode::PeerDead);
  EXPECT_EQ(failure.record.peer, 1);
  EXPECT_EQ(failure.record.cause, "EPIPE");
  EXPECT_FALSE(departures.isAway(1)) << "the group agrees on that, not this rank";
}

TEST_F(DeparturesTest, BytesThatThePeerOwesHave3SecondsToComeOnItsOwnLink) {
  open.receives[1] = first.get();
  open.links[1] = Reading::Open;
  departures.writingBroke(1, peerDead(1), at(0));
  departures.tick(at(40));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(departures.nextTick(), at(3040));
  departures.tick(at(3040));
  EXPECT_EQ(action().record.code, ErrorCode::PeerDead);
}

TEST_F(DeparturesTest, IfThatLinkHasEndedTheyDoNotCome) {
  open.receives[1] = first.get();
  open.links[1] = Reading::Ended;
  departures.writingBroke(1, peerDead(1), at(0));
  departures.tick(at(40));
  EXPECT_EQ(action().record.code, ErrorCode::PeerDead);
}

TEST_F(DeparturesTest, APeerThatNothingIsDueFromIsLostAndDoubtedAfter3Seconds) {
  departures.writingBroke(1, peerDead(1), at(0));
  departures.tick(at(40));
  EXPECT_TRUE(quiet());
  EXPECT_TRUE(departures.isAway(1));
  departures.tick(at(3039));
  EXPECT_TRUE(quiet());
  departures.tick(at(3040));
  const Departures::Action doubt = action();
  EXPECT_EQ(doubt.kind, Kind::Doubt);
  EXPECT_EQ(doubt.record.code, ErrorCode::ConnectionReset);
  EXPECT_NE(doubt.record.summary.find("although that rank is still there"), std::string::npos) << doubt.record.summary;
}

TEST_F(DeparturesTest, AnOperationThatNeedsALostPeerLaterFailsWithWhatBroke) {
  departures.writingBroke(1, peerDead(1), at(0));
  departures.tick(at(40));
  ASSERT_TRUE(quiet());
  open.sends[1] = second.get();
  departures.posted(&with_rank_1, false, at(50));
  EXPECT_EQ(action().record.code, ErrorCode::ConnectionReset);
}

// Else each call would look through all operations for each rank that has left.
TEST_F(DeparturesTest, AnOperationThatIsPostedIsCheckedForTheRanksOfItsScheduleOnly) {
  departures.saidGoodbye(1, at(0));
  departures.saidGoodbye(2, at(0));
  open.asked.clear();
  const PreparedSchedule with_rank_2 = scheduleWith(2);
  departures.posted(&with_rank_2, false, at(1));
  EXPECT_EQ(open.asked, std::set<int>{2});
  departures.posted(nullptr, true, at(2));
  EXPECT_EQ(open.asked, std::set<int>{2}) << "a receive from any rank";
}

TEST_F(DeparturesTest, AGoodbyeStillCountsAfterAPeerWasLost) {
  departures.writingBroke(1, peerDead(1), at(0));
  departures.tick(at(40));
  ASSERT_TRUE(quiet());
  departures.saidGoodbye(1, at(60));
  EXPECT_EQ(departures.nextTick(), TimePoint::max());
  open.sends[1] = second.get();
  departures.posted(&with_rank_1, false, at(70));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(DeparturesTest, AGoodbyeFailsTheFirstOperationThatHasToSendToThatRank) {
  open.sends[2] = second.get();
  departures.saidGoodbye(2, at(0));
  const ErrorRecord record = action().record;
  EXPECT_EQ(record.code, ErrorCode::PeerLeft);
  EXPECT_EQ(record.peer, 2);
  EXPECT_EQ(record.sequence, 2);
  EXPECT_NE(
      record.summary.find("Rank 2 on host2 closed its process group while all_reduce #2 still needs it."),
      std::string::npos)
      << record.summary;
}

TEST_F(DeparturesTest, AGoodbyeDoesNotEndWhatThePeersLinkStillBrings) {
  open.receives[1] = first.get();
  open.links[1] = Reading::Open;
  departures.saidGoodbye(1, at(0));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(departures.nextTick(), TimePoint::max()) << "its link is open: the end of that decides";
  open.links[1] = Reading::Ended;
  departures.readingEnded(1, peerDead(1), at(5));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(DeparturesTest, BytesThatAreChangedOnTheWayOfAPeerThatLeftAreNotItsFault) {
  ErrorRecord changed = peerDead(1);
  changed.code = ErrorCode::DataCorrupt;
  open.links[1] = Reading::Open;
  open.receives[1] = first.get();
  departures.saidGoodbye(1, at(0));
  ASSERT_TRUE(quiet());
  open.links[1] = Reading::Ended;
  departures.readingEnded(1, changed, at(5));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt);
}

TEST_F(DeparturesTest, ChangedBytesOfAPeerThatLeftEndTheFirstOperationThatMayNeedThem) {
  ErrorRecord changed = peerDead(1);
  changed.code = ErrorCode::DataCorrupt;
  departures.saidGoodbye(1, at(0));
  open.links[1] = Reading::Ended;
  departures.readingEnded(1, changed, at(5));
  EXPECT_TRUE(quiet()) << "nobody needs them yet";

  open.sends[1] = first.get();
  departures.posted(&with_rank_1, false, at(6));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft) << "a send to it does not";
  open.sends.clear();
  open.receives[1] = first.get();
  departures.posted(&with_rank_1, false, at(7));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt);
  open.receives.clear();
  open.from_anyone = first.get();
  departures.posted(nullptr, true, at(8));
  EXPECT_TRUE(quiet()) << "another rank may serve it";
  open.links[2] = Reading::Ended;
  departures.saidGoodbye(2, at(9));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt) << "no other rank may, any more";
}

TEST_F(DeparturesTest, ChangedBytesEndAReceiveFromAnyRankThatWaitsForThemPerhaps) {
  ErrorRecord changed = peerDead(1);
  changed.code = ErrorCode::DataCorrupt;
  open.from_anyone = first.get();
  departures.saidGoodbye(1, at(0));
  ASSERT_TRUE(quiet());
  open.links[1] = Reading::Ended;
  departures.readingEnded(1, changed, at(5));
  EXPECT_EQ(action().record.code, ErrorCode::DataCorrupt);
}

TEST_F(DeparturesTest, AGoodbyeMayOvertakeTheHelloOfTheLinkThatTheBytesComeOn) {
  open.receives[1] = first.get();
  departures.saidGoodbye(1, at(0));
  EXPECT_EQ(departures.nextTick(), at(3000));
  open.links[1] = Reading::Open;
  departures.tick(at(3000));
  EXPECT_TRUE(quiet()) << "the link has come";

  open.links.clear();
  departures.posted(&with_rank_1, false, at(3000));
  departures.tick(at(6000));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(DeparturesTest, TheEndOfAPeersLinkWithoutAGoodbyeIsADeathAtOnce) {
  departures.readingEnded(1, peerDead(1), at(0));
  EXPECT_EQ(action().record.code, ErrorCode::PeerDead);
}

TEST_F(DeparturesTest, AReceiveFromAnyRankFailsWhenAllHaveLeftAndNoLinkIsOpen) {
  open.from_anyone = first.get();
  open.links[1] = Reading::Ended;
  open.links[2] = Reading::Open;
  departures.saidGoodbye(1, at(0));
  EXPECT_TRUE(quiet()) << "rank 2 is there";
  departures.saidGoodbye(2, at(1));
  EXPECT_TRUE(quiet()) << "its link may bring a message";
  open.links[2] = Reading::Ended;
  departures.readingEnded(2, peerDead(2), at(2));
  const ErrorRecord record = action().record;
  EXPECT_EQ(record.code, ErrorCode::PeerLeft);
  EXPECT_EQ(record.peer, 2);
}

TEST_F(DeparturesTest, AReceiveFromAnyRankWaits3SecondsForALinkThatHasNotCome) {
  open.from_anyone = first.get();
  open.links[1] = Reading::Ended;
  departures.saidGoodbye(1, at(0));
  departures.saidGoodbye(2, at(1));
  EXPECT_TRUE(quiet());
  EXPECT_EQ(departures.nextTick(), at(3001));
  departures.tick(at(3001));
  EXPECT_EQ(action().record.code, ErrorCode::PeerLeft);
}

TEST_F(DeparturesTest, OnlyAReceiveMakesAReceiveFromAnyRankGiveUpOnALostPeer) {
  departures.saidGoodbye(2, at(0));
  departures.writingBroke(1, peerDead(1), at(0));
  departures.tick(at(40));
  ASSERT_TRUE(quiet());
  open.links[2] = Reading::Ended;
  open.from_anyone = first.get();
  departures.posted(&with_rank_1, false, at(50)); // say, a message to oneself
  departures.tick(at(3040));
  EXPECT_EQ(action().kind, Kind::Doubt) << "rank 1 is lost, and has not said that it leaves";
}

} // namespace
} // namespace pycomm
