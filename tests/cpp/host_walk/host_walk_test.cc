// Every order in which the ranks of a HostPlane can load and store the words that they share.
#include <gtest/gtest.h>

#include "host_walk/scene.h"

namespace pycomm::testing {
namespace {

Act actOf(Collective kind, uint64_t rounds, ReduceOp op = ReduceOp::None, bool in_place = false) {
  Act act;
  act.kind = kind;
  act.rounds = rounds;
  act.op = op;
  act.in_place = in_place;
  act.root = kind == Collective::Broadcast ? 1 : -1;
  return act;
}

size_t walk(const Plot& plot) {
  HostScene scene(plot);
  const Walk::Found found = Walk(scene, plot.size).all(5000000);
  std::string name;
  for (const Act& act : plot.acts) {
    name += std::to_string(static_cast<int>(act.kind)) + "/" + std::to_string(act.rounds) + "/" +
        std::to_string(static_cast<int>(act.op)) + (act.in_place ? " in place " : " ");
  }
  EXPECT_EQ(found.wrong, "") << name;
  EXPECT_GT(found.runs, 0U);
  return found.states;
}

struct Case {
  Collective kind;
  ReduceOp op;
};
const Case kCases[] = {
    {Collective::AllReduce, ReduceOp::Sum},
    {Collective::AllReduce, ReduceOp::Avg},
    {Collective::AllReduce, ReduceOp::PremulSum},
    {Collective::ReduceScatter, ReduceOp::Sum},
    {Collective::ReduceScatter, ReduceOp::Avg},
    {Collective::ReduceScatter, ReduceOp::PremulSum},
    {Collective::AllGather, ReduceOp::None},
    {Collective::Broadcast, ReduceOp::None},
};

TEST(HostWalk, StagedRounds) {
  for (const Case& each : kCases) {
    for (uint64_t rounds = 1; rounds <= 3; ++rounds) {
      Plot plot;
      plot.acts = {actOf(each.kind, rounds, each.op)};
      EXPECT_GT(walk(plot), 100U);
    }
  }
}

} // namespace
} // namespace pycomm::testing
