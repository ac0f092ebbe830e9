// The cost model against what can be computed by hand, and what it says of large groups.
#include <gtest/gtest.h>

#include <cmath>

#include "proof/schedule/cost_model.h"
#include "sanitized.h"
#include "schedule/topology_view.h"

namespace pycomm::testing {
namespace {

TopologyView topology(int32_t hosts, int32_t ranks_a_host) {
  std::vector<int32_t> host_of;
  for (int32_t rank = 0; rank < hosts * ranks_a_host; ++rank) {
    host_of.push_back(rank % hosts); // as no ring should be numbered
  }
  return TopologyView(host_of);
}

Cost costOn(const TopologyView& where, Algorithm algorithm, int64_t numel, const NetworkModel& network = {}) {
  ScheduleRequest request;
  request.kind = Collective::AllReduce;
  request.algorithm = algorithm;
  request.size = where.size();
  request.topology = &where;
  request.numel = numel;
  request.dtype = DType::Float32;
  request.reduce_op = ReduceOp::Sum;
  return costOf(request, network);
}

TEST(Cost, OfTwoRanksThatExchangeOneFrame) {
  NetworkModel network;
  network.latency_s = 1.0;
  network.nic_bytes_per_s = 100.0;
  network.message_s = 0.125;
  network.reduce_bytes_per_s = 400.0;
  network.header_nbytes = 0;
  // 400 bytes: sent after 0.125, 4 s on the NIC, 1 s in flight; received in 0.125 and added in 1 s.
  const Cost cost = costOn(topology(2, 1), Algorithm::RecursiveDoubling, 100, network);
  EXPECT_DOUBLE_EQ(cost.seconds, 0.125 + 4.0 + 1.0 + 0.125 + 1.0);
  EXPECT_EQ(cost.sent_nbytes, (std::vector<int64_t>{400, 400}));
  EXPECT_EQ(cost.received_nbytes, (std::vector<int64_t>{400, 400}));
}

TEST(Cost, SmallTensorsGrowAsTheLogarithmOfTheRanks) {
  const double two = costOn(topology(2, 1), Algorithm::Auto, 1).seconds;
  for (const int32_t size : {4, 16, 64, 256, 1024}) {
    const double rounds = std::log2(size);
    EXPECT_NEAR(costOn(topology(size, 1), Algorithm::Auto, 1).seconds, two * rounds, 0.05 * two * rounds) << size;
  }
  // A rank more than a power of two costs two more rounds, not a ring's thousand.
  EXPECT_LT(costOn(topology(1023, 1), Algorithm::Auto, 1).seconds, two * 12);
}

TEST(Cost, LargeTensorsCrossEachCardOnce) {
  struct Shape {
    int32_t hosts;
    int32_t ranks_a_host;
  };
  for (const Shape shape : {Shape{2, 1}, {2, 2}, {4, 8}, {16, 8}, {2, 64}, {128, 8}, {1024, 1}}) {
    if (kFewerSizes && shape.hosts > 16) {
      continue; // most of a minute together
    }
    const TopologyView where = topology(shape.hosts, shape.ranks_a_host);
    const int64_t numel = int64_t{8} << 20;
    const Cost cost = costOn(where, Algorithm::Auto, numel);
    const double bound = 2.0 * (shape.hosts - 1) / shape.hosts * static_cast<double>(numel) * 4;
    for (const int64_t nbytes : cost.sent_nbytes) {
      EXPECT_NEAR(static_cast<double>(nbytes), bound, 0.01 * bound) << where.text();
    }
    for (const int64_t nbytes : cost.received_nbytes) {
      EXPECT_NEAR(static_cast<double>(nbytes), bound, 0.01 * bound) << where.text();
    }
    if (shape.hosts <= 16) { // where chunks are large enough for their latency to hide
      EXPECT_LT(cost.seconds, 1.1 * bound / NetworkModel().nic_bytes_per_s) << where.text();
    }
  }
}

TEST(Cost, AFlatRingOverSeveralRanksAHostCostsMore) {
  const TopologyView where = topology(2, 4);
  const double flat = costOn(where, Algorithm::Ring, int64_t{8} << 20).seconds;
  const double by_slices = costOn(where, Algorithm::Hierarchical, int64_t{8} << 20).seconds;
  EXPECT_GT(flat, 1.6 * by_slices); // 1.75 times the bytes
}

} // namespace
} // namespace pycomm::testing
