#include "elastic/proposal.h"

#include <gtest/gtest.h>

namespace pycomm::elastic {
namespace {

Incarnation candidate(int i) {
  return {42, static_cast<uint64_t>(i) + 1};
}

std::vector<Incarnation> candidates(std::initializer_list<int> list) {
  std::vector<Incarnation> found;
  for (const int i : list) {
    found.push_back(candidate(i));
  }
  return found;
}

/// Promises of all members, which reach each other, and of newcomers, which all reach. They have committed step 3 and nothing more.
struct Promises {
  explicit Promises(int members, std::initializer_list<int> newcomers = {}) {
    for (int i = 0; i < members; ++i) {
      view.members.push_back(candidate(i));
      Message& promise = of(i);
      promise.step = {3, false, false};
      promise.newcomers = candidates(newcomers);
      for (size_t other = 0; other < static_cast<size_t>(members); ++other) {
        promise.reach.set(other);
      }
    }
    for (const int i : newcomers) {
      newcomer(i).step = {3, false, false};
      for (const int other : newcomers) {
        if (other != i) {
          newcomer(i).newcomers.push_back(candidate(other));
        }
      }
    }
  }
  Message& of(int member) {
    return proposal.promises[member];
  }
  Message& newcomer(int i) {
    return proposal.newcomers[candidate(i)];
  }
  /// Nothing passes between these two.
  void cut(int a, int b) {
    of(a).reach.reset(static_cast<size_t>(b));
    of(b).reach.reset(static_cast<size_t>(a));
  }
  [[nodiscard]] View next() const {
    return chooseNext(view, proposal, dead, ErrorCode::PeerDead).value_or(View());
  }

  View view;
  Proposal proposal;
  std::map<int, std::optional<Accepted>> dead;
};

TEST(ElasticProposal, TheOneWithMostMissingPairsIsDroppedOfSeveralTheHighest) {
  Promises promises(4);
  promises.cut(1, 2);
  EXPECT_EQ(promises.next().members, candidates({0, 1, 3}));
  promises.cut(1, 3);
  EXPECT_EQ(promises.next().members, candidates({0, 2, 3}));
}

// A member that dies after its promise has answered those that promised before. The last did not get its answer, and lives.
TEST(ElasticProposal, OfAPairTheOneThatWasNotHeardIsDropped) {
  Promises promises(4);
  promises.of(3).reach.reset(2);
  EXPECT_EQ(promises.next().members, candidates({0, 1, 3}));
  promises.of(3).reach.reset(1);
  EXPECT_EQ(promises.next().members, candidates({0, 3}));
}

TEST(ElasticProposal, WhoHasEndedSinceItsPromiseIsNoMember) {
  Promises promises(4);
  promises.cut(0, 1);
  promises.cut(0, 2);
  EXPECT_EQ(promises.next().members, candidates({1, 2, 3}));
  promises.dead = {{1, std::nullopt}, {2, std::nullopt}};
  EXPECT_EQ(promises.next().members, candidates({0, 3}));
}

TEST(ElasticProposal, TheStepThatWasUnderWayCountsIfAllWhoGoOnHaveFinishedIt) {
  Promises promises(3);
  for (int i = 0; i < 3; ++i) {
    promises.of(i).step = {3, true, i != 2};
  }
  EXPECT_EQ(promises.next().step, 3);
  promises.of(2).step.finished = true;
  EXPECT_EQ(promises.next().step, 4);
  promises.of(0).step = {4, false, false}; // it has committed what all had finished, and begins the next
  EXPECT_EQ(promises.next().step, 4);
}

TEST(ElasticProposal, WhoLeavesDoesSoWithItsStepAndStaysIfThatIsSummedAgain) {
  Promises promises(4);
  promises.of(1).leaving = Message::Leaving::WithItsStep;
  promises.of(1).step = {3, true, true};
  for (const int other : {0, 2, 3}) {
    promises.of(other).step = {3, true, other != 3};
  }
  EXPECT_EQ(promises.next().step, 3);
  EXPECT_EQ(promises.next().members, candidates({0, 1, 2, 3}));
  EXPECT_EQ(promises.next().left, MemberSet());
  promises.of(3).step.finished = true;
  EXPECT_EQ(promises.next().step, 4);
  EXPECT_EQ(promises.next().members, candidates({0, 2, 3}));
  EXPECT_EQ(promises.next().left, MemberSet(0b10));
  promises.of(1).step.finished = false;
  EXPECT_EQ(promises.next().step, 3);
  promises.of(1).step.finished = true;
  promises.cut(1, 0); // nobody has to reach who leaves
  EXPECT_EQ(promises.next().members, candidates({0, 2, 3}));
}

TEST(ElasticProposal, WhoHasLeftIsNotTakenForLost) {
  Promises promises(4);
  promises.of(0).leaving = Message::Leaving::WithItsStep;
  promises.of(1).leaving = Message::Leaving::AtOnce; // an error
  EXPECT_EQ(promises.next().members, candidates({2, 3}));
  EXPECT_EQ(promises.next().left, MemberSet(0b1));
  promises.dead = {{0, std::nullopt}}; // it has ended, after its promise
  EXPECT_EQ(promises.next().left, MemberSet(0b1));
  promises.proposal.promises.erase(0); // or before, with a goodbye
  promises.proposal.left.set(0);
  EXPECT_EQ(promises.next().left, MemberSet(0b1));
}

TEST(ElasticProposal, NewcomersComeBehindAndDoNotVote) {
  Promises promises(2, {2, 3});
  EXPECT_EQ(promises.next().members, candidates({0, 1, 2, 3}));
  EXPECT_EQ(promises.proposal.voters(), MemberSet(0b11));
  promises.of(0).leaving = Message::Leaving::WithItsStep;
  EXPECT_EQ(promises.next().members, candidates({1, 2, 3})); // rank 0 is a member
  promises.of(1).leaving = Message::Leaving::WithItsStep;
  EXPECT_EQ(promises.next().members, candidates({})); // they found no group
}

TEST(ElasticProposal, ANewcomerWithTheStateOfAnotherStepIsNotAdmitted) {
  Promises promises(2, {2});
  for (int i = 0; i < 2; ++i) {
    promises.of(i).step = {3, true, true}; // all commit step 4 now
  }
  EXPECT_EQ(promises.next().step, 4);
  EXPECT_EQ(promises.next().members, candidates({0, 1}));
  promises.of(1).step.finished = false;
  EXPECT_EQ(promises.next().step, 3);
  EXPECT_EQ(promises.next().members, candidates({0, 1, 2}));
  promises.newcomer(2).step.committed = 2;
  EXPECT_EQ(promises.next().members, candidates({0, 1}));
}

TEST(ElasticProposal, ANewcomerThatSomebodyDoesNotReachIsNotAdmitted) {
  Promises promises(2, {2, 3});
  promises.of(1).newcomers = candidates({3});
  EXPECT_EQ(promises.next().members, candidates({0, 1, 3}));
  promises.of(1).newcomers = candidates({2, 3});
  promises.newcomer(3).newcomers.clear(); // two that do not reach each other: the first of them
  EXPECT_EQ(promises.next().members, candidates({0, 1, 2}));
}

} // namespace
} // namespace pycomm::elastic
