// Ranks that share hosts: any launcher's numbering, hosts with different numbers of ranks. Exact int64 sums against plain
// additions while the interpreter proves order, windows and causes; and what crosses each host's network card.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "base/error.h"
#include "group_run.h"
#include "proof/schedule/global_graph.h"
#include "schedule/select.h"
#include "schedule/topology_view.h"

namespace pycomm::testing {
namespace {

using Hosts = std::vector<int32_t>; // by rank

Hosts byHost(const std::vector<int32_t>& ranks_of_host) {
  Hosts hosts;
  for (size_t host = 0; host < ranks_of_host.size(); ++host) {
    hosts.insert(hosts.end(), static_cast<size_t>(ranks_of_host[host]), static_cast<int32_t>(host));
  }
  return hosts;
}

/// The same hosts, numbered as a launcher never would.
Hosts shuffled(Hosts hosts, uint32_t seed) {
  std::mt19937 random(seed);
  for (size_t i = hosts.size(); i > 1; --i) {
    std::swap(hosts[i - 1], hosts[random() % i]);
  }
  return hosts;
}

/// Group sizes up to 64 on one to many hosts, even and uneven, in order and not; every size where `all_sizes`.
std::vector<Hosts> hostsToTry(bool all_sizes) {
  std::vector<Hosts> all = {
      byHost({2, 2}),
      {0, 1, 0, 1},
      byHost({1, 3}),
      byHost({3, 1, 2}),
      byHost({1, 1, 1}),
      byHost({5}),
      byHost({2}),
      byHost({4, 4, 4}),
      byHost({1, 7, 2, 2}),
  };
  for (uint32_t size = 2; size <= 64; size += all_sizes || size < 9 ? 1 : 11) {
    if (!isTried(static_cast<int32_t>(size))) {
      continue;
    }
    std::mt19937 random(size);
    Hosts hosts;
    const uint32_t count = 1 + random() % std::min(size, 9U);
    for (uint32_t rank = 0; rank < size; ++rank) {
      hosts.push_back(static_cast<int32_t>(rank < count ? rank : random() % count));
    }
    all.push_back(shuffled(hosts, size));
    if (size % 8 == 0) {
      all.push_back(shuffled(byHost({static_cast<int32_t>(size / 2), static_cast<int32_t>(size / 2)}), size));
      all.push_back(byHost(std::vector<int32_t>(size / 4, 4)));
    }
  }
  return all;
}

struct Case {
  Collective kind;
  Algorithm algorithm;
};

ScheduleRequest requestOf(const Case& test, const TopologyView& topology, int64_t numel) {
  ScheduleRequest request;
  request.kind = test.kind;
  request.algorithm = test.algorithm;
  request.size = topology.size();
  request.topology = &topology;
  request.numel = numel;
  request.dtype = DType::Int64;
  request.reduce_op = ReduceOp::Sum;
  if (test.kind == Collective::Broadcast || test.kind == Collective::Reduce) {
    request.root = static_cast<int32_t>((numel * 5 + request.size / 3) % request.size);
  }
  return request;
}

using Values = std::vector<std::vector<int64_t>>;

/// What every rank must end up with.
Values expected(const std::vector<ScheduleRequest>& requests, const Values& inputs) {
  const ScheduleRequest& any = requests.front();
  std::vector<int64_t> sum(inputs.front().size());
  std::vector<int64_t> all;
  for (const auto& input : inputs) {
    for (size_t i = 0; i < std::min(sum.size(), input.size()); ++i) {
      sum[i] += input[i];
    }
    all.insert(all.end(), input.begin(), input.end());
  }
  Values outputs;
  size_t begin = 0;
  for (const auto& request : requests) {
    const auto count = static_cast<size_t>(outputNumel(request));
    switch (any.kind) {
      case Collective::Broadcast:
        outputs.push_back(inputs[static_cast<size_t>(any.root)]);
        break;
      case Collective::AllGather:
        outputs.push_back(all);
        break;
      case Collective::ReduceScatter:
        outputs.emplace_back(
            sum.begin() + static_cast<int64_t>(begin), sum.begin() + static_cast<int64_t>(begin + count));
        begin += count;
        break;
      default:
        outputs.push_back(count == 0 ? std::vector<int64_t>() : sum);
    }
  }
  return outputs;
}

void runAll(const Case& test, const Hosts& hosts, int64_t numel) {
  const TopologyView topology(hosts);
  struct Cut {
    int64_t segment_nbytes;
    int32_t frames;
  };
  for (const Cut cut : {Cut{1 << 20, 4}, Cut{16, 1}, Cut{8, 3}}) {
    if (hosts.size() > 9 && (cut.frames == 3 || (cut.frames == 4 && hosts.size() > 24))) {
      continue; // takes too long
    }
    ScheduleRequest request = requestOf(test, topology, numel);
    request.segment_nbytes = cut.segment_nbytes;
    request.pipeline_frames = cut.frames;
    if (numel % 2 == 1 && (test.kind == Collective::AllGather || test.kind == Collective::ReduceScatter)) {
      for (int32_t rank = 0; rank < request.size; ++rank) {
        request.counts.push_back(rank * 7 % 5);
      }
    }
    const auto requests = forAllRanks(request);
    const auto inputs = distinctInputs(requests);
    for (const bool in_place : {false, true}) {
      RunOptions options;
      options.op = ReduceOp::Sum;
      options.in_place = in_place;
      options.window_frames = static_cast<size_t>(cut.frames);
      SCOPED_TRACE(label(request, options) + " on " + topology.text());
      ASSERT_EQ(runGroup(requests, inputs, options), expected(requests, inputs));
    }
  }
}

class ByHost : public ::testing::TestWithParam<Case> {};

TEST_P(ByHost, AnyNumberingGivesTheSameResult) {
  const bool all_sizes = GetParam().algorithm == Algorithm::Hierarchical && GetParam().kind == Collective::AllReduce;
  for (const Hosts& hosts : hostsToTry(all_sizes)) {
    const auto size = static_cast<int64_t>(hosts.size());
    if (GetParam().kind == Collective::AllGather || GetParam().kind == Collective::ReduceScatter) {
      for (const int64_t numel : {0, 1, 4}) { // of each part
        if (hosts.size() <= 9 || (numel == 4 && hosts.size() <= 20)) { // more takes too long
          ASSERT_NO_FATAL_FAILURE(runAll(GetParam(), hosts, numel));
        }
      }
      continue;
    }
    for (const int64_t numel : {int64_t{0}, int64_t{1}, 2 * size + 3, int64_t{64}}) {
      if (hosts.size() > 9 && numel != (hosts.size() % 2 == 0 ? 64 : 2 * size + 3)) {
        continue; // takes too long
      }
      ASSERT_NO_FATAL_FAILURE(runAll(GetParam(), hosts, numel));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Algorithms,
    ByHost,
    ::testing::Values(
        Case{Collective::AllReduce, Algorithm::Hierarchical},
        Case{Collective::AllReduce, Algorithm::Ring},
        Case{Collective::AllReduce, Algorithm::RecursiveDoubling},
        Case{Collective::Broadcast, Algorithm::Ring},
        Case{Collective::Broadcast, Algorithm::BinomialTree},
        Case{Collective::Reduce, Algorithm::Ring},
        Case{Collective::Reduce, Algorithm::BinomialTree},
        Case{Collective::AllGather, Algorithm::Ring},
        Case{Collective::AllGather, Algorithm::Hierarchical},
        Case{Collective::ReduceScatter, Algorithm::Ring},
        Case{Collective::ReduceScatter, Algorithm::Hierarchical}),
    [](const auto& test) {
      return std::string(collectiveName(test.param.kind)) + "_" + algorithmName(test.param.algorithm);
    });

/// Elements that leave each host.
std::map<int32_t, int64_t> leaving(const ScheduleRequest& request) {
  std::map<int32_t, int64_t> numels;
  for (const auto& schedule : schedulesOf(forAllRanks(request))) {
    const int32_t host = request.topology->hostOf(schedule.rank);
    for (const Step& step : schedule.steps) {
      if (sends(step.kind) && request.topology->hostOf(step.send_peer) != host) {
        numels[host] += departingShape(step).numel;
      }
    }
  }
  return numels;
}

TEST(Cards, CarryEachByteOnce) {
  const int64_t numel = 48000;
  for (const Hosts& hosts : {byHost({2, 2}), Hosts{0, 1, 0, 1}, byHost({4, 4, 4}), shuffled(byHost({3, 1, 2, 6}), 7)}) {
    const TopologyView topology(hosts);
    const int64_t size = topology.size();
    const int64_t count = topology.hosts();
    for (const auto& [host, sent] :
         leaving(requestOf({Collective::AllReduce, Algorithm::Hierarchical}, topology, numel))) {
      EXPECT_EQ(sent, 2 * (count - 1) * numel / count) << topology.text();
    }
    // A flat ring over all ranks: one link enters and one leaves each host.
    for (const auto& [host, sent] : leaving(requestOf({Collective::AllReduce, Algorithm::Ring}, topology, numel))) {
      EXPECT_EQ(sent, 2 * (size - 1) * numel / size) << topology.text();
    }
    if (topology.fewestRanks() == topology.mostRanks()) {
      const int64_t remote = size - topology.mostRanks(); // ranks whose parts come from elsewhere
      for (const auto kind : {Collective::AllGather, Collective::ReduceScatter}) {
        const int64_t part = 1000;
        for (const auto& [host, sent] : leaving(requestOf({kind, Algorithm::Hierarchical}, topology, part))) {
          EXPECT_EQ(sent, remote * part) << collectiveName(kind) << " on " << topology.text();
        }
      }
    }
    int64_t all = 0;
    for (const auto& [host, sent] : leaving(requestOf({Collective::Broadcast, Algorithm::Ring}, topology, numel))) {
      EXPECT_EQ(sent, numel);
      all += sent;
    }
    EXPECT_EQ(all, (count - 1) * numel) << topology.text();
  }
}

TEST(TopologyView, CountsHostsByTheirLowestRank) {
  const TopologyView view({7, 3, 7, 3, 3});
  EXPECT_EQ(view.hosts(), 2);
  EXPECT_EQ(view.hostOf(0), 0);
  EXPECT_EQ(view.hostOf(4), 1);
  EXPECT_EQ(view.localIndex(3), 1);
  EXPECT_EQ(view.fewestRanks(), 2);
  EXPECT_EQ(view.mostRanks(), 3);
  EXPECT_EQ(view.order(), (std::vector<int32_t>{0, 2, 1, 3, 4}));
  EXPECT_EQ(view.orderFrom(3), (std::vector<int32_t>{3, 4, 1, 0, 2}));
  EXPECT_EQ(view.text(), "2 hosts with 2 to 3 ranks each");
}

TEST(Select, ByTopologyAndSize) {
  const auto chosen = [](const Hosts& hosts, int64_t numel) {
    const TopologyView topology(hosts);
    auto request = requestOf({Collective::AllReduce, Algorithm::Auto}, topology, numel);
    EXPECT_EQ(whySelected(selectionKey(request)).substr(0, 9), "the table");
    return makeSchedule(request).algorithm;
  };
  EXPECT_EQ(chosen(byHost({4}), 1 << 20), Algorithm::Ring);
  EXPECT_EQ(chosen(byHost({1, 1, 1}), 1 << 20), Algorithm::Ring);
  EXPECT_EQ(chosen(byHost({3, 1}), 1 << 20), Algorithm::Hierarchical);
  EXPECT_EQ(chosen(byHost({5, 1}), 1 << 20), Algorithm::Ring); // one rank would serve four others
  EXPECT_EQ(chosen(byHost({2, 2}), 1 << 20), Algorithm::Hierarchical);
  EXPECT_EQ(chosen(byHost({2, 2}), 1), Algorithm::RecursiveDoubling);
}

TEST(Select, NamesTheAlgorithmsOfACollective) {
  EXPECT_TRUE(hasAlgorithm(Collective::AllGather, Algorithm::Bruck));
  EXPECT_FALSE(hasAlgorithm(Collective::Broadcast, Algorithm::Bruck));
}

TEST(TopologyView, OfAnotherSizeIsRefused) {
  const TopologyView view({0, 0, 1});
  ScheduleRequest request = requestOf({Collective::AllReduce, Algorithm::Auto}, view, 4);
  request.size = 4;
  EXPECT_THROW((void)makeSchedule(request), Error);
}

// Ranks that are already in order by host have the schedules that they always had.
TEST(ByHost, NothingChangesWhereHostsAreInOrder) {
  const TopologyView view(byHost({2, 2}));
  ScheduleRequest request = requestOf({Collective::AllReduce, Algorithm::Ring}, view, 100);
  const auto with = schedulesOf(forAllRanks(request));
  request.topology = nullptr;
  const auto without = schedulesOf(forAllRanks(request));
  for (size_t rank = 0; rank < with.size(); ++rank) {
    ASSERT_EQ(with[rank].steps.size(), without[rank].steps.size());
    for (size_t i = 0; i < with[rank].steps.size(); ++i) {
      EXPECT_EQ(with[rank].steps[i].send_peer, without[rank].steps[i].send_peer);
      EXPECT_EQ(with[rank].steps[i].src.offset, without[rank].steps[i].src.offset);
    }
  }
}

} // namespace
} // namespace pycomm::testing
