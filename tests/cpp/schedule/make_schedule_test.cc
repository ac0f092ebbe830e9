// Requests without meaning, the table behind Algorithm::Auto, and what a schedule looks like.
#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "group_run.h"
#include "schedule/partition.h"
#include "schedule/select.h"

namespace pycomm::testing {
namespace {

ScheduleRequest request(Collective kind, int32_t size = 4, int64_t numel = 8) {
  ScheduleRequest made;
  made.kind = kind;
  made.size = size;
  made.numel = numel;
  made.root = 0;
  made.rank = 1;
  made.dtype = DType::Float32;
  made.reduce_op = ReduceOp::Sum;
  return made;
}

void expectRefused(const ScheduleRequest& refused, ErrorCode code, const std::string& part) {
  try {
    (void)makeSchedule(refused);
    ADD_FAILURE() << "accepted; expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, code) << error.what();
    EXPECT_NE(error.record().summary.find(part), std::string::npos) << error.what();
    EXPECT_FALSE(error.record().hint.empty());
    EXPECT_EQ(error.record().rank, -1)
        << "a schedule has ranks of a group, a record those of the job: the group sets it";
  }
}

constexpr auto kInvalid = ErrorCode::InvalidArgument;
constexpr auto kUnsupported = ErrorCode::Unsupported;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

TEST(Requests, RanksAndRoots) {
  auto bad = request(Collective::AllReduce, 0);
  expectRefused(bad, kInvalid, "size is 0");
  bad = request(Collective::AllReduce);
  bad.rank = 4;
  expectRefused(bad, kInvalid, "rank 4 is not in [0, 4)");
  bad.rank = -1;
  expectRefused(bad, kInvalid, "rank -1 is not in [0, 4)");
  bad = request(Collective::Broadcast);
  bad.root = -1;
  expectRefused(bad, kInvalid, "broadcast: root -1 is not in [0, 4)");
  bad.root = 4;
  expectRefused(bad, kInvalid, "root 4 is not in [0, 4)");
  bad = request(Collective::Send);
  bad.root = 4;
  expectRefused(bad, kInvalid, "peer 4 is not in [0, 4)");
  bad = request(static_cast<Collective>(99));
  expectRefused(bad, kInvalid, "unknown collective 99");
}

TEST(Requests, CountsOfElements) {
  auto bad = request(Collective::AllReduce, 4, -1);
  expectRefused(bad, kInvalid, "numel is -1");
  expectRefused(request(Collective::AllReduce, 4, kHuge / 2), kInvalid, "more bytes than 63 bits");
  expectRefused(request(Collective::AllGather, 64, kHuge / 100), kInvalid, "more bytes than 63 bits");
  bad = request(Collective::AllGather);
  bad.counts = {1, 2, 3};
  expectRefused(bad, kInvalid, "counts has 3 entries for 4 ranks");
  bad.counts = {1, 2, 3, -4};
  expectRefused(bad, kInvalid, "counts is -4");
  bad.counts = {kHuge / 8, kHuge / 8, kHuge / 8, 0};
  expectRefused(bad, kInvalid, "more bytes than 63 bits");
  bad = request(Collective::AllReduce);
  bad.counts = {1, 1, 1, 1};
  expectRefused(bad, kInvalid, "counts have no meaning");
  bad = request(Collective::AllGather);
  bad.recv_counts = {1, 1, 1, 1};
  expectRefused(bad, kInvalid, "recv_counts have no meaning");
  bad = request(Collective::AllToAll);
  bad.counts = {1, 2, 3, 4};
  expectRefused(bad, kInvalid, "only one of counts and recv_counts");
  bad.recv_counts = {1, 3, 3, 4};
  expectRefused(bad, kInvalid, "differ for this rank itself: 2 and 3");
}

TEST(Requests, DTypesAndOptions) {
  auto bad = request(Collective::AllReduce);
  bad.reduce_op = ReduceOp::None;
  expectRefused(bad, kInvalid, "no reduce op");
  bad.reduce_op = ReduceOp::Avg;
  bad.dtype = DType::Int32;
  expectRefused(bad, kUnsupported, "AVG of int32 is undefined");
  bad = request(Collective::AllReduce);
  bad.dtype = static_cast<DType>(200);
  expectRefused(bad, kInvalid, "unknown dtype");
  bad = request(Collective::AllReduce);
  bad.codec = Codec::Int8;
  bad.dtype = DType::Int32;
  expectRefused(bad, kUnsupported, "cannot encode int32 as int8");
  bad.dtype = DType::Float16;
  expectRefused(bad, kUnsupported, "cannot encode float16 as int8");
  bad.dtype = DType::Float32;
  bad.codec = Codec::Float16;
  bad.algorithm = Algorithm::Ring;
  expectRefused(bad, kUnsupported, "has no ring algorithm that encodes");
  bad.kind = Collective::AllGather;
  expectRefused(bad, kUnsupported, "cannot encode float32 as fp16");
  bad = request(Collective::Barrier);
  bad.algorithm = Algorithm::Ring;
  expectRefused(bad, kUnsupported, "barrier has no ring algorithm");
  bad = request(Collective::AllReduce);
  bad.segment_nbytes = 0;
  expectRefused(bad, kInvalid, "segment_nbytes is 0");
  bad.segment_nbytes = 1 << 18;
  bad.pipeline_frames = 0;
  expectRefused(bad, kInvalid, "pipeline_frames is 0");
  bad.pipeline_frames = 257;
  expectRefused(bad, kInvalid, "pipeline_frames is 257");
}

TEST(Requests, TooManySteps) {
  auto bad = request(Collective::AllReduce, 2, int64_t{1} << 40);
  bad.algorithm = Algorithm::Ring;
  bad.segment_nbytes = 4;
  expectRefused(bad, kInvalid, "needs more than 4194304 steps");
}

TEST(Requests, FramesStayBelowTheWiresLimit) {
  auto large = request(Collective::AllReduce, 2, 50 << 20);
  large.segment_nbytes = kHuge;
  for (const auto algorithm : {Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::Direct}) {
    large.algorithm = algorithm;
    for (const Step& step : makeSchedule(large).steps) {
      EXPECT_LE(step.src.numel * 4, 1 << 20);
      EXPECT_LE(step.dst.numel * 4, 1 << 20);
    }
  }
}

TEST(Requests, OneRankCopies) {
  for (const auto kind :
       {Collective::AllReduce,
        Collective::Broadcast,
        Collective::AllGather,
        Collective::Reduce,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::Gather,
        Collective::Scatter}) {
    auto alone = request(kind, 1);
    alone.rank = 0;
    const Schedule schedule = makeSchedule(alone);
    ASSERT_EQ(schedule.steps.size(), 1U) << collectiveName(kind);
    EXPECT_EQ(schedule.steps[0].kind, StepKind::Copy);
    EXPECT_EQ(schedule.steps[0].dst.numel, 8);
  }
  auto barrier = request(Collective::Barrier, 1);
  barrier.rank = 0;
  EXPECT_TRUE(makeSchedule(barrier).steps.empty());
}

Algorithm chosen(Collective kind, int32_t size, int64_t nbytes, bool encoded = false) {
  return selectAlgorithm({kind, size, nbytes, 256 << 10, encoded});
}

TEST(Select, Table) {
  EXPECT_EQ(chosen(Collective::AllReduce, 4, 0), Algorithm::RecursiveDoubling);
  EXPECT_EQ(chosen(Collective::AllReduce, 4, 32 << 10), Algorithm::RecursiveDoubling);
  EXPECT_EQ(chosen(Collective::AllReduce, 4, (32 << 10) + 1), Algorithm::Ring);
  EXPECT_EQ(chosen(Collective::AllReduce, 4, 4, true), Algorithm::Direct);
  EXPECT_EQ(chosen(Collective::Broadcast, 8, 0), Algorithm::BinomialTree);
  EXPECT_EQ(chosen(Collective::Broadcast, 8, 3 << 18), Algorithm::BinomialTree); // 3 segments: 9 against 9
  EXPECT_EQ(chosen(Collective::Reduce, 8, 4 << 18), Algorithm::Ring); // 4 segments: 12 against 10
  EXPECT_EQ(chosen(Collective::Broadcast, 2, kHuge), Algorithm::BinomialTree); // the same edge either way
  EXPECT_EQ(chosen(Collective::AllGather, 2, 1), Algorithm::Ring); // one round either way
  EXPECT_EQ(chosen(Collective::AllGather, 3, 64 << 10), Algorithm::Bruck);
  EXPECT_EQ(chosen(Collective::AllGather, 8, 64 << 10), Algorithm::RecursiveDoubling);
  EXPECT_EQ(chosen(Collective::AllGather, 8, (64 << 10) + 1), Algorithm::Ring);
  EXPECT_EQ(chosen(Collective::ReduceScatter, 2, 1), Algorithm::Ring);
  EXPECT_EQ(chosen(Collective::ReduceScatter, 4, 64 << 10), Algorithm::Direct);
  EXPECT_EQ(chosen(Collective::ReduceScatter, 5, 64 << 10), Algorithm::RecursiveHalving);
  EXPECT_EQ(chosen(Collective::ReduceScatter, 5, (64 << 10) + 1), Algorithm::Ring);
  EXPECT_EQ(chosen(Collective::AllToAll, 3, 1), Algorithm::Pairwise);
  EXPECT_EQ(chosen(Collective::Barrier, 3, 0), Algorithm::RecursiveDoubling);
}

TEST(Select, UnevenAllGathersHearEveryRank) {
  auto gather = request(Collective::AllGather, 3, 0);
  gather.algorithm = Algorithm::Auto;
  gather.counts = {0, 0, 1 << 20};
  EXPECT_EQ(makeSchedule(gather).algorithm, Algorithm::Ring);
  gather.counts = {0, 0, 1 << 10};
  EXPECT_EQ(makeSchedule(gather).algorithm, Algorithm::Ring);
}

// What keepsParts() promises, looked at step by step.
TEST(Select, PartsAreKeptWhereItSaysSo) {
  for (const auto kind :
       {Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::Gather,
        Collective::Scatter}) {
    for (const auto algorithm : {Algorithm::Ring, Algorithm::Direct, Algorithm::Pairwise}) {
      for (const int32_t size : {1, 2, 3, 8}) {
        auto wanted = request(kind, size, 0);
        wanted.rank = wanted.root = size - 1;
        wanted.algorithm = algorithm;
        wanted.segment_nbytes = 64;
        wanted.reduce_op = ReduceOp::PremulSum;
        for (int32_t rank = 0; rank < size; ++rank) {
          wanted.counts.push_back(rank == 1 ? 0 : 40 + rank);
        }
        if (kind == Collective::AllToAll) {
          wanted.recv_counts = wanted.counts;
        }
        const auto parts = Partition::ofParts(0, size, wanted.counts);
        const auto isWithin = [&](const Region& region, Buffer buffer, int64_t buffer_numel) {
          bool within = region.buffer != buffer || buffer_numel != parts.numel() || region.numel == 0;
          for (int32_t rank = 0; rank < size; ++rank) {
            const auto part = parts[rank];
            within =
                within || (region.offset >= part.offset && region.offset + region.numel <= part.offset + part.numel);
          }
          return within;
        };
        Schedule schedule;
        try {
          schedule = makeSchedule(wanted);
        } catch (const Error& error) {
          ASSERT_EQ(error.record().code, kUnsupported) << error.what(); // not every pair exists
          continue;
        }
        ASSERT_TRUE(keepsParts(kind, algorithm));
        for (const Step& step : schedule.steps) {
          for (const Region& region : {step.src, step.dst}) {
            EXPECT_TRUE(isWithin(region, Buffer::Input, inputNumel(wanted))) << collectiveName(kind);
            EXPECT_TRUE(isWithin(region, Buffer::Output, outputNumel(wanted))) << collectiveName(kind);
          }
        }
      }
    }
  }
  EXPECT_FALSE(keepsParts(Collective::AllGather, Algorithm::Bruck));
}

TEST(Select, SumsOfSmallFloatsAreRoundedOnce) {
  const auto chosenFor = [](DType dtype, ReduceOp op, int32_t size, Collective kind = Collective::AllReduce) {
    ScheduleRequest wanted;
    wanted.kind = kind;
    wanted.dtype = dtype;
    wanted.reduce_op = op;
    wanted.size = size;
    wanted.numel = 1 << 20;
    return makeSchedule(wanted).algorithm;
  };
  EXPECT_EQ(chosenFor(DType::Float16, ReduceOp::Avg, 3), Algorithm::Direct);
  EXPECT_EQ(chosenFor(DType::BFloat16, ReduceOp::Sum, 64), Algorithm::Direct);
  EXPECT_EQ(chosenFor(DType::Float16, ReduceOp::Sum, 65), Algorithm::Ring);
  EXPECT_EQ(chosenFor(DType::Float16, ReduceOp::Sum, 2), Algorithm::Ring); // one addition, one rounding
  EXPECT_EQ(chosenFor(DType::Float16, ReduceOp::Max, 3), Algorithm::Ring);
  EXPECT_EQ(chosenFor(DType::Float16, ReduceOp::Sum, 3, Collective::ReduceScatter), Algorithm::Direct);
  EXPECT_EQ(chosenFor(DType::Float32, ReduceOp::Sum, 3, Collective::ReduceScatter), Algorithm::Ring);
  EXPECT_EQ(chosenFor(DType::Float32, ReduceOp::Sum, 3), Algorithm::Ring);
}

TEST(Partition, IsBalancedAndComplete) {
  for (const int64_t numel : {0, 1, 5, 64, 1009}) {
    for (int32_t size = 1; size <= 64; ++size) {
      const Partition parts = Partition::balanced(numel, size);
      int64_t next = 0;
      for (int32_t rank = 0; rank < size; ++rank) {
        EXPECT_EQ(parts[rank].offset, next);
        EXPECT_LE(parts[0].numel - parts[rank].numel, 1);
        EXPECT_GE(parts[0].numel, parts[rank].numel);
        next += parts[rank].numel;
      }
      EXPECT_EQ(next, numel);
    }
  }
}

// A small machine in virtual time: a frame takes one unit on its edge, edges carry one frame at a time, and an
// arrived frame can go on after `latency`. Everything else is free. Returns when the last step ends.
double virtualTime(const std::vector<Schedule>& schedules, double latency) {
  const size_t size = schedules.size();
  std::vector<std::vector<double>> edge_free(size, std::vector<double>(size, 0.0));
  std::vector<std::vector<std::vector<double>>> arrivals(size, std::vector<std::vector<double>>(size));
  std::vector<std::vector<size_t>> taken(size, std::vector<size_t>(size, 0));
  std::vector<size_t> next(size, 0);
  double last = 0;
  for (bool moved = true; moved;) { // a ring's steps may run in listed order: each rank goes as far as it can
    moved = false;
    for (size_t rank = 0; rank < size; ++rank) {
      for (; next[rank] < schedules[rank].steps.size(); ++next[rank], moved = true) {
        const Step& step = schedules[rank].steps[next[rank]];
        double ready = 0;
        if (receives(step.kind)) {
          const auto from = static_cast<size_t>(step.recv_peer);
          if (taken[from][rank] == arrivals[from][rank].size()) {
            break;
          }
          ready = arrivals[from][rank][taken[from][rank]++];
        }
        if (sends(step.kind)) {
          double& free_at = edge_free[rank][static_cast<size_t>(step.send_peer)];
          free_at = std::max(free_at, ready) + 1;
          arrivals[rank][static_cast<size_t>(step.send_peer)].push_back(free_at + latency);
          ready = free_at;
        }
        last = std::max(last, ready);
      }
    }
  }
  return last;
}

TEST(Pipeline, TheRingKeepsItsLinksBusy) {
  for (const int32_t size : {2, 3, 4, 8}) {
    auto ring = request(Collective::AllReduce, size, 64 * 100 * size);
    ring.algorithm = Algorithm::Ring;
    ring.segment_nbytes = 256; // 100 segments a chunk
    const double frames = 100.0 * (2 * size - 2); // over every edge
    EXPECT_LE(virtualTime(schedulesOf(forAllRanks(ring)), 2.0), frames + 20);
    ring.pipeline_frames = 1; // one frame under way: every hop pays the latency
    EXPECT_GE(virtualTime(schedulesOf(forAllRanks(ring)), 2.0), frames * 1.4);
  }
}

TEST(Pipeline, TheChainMovesTheTensorOnce) {
  auto chain = request(Collective::Broadcast, 8, 64 * 100);
  chain.algorithm = Algorithm::Ring;
  chain.segment_nbytes = 256;
  EXPECT_LE(virtualTime(schedulesOf(forAllRanks(chain)), 1.0), 100 + 2 * 7);
}

} // namespace
} // namespace pycomm::testing
