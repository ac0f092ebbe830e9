// Every order in which the ranks of a HostPlane can load and store the words that they share.
#include <gtest/gtest.h>

#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "host_walk/scene.h"
#include "sanitized.h"

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

std::string nameOf(const Plot& plot) {
  std::string name = std::to_string(plot.size) + " ranks";
  const auto which = [&](const char* what, int rank) {
    name += rank < 0 ? "" : std::string(", ") + what + " " + std::to_string(rank);
  };
  which("leaver", plot.leaver);
  which("differs", plot.differs);
  which("late", plot.late);
  name += plot.sleeps ? ", sleep" : "";
  name += plot.enters ? ":" : ", have entered:";
  for (const Act& act : plot.acts) {
    name += std::string(" ") + collectiveName(act.kind) + " " + std::to_string(act.rounds) + " rounds" +
        (act.in_place ? " in place" : "") + " op " + std::to_string(static_cast<int>(act.op));
  }
  return name;
}

void walk(const Plot& plot) {
  const std::string name = nameOf(plot);
  const std::clock_t begin = std::clock();
  HostScene scene(plot);
  const Walk::Found found = Walk(scene, plot.size, plot.late).all(4000000);
  const double took = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  std::printf("%8zu states %6zu runs %6.2f s  %s\n", found.states, found.runs, took, name.c_str());
  EXPECT_EQ(found.wrong, "") << name;
  EXPECT_GT(found.states, 100U) << name;
  EXPECT_GT(found.runs, 0U) << name;
}

struct Case {
  Collective kind;
  ReduceOp op;
};
const std::vector<Case> kLarge = {
    {Collective::AllReduce, ReduceOp::Sum},
    {Collective::AllReduce, ReduceOp::PremulSum},
    {Collective::ReduceScatter, ReduceOp::Avg},
    {Collective::ReduceScatter, ReduceOp::PremulSum},
    {Collective::AllGather, ReduceOp::None},
    {Collective::Broadcast, ReduceOp::None},
};
const std::vector<Case> kFew = {
    {Collective::AllReduce, ReduceOp::Sum},
    {Collective::ReduceScatter, ReduceOp::PremulSum},
    {Collective::AllGather, ReduceOp::None},
    {Collective::Broadcast, ReduceOp::None},
};

const std::vector<Case>& kSome = kInFull ? kLarge : kFew;

TEST(HostWalk, Rounds) {
  for (const Case& each : kLarge) {
    for (uint64_t rounds = 1; rounds <= 5; ++rounds) {
      walk({2, {actOf(each.kind, rounds, each.op)}});
    }
  }
}

TEST(HostWalk, RoundsOfThreeRanks) {
  for (const Case& each : kSome) {
    for (uint64_t rounds = 1; rounds <= (kInFull ? 5 : 3);
         ++rounds) { // in the third a stage is written for the second time
      walk({3, {actOf(each.kind, rounds, each.op)}});
    }
  }
}

TEST(HostWalk, InPlace) {
  for (const Case& each : kLarge) {
    walk({2, {actOf(each.kind, 2, each.op, true)}});
  }
  walk({3, {actOf(Collective::AllReduce, 1, ReduceOp::Sum, true)}, -1, false, false});
  walk({3, {actOf(Collective::AllGather, 1, ReduceOp::None, true)}, -1, false, false});
}

// More operations than slots.
TEST(HostWalk, Small) {
  for (const Case& each : kFew) {
    const Act act = actOf(each.kind, 0, each.op);
    walk({2, {act, act, act}});
  }
  const Act barrier = actOf(Collective::Barrier, 0);
  walk({2, {barrier, actOf(Collective::Broadcast, 0), barrier}});
  walk({3, {barrier}});
}

// Each begins with the rounds of the one before.
TEST(HostWalk, OneAfterAnother) {
  const Act scattered = actOf(Collective::ReduceScatter, 3, ReduceOp::PremulSum);
  const Act gathered = actOf(Collective::AllGather, 1);
  const Act sent = actOf(Collective::Broadcast, 1);
  const Act in_place = actOf(Collective::AllReduce, 1, ReduceOp::Sum, true);
  walk({2, {sent, scattered}});
  walk({2, {in_place, gathered, sent}});
  walk({2, {in_place, in_place, gathered}});
}

TEST(HostWalk, OneThatLeavesOrFails) {
  for (int leaver = 0; leaver < 2; ++leaver) {
    for (const Case& each : kSome) {
      for (uint64_t rounds = 0; rounds <= (kInFull ? 5 : 2); ++rounds) {
        walk({2, {actOf(each.kind, rounds, each.op)}, leaver});
      }
      walk({2, {actOf(each.kind, 1, each.op, true)}, leaver});
    }
    walk({2, {actOf(Collective::ReduceScatter, 1, ReduceOp::Sum, true)}, leaver});
  }
}

TEST(HostWalk, OneOfThreeThatLeavesOrFails) {
  for (int leaver = 0; leaver < 3; ++leaver) {
    for (const Case& each : kFew) {
      walk({3, {actOf(each.kind, 0, each.op)}, leaver});
    }
  }
}

// A minute for each leaver.
class LeaverOfThree : public ::testing::TestWithParam<int> {};
TEST_P(LeaverOfThree, InFull) {
  for (const Case& each : kFew) {
    walk({3, {actOf(each.kind, 1, each.op)}, GetParam()});
    if (each.kind != Collective::AllReduce) { // whose walks come to no end
      walk({3, {actOf(each.kind, 2, each.op)}, GetParam()});
      walk({3, {actOf(each.kind, 1, each.op, true)}, GetParam()});
    }
  }
}
INSTANTIATE_TEST_SUITE_P(HostWalk, LeaverOfThree, ::testing::Range(0, kInFull ? 3 : 0));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LeaverOfThree);

TEST(HostWalk, OneThatWaitsIsWoken) {
  const Act barrier = actOf(Collective::Barrier, 0);
  walk({2, {actOf(Collective::AllReduce, 0, ReduceOp::Sum)}, 0, true});
  walk({2, {actOf(Collective::Broadcast, 0), barrier}, -1, true});
  walk({2, {barrier, barrier, barrier}, -1, true}); // waits for a slot that the other one has not done with
  walk({2, {actOf(Collective::AllReduce, 1, ReduceOp::Sum, true)}, -1, true});
  walk({2, {actOf(Collective::AllReduce, 1, ReduceOp::Sum)}, -1, true, false});
  for (int late = 0; late < 3; ++late) { // two of them wait for each other, then for the third
    walk({3, {barrier}, -1, true, true, -1, late});
  }
}

// Half a minute: host_mutations.py runs it.
TEST(HostWalk, DISABLED_EachOfThreeThatWaitIsWoken) {
  walk({3, {actOf(Collective::Barrier, 0)}, -1, true});
}

// These take seconds each: every fifth of them, and in full all.
TEST(HostWalk, Deep) {
  std::vector<Plot> plots;
  for (const Case& each : kFew) {
    plots.push_back({3, {actOf(each.kind, 1, each.op, true)}});
  }
  plots.push_back({4, {actOf(Collective::Broadcast, 2)}, -1, false, false});
  plots.push_back({4, {actOf(Collective::AllGather, 1)}, -1, false, false});
  plots.push_back({2, {actOf(Collective::AllReduce, 1, ReduceOp::Sum)}, 0, true});
  plots.push_back({2, {actOf(Collective::AllReduce, 1, ReduceOp::Sum, true)}, 0, true});
  for (size_t i = 0; i < plots.size(); i += kInFull ? 1 : 5) {
    walk(plots[i]);
  }
}

TEST(HostWalk, RanksThatDifferWriteNothing) {
  for (const Case& each : kFew) {
    walk({2, {actOf(each.kind, 0, each.op)}, -1, false, true, 1});
    walk({2, {actOf(each.kind, 1, each.op)}, -1, false, true, 1});
  }
}

} // namespace
} // namespace pycomm::testing
