// Schedules broken on purpose: the interpreter has to say what is wrong with each, and name the rank and the step.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "group_run.h"

namespace pycomm::testing {
namespace {

std::vector<Schedule> allReduce(Algorithm algorithm, int32_t size, int64_t segment_nbytes = 1 << 20) {
  ScheduleRequest request;
  request.kind = Collective::AllReduce;
  request.algorithm = algorithm;
  request.size = size;
  request.numel = 12;
  request.dtype = DType::Float32;
  request.reduce_op = ReduceOp::Sum;
  request.segment_nbytes = segment_nbytes;
  return schedulesOf(forAllRanks(request));
}

/// The interpreter's complaint, or "sound".
std::string verdict(const std::vector<Schedule>& schedules, bool in_place = false, size_t window_frames = 4) {
  std::vector<RankMemory> memory(schedules.size());
  for (auto& rank_memory : memory) {
    rank_memory.input.resize(48);
    rank_memory.output.resize(48);
  }
  try {
    interpret(schedules, ReduceOp::Sum, memory, in_place, window_frames);
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::Internal);
    return error.what();
  }
  return "sound";
}

void expectContains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "in: " << text;
}

size_t find(const Schedule& schedule, StepKind kind) {
  const auto at =
      std::find_if(schedule.steps.begin(), schedule.steps.end(), [&](const Step& step) { return step.kind == kind; });
  EXPECT_NE(at, schedule.steps.end());
  return static_cast<size_t>(at - schedule.steps.begin());
}

void dropDeps(Step& step) {
  step.deps_end = step.deps_begin;
}

TEST(Broken, UnbrokenOnesAreSound) {
  for (const auto algorithm : {Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::Direct}) {
    EXPECT_EQ(verdict(allReduce(algorithm, 4)), "sound");
    EXPECT_EQ(verdict(allReduce(algorithm, 4, 4), true), "sound");
  }
}

TEST(Broken, EveryDroppedDependencyIsFound) {
  int dropped = 0;
  for (const auto algorithm : {Algorithm::RecursiveDoubling, Algorithm::Direct}) {
    const auto whole = allReduce(algorithm, 3, 4);
    for (size_t rank = 0; rank < whole.size(); ++rank) {
      for (size_t s = 0; s < whole[rank].steps.size(); ++s) {
        if (whole[rank].steps[s].deps_begin == whole[rank].steps[s].deps_end) {
          continue;
        }
        auto broken = whole;
        dropDeps(broken[rank].steps[s]);
        ++dropped;
        const std::string text = verdict(broken, /*in_place=*/true);
        // Either memory is raced for, or what was to come from all ranks no longer does.
        EXPECT_TRUE(
            text.find("nothing says which one comes first") != std::string::npos ||
            text.find("before it has heard of") != std::string::npos)
            << algorithmName(algorithm) << " rank " << rank << " step " << s << ": " << text;
      }
    }
  }
  EXPECT_GT(dropped, 20);
}

TEST(Broken, ARaceOfInputAndOutputShowsOnlyInPlace) {
  auto schedules = allReduce(Algorithm::RecursiveDoubling, 2);
  dropDeps(schedules[1].steps[find(schedules[1], StepKind::RecvReduce)]);
  EXPECT_EQ(verdict(schedules, false), "sound"); // reading Input and writing Output, which are two
  const std::string text = verdict(schedules, true);
  expectContains(text, "rank 1, step 1 (recv_reduce 0 -> 1, 12 elements)");
  expectContains(text, "shares memory with rank 1, step 0");
}

TEST(Broken, OutputWrittenTooEarly) {
  auto schedules = allReduce(Algorithm::RecursiveDoubling, 4);
  Step& first_round = schedules[2].steps[find(schedules[2], StepKind::RecvReduce)];
  first_round.dst.buffer = Buffer::Output; // holds only two ranks' sum
  expectContains(verdict(schedules), "writes Output before it has heard of rank 0");
}

TEST(Broken, PartialSumsWrittenInTheRing) {
  auto schedules = allReduce(Algorithm::Ring, 3);
  Step& partial = schedules[0].steps[find(schedules[0], StepKind::RecvReduceSend)];
  partial.kind = StepKind::RecvReduceCopySend;
  partial.dst = {Buffer::Output, partial.src.offset, partial.src.numel};
  expectContains(verdict(schedules), "writes Output before it has heard of");
}

TEST(Broken, WrongCount) {
  auto schedules = allReduce(Algorithm::Ring, 3);
  schedules[1].steps[0].src.numel -= 1;
  expectContains(verdict(schedules), "gets a frame of another count or dtype from rank 1, step 0");
}

TEST(Broken, FramesInAnotherOrder) {
  auto schedules = allReduce(Algorithm::Ring, 3, 4);
  std::swap(schedules[0].steps[0], schedules[0].steps[schedules[0].steps.size() - 2]);
  EXPECT_NE(verdict(schedules), "sound");
}

TEST(Broken, FramesThatNobodySendsOrReceives) {
  auto schedules = allReduce(Algorithm::Ring, 3);
  schedules[0].steps.pop_back();
  expectContains(verdict(schedules), "sends a frame that nobody receives");
  schedules = allReduce(Algorithm::RecursiveDoubling, 3);
  schedules[1].steps.front().kind = StepKind::Copy;
  schedules[1].steps.front().dst = {Buffer::Output, 0, 12};
  expectContains(verdict(schedules), "waits for a frame that nobody sends");
}

// Both partners send only once they have received.
TEST(Broken, WaitingForEachOther) {
  auto schedules = allReduce(Algorithm::RecursiveDoubling, 2);
  for (auto& schedule : schedules) {
    std::swap(schedule.steps[0], schedule.steps[1]);
    schedule.steps[0].deps_begin = schedule.steps[0].deps_end = 0;
    schedule.deps = {0};
    schedule.steps[1].deps_begin = 0;
    schedule.steps[1].deps_end = 1;
  }
  const std::string text = verdict(schedules);
  expectContains(text, "rank 0, step 0 (recv_reduce 1 -> 0, 12 elements) waits for ever for its frame");
  expectContains(text, "which rank 1, step 1 (send 1 -> 0, 12 elements) sends");
}

TEST(Broken, TooLittleRoom) {
  auto schedules = allReduce(Algorithm::Ring, 3, 4); // 4 frames under way
  expectContains(verdict(schedules, false, 1), "window of 1 frames");
}

TEST(Broken, PlainMistakes) {
  const auto broken = [](const std::function<void(Schedule&)>& breakIt) {
    auto schedules = allReduce(Algorithm::RecursiveDoubling, 4);
    breakIt(schedules[3]);
    return verdict(schedules);
  };
  expectContains(broken([](Schedule& s) { s.deps[0] = 3; }), "which does not come before it");
  expectContains(broken([](Schedule& s) { s.steps[0].src.offset = 1; }), "leaves its buffer at element 13");
  expectContains(broken([](Schedule& s) { s.steps[1].dst.buffer = Buffer::Input; }), "writes Input");
  expectContains(broken([](Schedule& s) { s.steps[1].dst.numel = 3; }), "12 elements in src and 3 in dst");
  expectContains(broken([](Schedule& s) { s.scratch_dtype[0] = DType::Float64; }), "mixes two dtypes");
  expectContains(broken([](Schedule& s) { s.scratch_numel.clear(); }), "buffer that does not exist");
  expectContains(broken([](Schedule& s) { s.steps[0].send_peer = 3; }), "has no such peer: 3");
  expectContains(broken([](Schedule& s) { s.steps[0].send_peer = -1; }), "lacks a peer");
  expectContains(broken([](Schedule& s) { s.rank = 0; }), "rank 3 has one of another operation");
  expectContains(
      broken([](Schedule& s) {
        s.steps[1].dst = s.steps[1].src = {static_cast<Buffer>(16), 0, 12};
        s.steps[1].dst.offset = 0;
        s.steps[1].src.offset = 2;
        s.scratch_numel[0] = 14;
      }),
      "writes over a part of what it reads");
}

TEST(Broken, ABarrierThatSomeoneSkips) {
  std::vector<Schedule> schedules;
  for (int32_t rank = 0; rank < 4; ++rank) {
    ScheduleRequest request;
    request.rank = rank;
    request.size = 4;
    schedules.push_back(makeSchedule(request));
    dropDeps(schedules.back().steps[2]); // the second round no longer passes on what the first one heard
  }
  std::vector<RankMemory> memory(4);
  try {
    interpret(schedules, ReduceOp::None, memory);
    ADD_FAILURE() << "sound";
  } catch (const Error& error) {
    expectContains(error.what(), "ends the barrier without having heard of rank");
  }
}

} // namespace
} // namespace pycomm::testing
