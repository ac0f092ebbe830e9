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

// A reset swallowed the goodbye on its way to whoever reports a death.
TEST(Membership, AReportOfADeathDoesNotCountIfTheGoodbyeComesAnotherWay) {
  const TimePoint start = Clock::now();
  Membership membership(membershipConfig(0, 3), start);
  membership.controlClosed(1, "reset", start);
  membership.saidGoodbye(1, 2); // rank 2 passes it on
  membership.tick(start + milliseconds(5));
  EXPECT_FALSE(membership.failure());
  membership.reported(2, record(ErrorCode::PeerDead, 2, 1), start + milliseconds(6));
  membership.tick(start + milliseconds(11));
  EXPECT_FALSE(membership.failure());
  membership.reported(2, record(ErrorCode::PeerLeft, 2, 1), start + milliseconds(12));
  membership.tick(start + milliseconds(17));
  ASSERT_TRUE(membership.failure());
  EXPECT_EQ(membership.failure()->code, ErrorCode::PeerLeft);
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
