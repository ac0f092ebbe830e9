#include "engine/monitor/membership.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace pycomm {
namespace {

using std::chrono::milliseconds;

Membership::Config membershipConfig(int rank, int size) {
  Membership::Config config;
  config.rank = rank;
  config.neighbours = controlNeighbours(rank, size);
  for (int i = 0; i < size; ++i) {
    config.hosts.push_back("host" + std::to_string(i));
  }
  return config;
}

ErrorRecord record(ErrorCode code, int rank, int peer) {
  ErrorRecord record;
  record.code = code;
  record.rank = rank;
  record.peer = peer;
  return record;
}

TEST(ControlNeighbours, AreMutualAndReachEveryoneInAFewHops) {
  for (int size = 1; size <= 70; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      for (const int peer : controlNeighbours(rank, size)) {
        const std::vector<int> theirs = controlNeighbours(peer, size);
        EXPECT_NE(std::find(theirs.begin(), theirs.end(), rank), theirs.end()) << size << " " << rank << " " << peer;
      }
    }
    std::set<int> reached{0};
    for (int hop = 0; hop < 7; ++hop) {
      const std::set<int> before = reached;
      for (const int rank : before) {
        for (const int peer : controlNeighbours(rank, size)) {
          reached.insert(peer);
        }
      }
    }
    EXPECT_EQ(reached.size(), static_cast<size_t>(size));
  }
}

TEST(Membership, FloodsAtOnceAndDecidesAfterTheMergeWindow) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.noticed(record(ErrorCode::PeerDead, 0, 2), start);
  auto actions = membership.takeActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].kind, Membership::Action::Kind::Flood);
  membership.tick(start + milliseconds(4));
  EXPECT_FALSE(membership.failure());
  membership.tick(start + milliseconds(5));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->peer, 2);
}

TEST(Membership, KnowsWhenEachNeighbourWasHeard) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 8), start);
  membership.alive(1, start);
  membership.alive(2, start);
  membership.alive(7, start);
  membership.alive(1, start + milliseconds(100));
  EXPECT_TRUE(membership.saidGoodbye(7));
  const TimePoint nothing = TimePoint::max();
  const std::vector<TimePoint> expected = {
      nothing, start + milliseconds(100), start, nothing, nothing, nothing, nothing, nothing};
  EXPECT_EQ(membership.heardAt(), expected);
}

TEST(Membership, NewsThatComesWhenTheChoiceIsDueDoesNotCount) {
  // A rank whose thread comes late to its choice must not choose from more news than the others had.
  const TimePoint start = Clock::now();
  for (const int late_ms : {4, 5}) {
    Membership membership(membershipConfig(0, 4), start);
    membership.noticed(record(ErrorCode::PeerDead, 0, 2), start);
    membership.reported(3, record(ErrorCode::PeerDead, 3, 1), start + milliseconds(late_ms));
    membership.tick(start + milliseconds(5));
    ASSERT_TRUE(membership.failure());
    EXPECT_EQ(membership.failure()->peer, late_ms < 5 ? 1 : 2);
  }
}

// Ranks that chose in time have not heard from rank 1 either: all of them blame it.
TEST(Membership, ARankThatSpeaksOnceTheChoiceIsDueIsNotExcused) {
  const TimePoint start = Clock::now();
  for (const int speaker : {1, 3}) { // rank 1 passes another rank's report on, or another rank passes on that of rank 1
    for (const int late_ms : {4, 5}) {
      SCOPED_TRACE("from " + std::to_string(speaker) + " after " + std::to_string(late_ms) + " ms");
      Membership membership(membershipConfig(0, 4), start);
      membership.noticed(record(ErrorCode::PeerDead, 0, 1), start);
      membership.noticed(record(ErrorCode::PeerDead, 0, 2), start);
      membership.reported(speaker, record(ErrorCode::Aborted, speaker == 1 ? 3 : 1, 0), start + milliseconds(late_ms));
      membership.tick(start + milliseconds(5));
      ASSERT_TRUE(membership.failure());
      EXPECT_EQ(membership.failure()->peer, late_ms < 5 ? 2 : 1);
    }
  }
}

// The goodbye of rank 2 leaves rank 1's report, which now counts, and with it what it says of rank 1: that hangs up because of it.
TEST(Membership, ALateReportThatCountsAfterAllExcusesItsRank) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.alive(2, start);
  membership.controlClosed(2, "reset", start, true);
  const TimePoint late = start + 2 * kGoodbyeWithin;
  membership.reported(1, record(ErrorCode::Aborted, 1, 0), late);
  EXPECT_TRUE(membership.saidGoodbye(2));
  membership.tick(late);
  membership.noticed(record(ErrorCode::PeerDead, 0, 1), late);
  membership.tick(late + milliseconds(5));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->code, ErrorCode::Aborted);
}

// A loop that comes late reads a report of a failure and, behind it, the goodbye that explains the candidate whose choice was due.
TEST(Membership, NewsThatCameLateCountsOnceTheGoodbyeExplainsWhatWasToBeChosen) {
  const TimePoint start = Clock::now();
  for (const ErrorCode code : {ErrorCode::CollectiveMismatch, ErrorCode::Aborted}) {
    for (const int from : {-1, 1}) { // noticed here, or reported by a neighbour
      SCOPED_TRACE("code " + std::to_string(static_cast<int>(code)) + " from " + std::to_string(from));
      Membership membership(membershipConfig(0, 4), start);
      membership.alive(2, start);
      membership.controlClosed(2, "reset", start, true);
      static_cast<void>(membership.takeActions());
      const TimePoint late = start + 2 * kGoodbyeWithin;
      if (from < 0) {
        membership.noticed(record(code, 0, 1), late);
      } else {
        membership.reported(from, record(code, 1, 0), late);
      }
      EXPECT_TRUE(membership.saidGoodbye(2));
      EXPECT_LE(membership.nextTick(), late);
      membership.tick(late);
      size_t floods = 0;
      for (const Membership::Action& action : membership.takeActions()) {
        floods += action.kind == Membership::Action::Kind::Flood && action.record.code == code && action.except == from;
      }
      EXPECT_EQ(floods, 1U);
      membership.tick(late + milliseconds(25));
      ASSERT_TRUE(membership.failure());
      EXPECT_EQ(membership.failure()->code, code);
    }
  }
}

// Two doubts, and the report came between the times when they are due: the goodbye of the first leaves the second, which is not due yet.
TEST(Membership, NewsThatCameLateCountsBesideACandidateThatIsNotDueYet) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.alive(2, start);
  membership.alive(1, start);
  membership.controlClosed(2, "reset", start, true);
  membership.controlClosed(1, "reset", start + milliseconds(20), true);
  const TimePoint late = start + kGoodbyeWithin + milliseconds(1);
  membership.reported(3, record(ErrorCode::CollectiveMismatch, 3, 0), late);
  EXPECT_TRUE(membership.saidGoodbye(2));
  membership.tick(late);
  EXPECT_FALSE(membership.failure());
  membership.tick(late + milliseconds(25));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->code, ErrorCode::CollectiveMismatch);
}

TEST(Membership, ARankThatSpokeIsNotBlamedForHangingUp) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.noticed(record(ErrorCode::PeerDead, 0, 1), start); // 1 hung up on us …
  membership.reported(1, record(ErrorCode::PeerDead, 1, 3), start + milliseconds(2)); // … because 3 died
  membership.tick(start + milliseconds(5));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->peer, 3);
}

TEST(Membership, AllOrdersOfTheSameNewsGiveTheSameCulprit) {
  const std::vector<ErrorRecord> news = {
      record(ErrorCode::PeerDead, 1, 3),
      record(ErrorCode::PeerDead, 2, 3),
      record(ErrorCode::PeerDead, 0, 1),
      record(ErrorCode::Timeout, 2, 0),
  };
  std::vector<size_t> order{0, 1, 2, 3};
  do {
    const TimePoint start = Clock::now();
    Membership membership(membershipConfig(0, 4), start);
    for (const size_t i : order) {
      if (news[i].rank == 0) {
        membership.noticed(news[i], start);
      } else {
        membership.reported(news[i].rank, news[i], start);
      }
    }
    membership.tick(start + milliseconds(5));
    ASSERT_TRUE(membership.failure());
    EXPECT_EQ(membership.failure()->peer, 3);
    EXPECT_EQ(membership.failure()->rank, 1);
  } while (std::next_permutation(order.begin(), order.end()));
}

// Three ranks differ from the fourth, which differs from any of them: by the order alone it would be rank 0 who is odd.
TEST(Membership, WhoDiffersFromMostIsTheOddOne) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.reported(3, record(ErrorCode::CollectiveMismatch, 3, 0), start);
  membership.noticed(record(ErrorCode::CollectiveMismatch, 0, 3), start);
  membership.reported(1, record(ErrorCode::CollectiveMismatch, 1, 3), start);
  membership.tick(start + milliseconds(1000));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->peer, 3);
}

TEST(Membership, NewsIsPassedOnOnceAndNotBack) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.reported(1, record(ErrorCode::PeerDead, 1, 3), start);
  membership.reported(2, record(ErrorCode::PeerDead, 1, 3), start);
  const auto actions = membership.takeActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].except, 1);
}

TEST(Membership, TheFirstErrorSticks) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.noticed(record(ErrorCode::Timeout, 0, 2), start);
  membership.tick(start + milliseconds(5));
  membership.noticed(record(ErrorCode::CollectiveMismatch, 0, 1), start + milliseconds(6));
  membership.tick(start + milliseconds(20));
  EXPECT_EQ(membership.failure()->code, ErrorCode::Timeout);
}

TEST(Membership, AGoodbyeIsNoDeath) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 2), start);
  membership.saidGoodbye(1);
  membership.controlClosed(1, "closed", start);
  membership.tick(start + milliseconds(10000));
  EXPECT_FALSE(membership.failure());
}

TEST(Membership, AGoodbyeIsPassedOnOnce) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 16), start);
  EXPECT_TRUE(membership.saidGoodbye(5, 1)); // no neighbour
  EXPECT_FALSE(membership.saidGoodbye(5, 2));
  EXPECT_TRUE(membership.saidGoodbye(2));
  const std::vector<Membership::Action> actions = membership.takeActions();
  ASSERT_EQ(actions.size(), 2U);
  EXPECT_EQ(actions[0].kind, Membership::Action::Kind::Left);
  EXPECT_EQ(actions[0].left, 5);
  EXPECT_EQ(actions[0].except, 1);
  EXPECT_EQ(actions[1].left, 2);
  EXPECT_EQ(actions[1].except, 2);
  EXPECT_TRUE(membership.hasLeft(5));
  EXPECT_FALSE(membership.hasLeft(1));
}

// A reset swallowed the goodbye on its way to the rank that reports a death.
TEST(Membership, AReportOfADeathDoesNotCountIfTheGoodbyeComesAnotherWay) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 3), start);
  membership.controlClosed(1, "reset", start, true);
  EXPECT_EQ(membership.nextTick(), start + milliseconds(40));
  membership.tick(start + milliseconds(39));
  EXPECT_FALSE(membership.failure());
  membership.saidGoodbye(1, 2); // rank 2 passes it on
  membership.tick(start + milliseconds(40));
  EXPECT_FALSE(membership.failure());
  EXPECT_EQ(membership.nextTick(), start + milliseconds(500)) << "nothing is to be chosen";
  membership.reported(2, record(ErrorCode::PeerDead, 2, 1), start + milliseconds(46));
  membership.tick(start + milliseconds(51));
  EXPECT_FALSE(membership.failure());
  membership.reported(2, record(ErrorCode::PeerLeft, 2, 1), start + milliseconds(52));
  membership.tick(start + milliseconds(57));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->code, ErrorCode::PeerLeft);
}

TEST(Membership, AResetIsADeathAfter40MsWithoutAGoodbye) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 3), start);
  membership.controlClosed(1, "reset", start, true);
  membership.tick(start + milliseconds(39));
  EXPECT_FALSE(membership.failure());
  membership.tick(start + milliseconds(40));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->code, ErrorCode::PeerDead);
  EXPECT_STREQ(membership.failure()->phase.text(), "") << "the doubt is over";
}

// Else a rank that learns of the reset would fail, although the rank whose link it was gets the goodbye and goes on.
TEST(Membership, TheDoubtOfAResetIsPassedOn) {
  const TimePoint start = Clock::now();
  Membership whose(membershipConfig(0, 4), start);
  whose.controlClosed(1, "reset", start, true);
  const std::vector<Membership::Action> news = whose.takeActions();
  ASSERT_EQ(news.size(), 1U);

  Membership other(membershipConfig(2, 4), start);
  other.reported(0, news[0].record, start);
  other.tick(start + milliseconds(39));
  EXPECT_FALSE(other.failure());
  const std::vector<Membership::Action> passed = other.takeActions();
  ASSERT_EQ(passed.size(), 1U);
  EXPECT_EQ(passed[0].record.phase, news[0].record.phase) << "and so it goes on";
  other.saidGoodbye(1, 3);
  other.tick(start + milliseconds(10000));
  EXPECT_FALSE(other.failure());
}

// The kernel of the same host says that the process is gone, or its bulk link ends: nobody waits for a goodbye any more.
TEST(Membership, AProofOfTheDeathEndsTheDoubtHereAndElsewhere) {
  const TimePoint start = Clock::now();
  Membership whose(membershipConfig(0, 3), start);
  Membership other(membershipConfig(2, 3), start);
  whose.controlClosed(1, "reset", start, true);
  whose.controlClosed(1, "reset", start + milliseconds(9), true); // no proof
  EXPECT_EQ(whose.nextTick(), start + milliseconds(40));
  whose.controlClosed(1, "its process has ended", start + milliseconds(10));
  EXPECT_EQ(whose.nextTick(), start + milliseconds(15));
  const std::vector<Membership::Action> news = whose.takeActions();
  ASSERT_EQ(news.size(), 2U);
  EXPECT_EQ(news[1].kind, Membership::Action::Kind::Flood);

  other.reported(0, news[0].record, start);
  other.reported(0, news[1].record, start + milliseconds(11));
  EXPECT_EQ(other.nextTick(), start + milliseconds(16));
  other.reported(1, news[1].record, start + milliseconds(12));
  const std::vector<Membership::Action> passed = other.takeActions();
  ASSERT_EQ(passed.size(), 2U) << "each report once";
  EXPECT_STRNE(passed[0].record.phase.text(), "");
  EXPECT_STREQ(passed[1].record.phase.text(), "");

  Membership late(membershipConfig(0, 3), start);
  late.controlClosed(1, "reset", start, true);
  late.noticed(record(ErrorCode::PeerDead, 0, 1), start + milliseconds(39));
  EXPECT_EQ(late.nextTick(), start + milliseconds(40)) << "it does not make the choice later";
}

TEST(Membership, TheMergeWindowBeginsWithTheFirstReportThatIsCertain) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.controlClosed(1, "reset", start, true);
  membership.reported(2, record(ErrorCode::PeerDead, 2, 3), start + milliseconds(39));
  EXPECT_EQ(membership.nextTick(), start + milliseconds(44)) << "the others have as long as ever";
  membership.reported(2, record(ErrorCode::Timeout, 2, 3), start + milliseconds(41));
  EXPECT_EQ(membership.nextTick(), start + milliseconds(44));

  Membership sooner(membershipConfig(0, 4), start);
  sooner.controlClosed(1, "reset", start, true);
  sooner.reported(2, record(ErrorCode::Timeout, 2, 3), start + milliseconds(1));
  EXPECT_EQ(sooner.nextTick(), start + milliseconds(6));
  sooner.saidGoodbye(1);
  sooner.tick(start + milliseconds(6));
  ASSERT_TRUE(sooner.failure());
  EXPECT_EQ(sooner.failure()->code, ErrorCode::Timeout);
}

// A candidate that a goodbye explains takes its due time with it: the doubt about another rank has its own 40 ms.
TEST(Membership, AGoodbyeOfOneRankLeavesTheOthersTheirTime) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.controlClosed(1, "reset", start, true);
  membership.controlClosed(2, "reset", start + milliseconds(30), true);
  membership.saidGoodbye(1, 3);
  EXPECT_EQ(membership.nextTick(), start + milliseconds(70));
}

// A rank that passes on what has an explanation does not hang up because of it, and is blamed as ever.
TEST(Membership, AnExplainedReportExcusesNobody) {
  for (const bool goodbye_first : {true, false}) {
    const TimePoint start = Clock::now();
    Membership membership(membershipConfig(0, 5), start);
    if (goodbye_first) {
      membership.saidGoodbye(1);
    }
    membership.reported(2, record(ErrorCode::PeerDead, 2, 1), start);
    if (!goodbye_first) {
      membership.saidGoodbye(1);
    }
    membership.tick(start + milliseconds(10));
    membership.noticed(record(ErrorCode::PeerDead, 0, 2), start + milliseconds(20));
    membership.noticed(record(ErrorCode::Timeout, 0, 3), start + milliseconds(20));
    membership.tick(start + milliseconds(25));
    ASSERT_TRUE(membership.failure());
    EXPECT_EQ(membership.failure()->peer, 2) << goodbye_first;
  }
}

TEST(Membership, AGoodbyeAfterAFailureIsNotPassedOn) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 4), start);
  membership.noticed(record(ErrorCode::Timeout, 0, 2), start);
  membership.tick(start + milliseconds(5));
  static_cast<void>(membership.takeActions());
  EXPECT_TRUE(membership.saidGoodbye(1));
  EXPECT_TRUE(membership.hasLeft(1));
  EXPECT_TRUE(membership.takeActions().empty());
}

TEST(Membership, ADeathThatWasALeaveFailsAllRanks) {
  const TimePoint start = Clock::now();
  Membership early(membershipConfig(0, 4), start); // chooses before the goodbye of rank 2 comes
  Membership late(membershipConfig(1, 4), start);
  late.saidGoodbye(2);
  early.noticed(record(ErrorCode::PeerDead, 0, 2), start);
  late.reported(0, record(ErrorCode::PeerDead, 0, 2), start);
  early.tick(start + milliseconds(5));
  late.tick(start + milliseconds(50));
  ASSERT_TRUE(early.failure());
  EXPECT_FALSE(late.failure());
  static_cast<void>(early.takeActions());
  EXPECT_TRUE(early.saidGoodbye(2));
  const std::vector<Membership::Action> actions = early.takeActions();
  ASSERT_EQ(actions.size(), 1U);
  ASSERT_EQ(actions[0].kind, Membership::Action::Kind::Flood);
  late.reported(0, actions[0].record, start + milliseconds(60));
  late.tick(start + milliseconds(66));
  ASSERT_TRUE(late.failure());
  EXPECT_EQ(late.failure()->peer, 2);
  EXPECT_EQ(late.failure()->code, ErrorCode::PeerLeft);
  EXPECT_NE(
      late.failure()->summary.find("closed its process group, and rank 0 took that for the end"), std::string::npos)
      << late.failure()->summary;
}

TEST(Membership, ANeighbourThatMissesHeartbeatsIsSilent) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 3), start);
  membership.alive(1, start + milliseconds(100));
  EXPECT_FALSE(membership.isSilent(1, start + milliseconds(1100)));
  EXPECT_TRUE(membership.isSilent(1, start + milliseconds(1101)));
}

TEST(Membership, WhoSaidGoodbyeIsNotBlamedForALinkThatEnded) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 3), start);
  membership.saidGoodbye(1);
  membership.noticed(record(ErrorCode::PeerDead, 0, 1), start);
  membership.tick(start + milliseconds(5));
  EXPECT_FALSE(membership.failure());
  membership.noticed(record(ErrorCode::PeerLeft, 0, 1), start + milliseconds(6)); // and owed something
  membership.tick(start + milliseconds(11));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->code, ErrorCode::PeerLeft);
}

TEST(Membership, ALostLinkIsTroubleOnlyWhereThePeerIsStillThere) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 3), start);
  membership.doubted(record(ErrorCode::ConnectionReset, 0, 1), start); // not connected yet
  membership.alive(2, start);
  membership.saidGoodbye(2);
  membership.doubted(record(ErrorCode::ConnectionReset, 0, 2), start);
  membership.tick(start + milliseconds(5));
  EXPECT_FALSE(membership.failure());
  membership.alive(1, start + milliseconds(6));
  membership.doubted(record(ErrorCode::ConnectionReset, 0, 1), start + milliseconds(6));
  membership.tick(start + milliseconds(11));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->peer, 1);
}

TEST(Membership, SilenceIsNoticedAndAHeartbeatBreaksIt) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 2), start);
  for (int ms = 500; ms <= 5000; ms += 500) {
    membership.alive(1, start + milliseconds(ms));
    membership.tick(start + milliseconds(ms));
  }
  EXPECT_FALSE(membership.failure());
  for (int ms = 5500; ms <= 8600; ms += 100) {
    membership.tick(start + milliseconds(ms));
  }
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->code, ErrorCode::PeerUnresponsive);
  EXPECT_EQ(membership.failure()->peer, 1);
}

} // namespace
} // namespace pycomm
