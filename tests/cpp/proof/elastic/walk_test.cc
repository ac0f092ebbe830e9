#include "proof/elastic/walk.h"

#include <gtest/gtest.h>

namespace pycomm::elastic::sim {
namespace {

void expectAllOrders(const Scope& scope, size_t at_least) {
  const Walked walked = walk(scope);
  EXPECT_EQ(walked.wrong, "");
  EXPECT_GT(walked.states, at_least);
  EXPECT_GT(walked.decided, 0U);
  EXPECT_GT(walked.committed, 0U); // of the ends, some with the step and some without
  EXPECT_LT(walked.committed, walked.ends);
}

TEST(ElasticWalk, OneOfThreeDiesAndTheKernelSaysSo) {
  for (int dies = 0; dies < 3; ++dies) {
    Scope scope;
    scope.dies = dies;
    scope.ticks = 0;
    expectAllOrders(scope, 100'000);
  }
}

TEST(ElasticWalk, OneOfThreeDiesWithoutACertificate) {
  for (const int dies : {0, 2}) {
    Scope scope;
    scope.dies = dies;
    scope.certified = false;
    scope.ticks = 1;
    expectAllOrders(scope, 100'000);
  }
}

TEST(ElasticWalk, OneOfTwoDiesOrIsSuspectedAlthoughItLives) {
  for (const bool certified : {false, true}) {
    Scope scope;
    scope.processes = 2;
    scope.dies = 0;
    scope.certified = certified;
    scope.suspects = 1;
    scope.suspected = 0;
    scope.ticks = 3;
    expectAllOrders(scope, 100'000);
  }
}

} // namespace
} // namespace pycomm::elastic::sim
