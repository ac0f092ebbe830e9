// Collectives that only move elements: every output is computed here from the inputs, for all sizes up to 64.
#include <gtest/gtest.h>

#include "group_run.h"

namespace pycomm::testing {
namespace {

using Values = std::vector<std::vector<int64_t>>;
using Requests = std::vector<ScheduleRequest>;

ScheduleRequest movement(Collective kind, Algorithm algorithm, int32_t size, int64_t numel) {
  ScheduleRequest request;
  request.kind = kind;
  request.algorithm = algorithm;
  request.size = size;
  request.numel = numel;
  request.dtype = DType::Int64;
  return request;
}

/// Runs with one large segment and with two elements a segment, with little room.
template <typename Check>
void runAll(const Requests& requests, bool in_place_too, Check check) {
  for (const int64_t segment_nbytes : {1 << 20, 16}) {
    for (const int32_t frames : {1, 2}) {
      Requests cut = requests;
      for (auto& request : cut) {
        request.segment_nbytes = segment_nbytes;
        request.pipeline_frames = frames;
      }
      const auto inputs = distinctInputs(cut);
      for (const bool in_place : {false, true}) {
        if (in_place && !in_place_too) {
          continue;
        }
        RunOptions options;
        options.in_place = in_place;
        options.window_frames = static_cast<size_t>(frames);
        SCOPED_TRACE(label(cut.front(), options));
        ASSERT_NO_FATAL_FAILURE(check(inputs, runGroup(cut, inputs, options)));
      }
    }
  }
}

class Broadcast : public ::testing::TestWithParam<Algorithm> {};

TEST_P(Broadcast, EveryRankGetsTheRootsTensor) {
  for (const int32_t size : allSizes()) {
    for (const int64_t numel : interestingNumels(size)) {
      auto request = movement(Collective::Broadcast, GetParam(), size, numel);
      request.root = static_cast<int32_t>((numel * 5 + size / 3) % size);
      runAll(forAllRanks(request), true, [&](const Values& inputs, const Values& outputs) {
        for (const auto& output : outputs) {
          ASSERT_EQ(output, inputs[static_cast<size_t>(request.root)]);
        }
      });
    }
  }
}
TEST_P(Broadcast, AnyRankCanBeRoot) {
  for (const int32_t size : {2, 3, 6, 8, 11}) {
    for (int32_t root = 0; root < size; ++root) {
      auto request = movement(Collective::Broadcast, GetParam(), size, 9);
      request.root = root;
      runAll(forAllRanks(request), true, [&](const Values& inputs, const Values& outputs) {
        for (const auto& output : outputs) {
          ASSERT_EQ(output, inputs[static_cast<size_t>(root)]);
        }
      });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(
    Algorithms,
    Broadcast,
    ::testing::Values(Algorithm::BinomialTree, Algorithm::Ring, Algorithm::Auto),
    [](const auto& test) { return std::string(algorithmName(test.param)); });

std::vector<int64_t> joined(const Values& values) {
  std::vector<int64_t> all;
  for (const auto& part : values) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// Counts of different shapes: mixed, one rank has all, nobody has any.
std::vector<std::vector<int64_t>> unevenCounts(int32_t size) {
  std::vector<std::vector<int64_t>> shapes(4);
  for (int32_t rank = 0; rank < size; ++rank) {
    shapes[0].push_back((rank * 5 + 3) % 7);
    shapes[1].push_back(rank == size / 2 ? 37 : 0);
    shapes[2].push_back(0);
    shapes[3].push_back(rank == size - 1 ? 0 : 23 - rank % 20);
  }
  return shapes;
}

class AllGather : public ::testing::TestWithParam<Algorithm> {};

TEST_P(AllGather, EveryRankGetsAllParts) {
  for (const int32_t size : allSizes()) {
    for (const int64_t numel : {0, 1, 2, 7}) {
      runAll(
          forAllRanks(movement(Collective::AllGather, GetParam(), size, numel)),
          true,
          [](const Values& inputs, const Values& outputs) {
            for (const auto& output : outputs) {
              ASSERT_EQ(output, joined(inputs));
            }
          });
    }
  }
}

TEST_P(AllGather, PartsMayDifferAndBeEmpty) {
  for (const int32_t size : {1, 2, 3, 4, 6, 7, 16, 33}) {
    for (const auto& counts : unevenCounts(size)) {
      auto request = movement(Collective::AllGather, GetParam(), size, 0);
      request.counts = counts;
      runAll(forAllRanks(request), true, [](const Values& inputs, const Values& outputs) {
        for (const auto& output : outputs) {
          ASSERT_EQ(output, joined(inputs));
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Algorithms,
    AllGather,
    ::testing::Values(Algorithm::Ring, Algorithm::Bruck, Algorithm::RecursiveDoubling, Algorithm::Auto),
    [](const auto& test) { return std::string(algorithmName(test.param)); });

TEST(Gather, TheRootGetsAllParts) {
  for (const int32_t size : allSizes()) {
    for (size_t shape = 0; shape < 5; ++shape) {
      auto request = movement(Collective::Gather, Algorithm::Auto, size, 5);
      request.root = (size * 2 / 3 + static_cast<int32_t>(shape)) % size;
      if (shape < 4) {
        request.counts = unevenCounts(size)[shape];
      }
      runAll(forAllRanks(request), false, [&](const Values& inputs, const Values& outputs) {
        ASSERT_EQ(outputs[static_cast<size_t>(request.root)], joined(inputs));
      });
    }
  }
}

TEST(Scatter, EveryRankGetsItsPart) {
  for (const int32_t size : allSizes()) {
    for (size_t shape = 0; shape < 5; ++shape) {
      auto request = movement(Collective::Scatter, Algorithm::Auto, size, 5);
      request.root = (size / 3 + static_cast<int32_t>(shape)) % size;
      if (shape < 4) {
        request.counts = unevenCounts(size)[shape];
      }
      runAll(forAllRanks(request), false, [&](const Values& inputs, const Values& outputs) {
        ASSERT_EQ(joined(outputs), inputs[static_cast<size_t>(request.root)]);
      });
    }
  }
}

TEST(AllToAll, EveryPairExchangesItsBlock) {
  for (const int32_t size : allSizes()) {
    for (const int64_t each : {0, 1, 3, -1}) {
      // Rank a sends count(a, b) elements to rank b: as many to all, or for -1 uneven ones.
      const bool even = each >= 0;
      const auto count = [&](int32_t a, int32_t b) { return even ? each : int64_t{(a * 3 + b * 5) % 6}; };
      Requests requests = forAllRanks(movement(Collective::AllToAll, Algorithm::Auto, size, even ? each : 3));
      for (int32_t rank = 0; !even && rank < size; ++rank) {
        for (int32_t other = 0; other < size; ++other) {
          requests[static_cast<size_t>(rank)].counts.push_back(count(rank, other));
          requests[static_cast<size_t>(rank)].recv_counts.push_back(count(other, rank));
        }
      }
      runAll(requests, false, [&](const Values& inputs, const Values& outputs) {
        Values expected(static_cast<size_t>(size));
        for (int32_t a = 0; a < size; ++a) {
          auto at = inputs[static_cast<size_t>(a)].begin();
          for (int32_t b = 0; b < size; ++b) {
            expected[static_cast<size_t>(b)].insert(expected[static_cast<size_t>(b)].end(), at, at + count(a, b));
            at += count(a, b);
          }
        }
        ASSERT_EQ(outputs, expected);
      });
    }
  }
}

TEST(PointToPoint, TheTensorArrives) {
  for (const int64_t numel : {0, 1, 5, 100}) {
    auto send = movement(Collective::Send, Algorithm::Auto, 2, numel);
    send.root = 1;
    auto recv = movement(Collective::Recv, Algorithm::Auto, 2, numel);
    recv.rank = 1;
    recv.root = 0;
    send.segment_nbytes = recv.segment_nbytes = 24;
    // The interpreter wants one collective; the two sides of an edge are all that matters here.
    auto schedules = schedulesOf({send, recv});
    schedules[1].kind = schedules[0].kind;
    std::vector<RankMemory> memory(2);
    const auto inputs = distinctInputs({send});
    memory[0].input = toBytes(inputs[0]);
    memory[1].output.resize(memory[0].input.size());
    interpret(schedules, ReduceOp::None, memory);
    EXPECT_EQ(fromBytes<int64_t>(memory[1].output), inputs[0]);
  }
}

TEST(Barrier, NobodyEndsBeforeAllHaveEntered) {
  for (const int32_t size : allSizes()) {
    ScheduleRequest request;
    request.size = size;
    std::vector<RankMemory> memory(static_cast<size_t>(size));
    EXPECT_NO_THROW(interpret(schedulesOf(forAllRanks(request)), ReduceOp::None, memory)) << size;
  }
}

} // namespace
} // namespace pycomm::testing
