#include <gtest/gtest.h>

#include "proof/elastic/world.h"

namespace pycomm::elastic::sim {
namespace {

// pycomm_agree runs many more.
TEST(ElasticSimulation, ASeedIsTheSameRunEachTime) {
  int64_t messages = 0;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    const Plan plan = drawPlan(seed);
    const Report first = run(plan);
    const Report second = run(plan, true);
    EXPECT_EQ(first.digest, second.digest) << seed;
    EXPECT_EQ(first.events, second.events) << seed;
    EXPECT_FALSE(second.trace.empty());
    messages += first.messages;
  }
  EXPECT_GT(messages, 1000);
}

class ElasticSeeds : public ::testing::TestWithParam<uint64_t> {};

TEST_P(ElasticSeeds, KeepsEveryPromise) {
  const Report report = run(drawPlan(GetParam()), true);
  EXPECT_TRUE(report.violations.empty()) << report.violations.front();
}

// Each breaks a promise if a rule of agreement_mutations.py is broken: a proposer does not wait for its own promise (362, 366), a newcomer
// promises as a member (5836, 41438), a survivor is dropped beside a member that has died (43519, 66959), an admission stays due in the next
// epoch (81, 116), or is made again if it fails (182, 227).
INSTANTIATE_TEST_SUITE_P(
    Regressions,
    ElasticSeeds,
    ::testing::Values(362, 366, 5836, 41438, 43519, 66959, 81, 116, 182, 227));

INSTANTIATE_TEST_SUITE_P(Some, ElasticSeeds, ::testing::Values(1, 2, 3, 5, 8, 13, 21, 34, 55, 89));

} // namespace
} // namespace pycomm::elastic::sim
