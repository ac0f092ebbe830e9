// all_reduce, reduce and reduce_scatter in every algorithm: exact int64 sums against plain additions, for all sizes
// up to 64, while the interpreter proves order, windows and causes.
#include <gtest/gtest.h>

#include <numeric>

#include "base/error.h"
#include "group_run.h"

namespace pycomm::testing {
namespace {

ScheduleRequest reduction(Collective kind, Algorithm algorithm, int32_t size, int64_t numel) {
  ScheduleRequest request;
  request.kind = kind;
  request.algorithm = algorithm;
  request.size = size;
  request.numel = numel;
  request.dtype = DType::Int64;
  request.reduce_op = ReduceOp::Sum;
  return request;
}

std::vector<int64_t> sumOf(const std::vector<std::vector<int64_t>>& inputs) {
  std::vector<int64_t> sum(inputs.front().size(), 0);
  for (const auto& input : inputs) {
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += input[i];
    }
  }
  return sum;
}

/// Segment sizes and windows: everything in one segment, and two elements a segment with little room.
struct Cut {
  int64_t segment_nbytes;
  int32_t pipeline_frames;
};
const Cut kCuts[] = {{1 << 20, 4}, {16, 1}, {16, 2}, {8, 3}};

/// Runs `request` with every cut, in place and not. check(options, inputs, outputs).
template <typename Check>
void runAll(ScheduleRequest request, Check check) {
  for (const Cut& cut : kCuts) {
    const int64_t segments = request.numel * 8 / cut.segment_nbytes;
    if (request.size > 13 && (cut.pipeline_frames == 3 || (segments > 40 && request.algorithm != Algorithm::Ring))) {
      continue; // takes too long
    }
    request.segment_nbytes = cut.segment_nbytes;
    request.pipeline_frames = cut.pipeline_frames;
    const auto requests = forAllRanks(request);
    const auto inputs = distinctInputs(requests);
    for (const bool in_place : {false, true}) {
      RunOptions options;
      options.op = ReduceOp::Sum;
      options.in_place = in_place;
      // Only the ring needs room for all that it keeps under way.
      const bool ring = request.algorithm == Algorithm::Ring || request.algorithm == Algorithm::Auto;
      options.window_frames = ring ? static_cast<size_t>(request.pipeline_frames) : size_t{1};
      SCOPED_TRACE(label(request, options));
      ASSERT_NO_FATAL_FAILURE(check(requests, inputs, runGroup(requests, inputs, options)));
    }
  }
}

using Values = std::vector<std::vector<int64_t>>;
using Requests = std::vector<ScheduleRequest>;

class AllReduce : public ::testing::TestWithParam<Algorithm> {};

TEST_P(AllReduce, EveryRankGetsTheSum) {
  for (const int32_t size : allSizes()) {
    for (const int64_t numel : interestingNumels(size)) {
      runAll(
          reduction(Collective::AllReduce, GetParam(), size, numel),
          [](const Requests&, const Values& inputs, const Values& outputs) {
            const auto sum = sumOf(inputs);
            for (const auto& output : outputs) {
              ASSERT_EQ(output, sum);
            }
          });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(
    Algorithms,
    AllReduce,
    ::testing::Values(Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::Direct),
    [](const auto& test) { return std::string(algorithmName(test.param)); });

class Reduce : public ::testing::TestWithParam<Algorithm> {};

TEST_P(Reduce, TheRootGetsTheSum) {
  for (const int32_t size : allSizes()) {
    for (const int64_t numel : interestingNumels(size)) {
      auto request = reduction(Collective::Reduce, GetParam(), size, numel);
      request.root = static_cast<int32_t>((numel * 7 + size / 2) % size);
      runAll(request, [&](const Requests&, const Values& inputs, const Values& outputs) {
        ASSERT_EQ(outputs[static_cast<size_t>(request.root)], sumOf(inputs));
      });
    }
  }
}
TEST_P(Reduce, AnyRankCanBeRoot) {
  for (const int32_t size : {2, 3, 5, 8, 13}) {
    for (int32_t root = 0; root < size; ++root) {
      auto request = reduction(Collective::Reduce, GetParam(), size, 11);
      request.root = root;
      runAll(request, [&](const Requests&, const Values& inputs, const Values& outputs) {
        ASSERT_EQ(outputs[static_cast<size_t>(root)], sumOf(inputs));
      });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(
    Algorithms,
    Reduce,
    ::testing::Values(Algorithm::BinomialTree, Algorithm::Ring),
    [](const auto& test) { return std::string(algorithmName(test.param)); });

void expectParts(const Requests& requests, const Values& inputs, const Values& outputs) {
  const auto sum = sumOf(inputs);
  size_t begin = 0;
  for (size_t rank = 0; rank < requests.size(); ++rank) {
    const auto count = static_cast<size_t>(outputNumel(requests[rank]));
    const std::vector<int64_t> part(sum.begin() + begin, sum.begin() + begin + count);
    ASSERT_EQ(outputs[rank], part) << "rank " << rank;
    begin += count;
  }
  ASSERT_EQ(begin, sum.size());
}

class ReduceScatter : public ::testing::TestWithParam<Algorithm> {};

TEST_P(ReduceScatter, EveryRankGetsItsPartOfTheSum) {
  for (const int32_t size : allSizes()) {
    for (const int64_t numel : {0, 1, 2, 5}) {
      runAll(reduction(Collective::ReduceScatter, GetParam(), size, numel), expectParts);
    }
  }
}

TEST_P(ReduceScatter, PartsMayDifferAndBeEmpty) {
  for (const int32_t size : {1, 2, 3, 4, 6, 7, 16, 33}) {
    for (int32_t shape = 0; shape < 4; ++shape) {
      auto request = reduction(Collective::ReduceScatter, GetParam(), size, 0);
      for (int32_t rank = 0; rank < size; ++rank) {
        const int64_t shapes[] = {rank % 3, rank == size - 1 ? 29 : 0, rank * rank % 11, rank == 0 ? 41 : 1};
        request.counts.push_back(shapes[shape]);
      }
      runAll(request, expectParts);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Algorithms,
    ReduceScatter,
    ::testing::Values(Algorithm::Ring, Algorithm::RecursiveHalving, Algorithm::Direct, Algorithm::Auto),
    [](const auto& test) { return std::string(algorithmName(test.param)); });

TEST(OneRank, ScalesItsPremultipliedInput) {
  auto request = reduction(Collective::AllReduce, Algorithm::Auto, 1, 3);
  request.dtype = DType::Float64;
  request.reduce_op = ReduceOp::PremulSum;
  const auto outputs = runGroup<double>({request}, {{1.0, 2.0, 3.0}}, {ReduceOp::PremulSum, false, 1, {0.5}});
  EXPECT_EQ(outputs[0], (std::vector<double>{0.5, 1.0, 1.5}));
}

// In the ring a frame may be as many frames behind as the request says, and the edge has to hold that many. With less
// room, or listed in one wave, everyone would wait to send its own segments before it forwards the first one.
TEST(Ring, NeedsRoomForItsPipeline) {
  auto request = reduction(Collective::AllReduce, Algorithm::Ring, 4, 4000);
  request.segment_nbytes = 80; // 100 segments a chunk
  request.pipeline_frames = 4;
  const auto requests = forAllRanks(request);
  const auto inputs = distinctInputs(requests);
  EXPECT_NO_THROW((void)runGroup(requests, inputs, {ReduceOp::Sum, false, 4, {}}));
  EXPECT_NO_THROW((void)runGroup(requests, inputs, {ReduceOp::Sum, false, 100, {}}));
  EXPECT_THROW((void)runGroup(requests, inputs, {ReduceOp::Sum, false, 2, {}}), Error);
}

// Frames of 1 MiB, the largest: two fit the room that an edge always has, so only one is under way.
TEST(Ring, KeepsFewerOfLargeFramesUnderWay) {
  auto request = reduction(Collective::AllReduce, Algorithm::Ring, 3, 9 << 20);
  request.dtype = DType::UInt8;
  request.segment_nbytes = 4 << 20;
  std::vector<std::vector<uint8_t>> inputs;
  for (uint8_t rank = 0; rank < 3; ++rank) {
    inputs.emplace_back(9 << 20, static_cast<uint8_t>(rank + 1));
  }
  const auto outputs = runGroup(forAllRanks(request), inputs, {ReduceOp::Sum, false, 1, {}});
  EXPECT_EQ(outputs[1], std::vector<uint8_t>(9 << 20, 6));
}

} // namespace
} // namespace pycomm::testing
