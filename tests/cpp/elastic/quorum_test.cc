#include <gtest/gtest.h>

#include "elastic/view.h"

namespace pycomm::elastic {
namespace {

MemberSet setOf(unsigned bits) {
  return MemberSet(bits);
}

// Everything that safety needs of quorums, for up to 6 members. A value is decided when voters `a` have accepted a ballot that does not count
// `d1`. A later ballot, with a greater number, does not count `d2`, has promises of `p`, and knows what all in `d2` had accepted. So it
// knows of the decision if somebody in `a` is in `p` or in `d2`.
TEST(ElasticQuorum, ALaterBallotMeetsEveryDecision) {
  for (unsigned size = 1; size <= 6; ++size) {
    const unsigned sets = 1U << size;
    for (unsigned d1 = 0; d1 < sets; ++d1) {
      for (unsigned d2 = 0; d2 < sets; ++d2) {
        if (votesOf(setOf(d2)) < votesOf(setOf(d1))) {
          continue; // its ballot would be smaller
        }
        for (unsigned a = 0; a < sets; ++a) {
          if ((a & d1) != 0 || !isQuorum(setOf(a), size, setOf(d1))) {
            continue;
          }
          for (unsigned p = 0; p < sets; ++p) {
            if (isQuorum(setOf(p), size, setOf(d2))) {
              ASSERT_NE(a & (p | d2), 0U) << size << " members; " << d1 << " " << d2 << " " << a << " " << p;
            }
          }
        }
      }
    }
  }
}

TEST(ElasticQuorum, TwoHalvesThatKnowOfDifferentDeathsDoNotBothWin) {
  // Five members. One half knows that 0 has ended, the other that 4 has.
  EXPECT_FALSE(isQuorum(setOf(0b00110), 5, setOf(0b00001)));
  EXPECT_FALSE(isQuorum(setOf(0b01100), 5, setOf(0b00001)));
  EXPECT_TRUE(isQuorum(setOf(0b01001), 5, setOf(0b10000)));
}

TEST(ElasticQuorum, TheLowestBreaksATieAndTheDeadDoNotCount) {
  EXPECT_TRUE(isQuorum(setOf(0b0011), 4, {}));
  EXPECT_FALSE(isQuorum(setOf(0b1100), 4, {}));
  EXPECT_FALSE(isQuorum(setOf(0b10), 2, {}));
  EXPECT_TRUE(isQuorum(setOf(0b10), 2, setOf(0b01)));
  EXPECT_TRUE(isQuorum(setOf(0b10000000), 8, setOf(0b01111111))); // one of eight
  EXPECT_FALSE(isQuorum({}, 3, setOf(0b111)));
}

TEST(ElasticBallot, TheOneWithMoreVotesOfTheDeadIsGreater) {
  EXPECT_LT(Ballot(0, 7, 3), Ballot(2, 1, 0));
  EXPECT_LT(Ballot(2, 1, 3), Ballot(2, 2, 0));
  EXPECT_LT(Ballot(2, 2, 0), Ballot(2, 2, 1));
  const Ballot ballot(511, 4'000'000'000U, 255);
  EXPECT_EQ(ballot.deadVotes(), 511);
  EXPECT_EQ(ballot.round(), 4'000'000'000U);
  EXPECT_EQ(ballot.proposer(), 255);
  EXPECT_FALSE(Ballot().given());
}

} // namespace
} // namespace pycomm::elastic
