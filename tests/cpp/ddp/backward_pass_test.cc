#include "ddp/backward_pass.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace pycomm {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Phase = BackwardPass::Phase;

TEST(BackwardPassTest, GradientsOfAnIdlePassStayLocal) {
  SharedState state(std::vector<bool>(3, true));
  BackwardPass pass(state, 1);
  EXPECT_EQ(pass.phase(), Phase::Idle);
  EXPECT_FALSE(pass.completes(0));
  pass.arm();
  EXPECT_FALSE(pass.completes(0));
}

TEST(BackwardPassTest, EachGradientOfAReducingPassCompletesItsParameter) {
  SharedState state(std::vector<bool>(3, true));
  BackwardPass pass(state, 1);
  pass.arm();
  pass.begin();
  EXPECT_TRUE(pass.reducing());
  EXPECT_TRUE(pass.completes(1));
  EXPECT_TRUE(pass.markReady(1));
  EXPECT_FALSE(pass.markReady(1)) << "a second gradient in one pass";
  EXPECT_THAT(pass.missing(), ElementsAre(0, 2));
  state.change([](SharedValues& values) { values.trained[0] = false; });
  EXPECT_THAT(pass.missing(), ElementsAre(2)) << "a frozen parameter is not missing";
  pass.reset();
  EXPECT_EQ(pass.phase(), Phase::Idle);
  EXPECT_TRUE(pass.markReady(1)) << "nothing is ready after reset()";
}

TEST(BackwardPassTest, EveryThirdPassReduces) {
  SharedState state(std::vector<bool>(1, true));
  BackwardPass pass(state, 3);
  std::vector<Phase> phases;
  std::vector<int64_t> accumulated;
  for (int i = 0; i < 4; ++i) {
    pass.reset();
    pass.arm();
    pass.begin();
    phases.push_back(pass.phase());
    state.commit();
    accumulated.push_back(state.now().accumulated);
  }
  EXPECT_THAT(phases, ElementsAre(Phase::Accumulating, Phase::Accumulating, Phase::Reducing, Phase::Accumulating));
  EXPECT_THAT(accumulated, ElementsAre(1, 2, 0, 1));
  state.change([](SharedValues& values) { values.accumulated = 2; }); // as a checkpoint had it
  EXPECT_TRUE(pass.countPass());
}

TEST(BackwardPassTest, APassWithoutDataReducesWithTheOthersAndIsNoneOfThisRank) {
  SharedState state(std::vector<bool>(1, true));
  BackwardPass pass(state, 2);
  pass.beginShadow();
  EXPECT_EQ(pass.phase(), Phase::Idle) << "the others only accumulate";
  EXPECT_FALSE(state.now().has_local);
  pass.beginShadow();
  EXPECT_TRUE(pass.reducing());
}

TEST(BackwardPassTest, AStaticGraphCountsItsFirstPassAndCompletesByTheLastGradientAfterIt) {
  SharedState state(std::vector<bool>(3, true));
  BackwardPass pass(state, 1);
  pass.setStaticGraph();
  pass.arm();
  pass.begin();
  ASSERT_TRUE(pass.counting());
  pass.count(0);
  pass.count(2);
  pass.count(2);
  pass.endCounting();
  EXPECT_FALSE(pass.counting());
  EXPECT_THAT(pass.unreachable(), ElementsAre(1));
  for (int step = 0; step < 2; ++step) {
    pass.reset();
    pass.arm();
    pass.begin();
    EXPECT_FALSE(pass.completes(2)) << "it gets a second gradient";
    EXPECT_TRUE(pass.completes(0));
    EXPECT_TRUE(pass.completes(2));
  }
}

TEST(BackwardPassTest, AFrozenParameterIsNotUnreachable) {
  SharedState state({true, false});
  BackwardPass pass(state, 1);
  pass.setStaticGraph();
  pass.count(0);
  pass.endCounting();
  EXPECT_THAT(pass.unreachable(), IsEmpty());
}

} // namespace
} // namespace pycomm
