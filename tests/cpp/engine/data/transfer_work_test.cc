// What a rank copies and computes itself is cut into slices: by any collective and algorithm, and without a change of one bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/data/data_plane.h"
#include "engine/data/matching.h"
#include "engine/data/transfers.h"
#include "schedule/group_run.h"
#include "schedule/select.h"
#include "schedule/topology_view.h"
#include "views.h"

namespace pycomm::testing {
namespace {

class NoLoop final : public Loop {
 public:
  void watch(int, uint32_t, Handler&) override {}
  void unwatch(int) noexcept override {}
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}
};

constexpr uint64_t kId = 1;
constexpr size_t kSlice = 64 << 10; // the smallest
constexpr size_t kAll = std::numeric_limits<size_t>::max() / 2;

GroupIdentity identityOf(int rank, int size) {
  GroupIdentity identity;
  identity.rank = rank;
  identity.size = size;
  identity.name = "test";
  identity.hash = 7;
  identity.hosts.assign(static_cast<size_t>(size), "alpha");
  return identity;
}

std::shared_ptr<Operation> operationOf(
    const ScheduleRequest& wish,
    double premul_factor,
    ConstBufferView input,
    BufferView output) {
  Operation::Request request;
  request.id = {kId, 1};
  request.schedule = prepare(makeSchedule(wish));
  request.descriptor = Descriptor::of(wish, request.schedule->schedule.algorithm);
  request.input = input;
  request.output = output;
  request.extras().premul_factor = premul_factor;
  request.extras().codec_counters = std::make_shared<CodecCounters>();
  return std::make_shared<Operation>(std::move(request));
}

/// One rank of a group whose frames are handed over in memory.
struct WorkingRank {
  struct OnWire {
    int peer;
    OutFrame frame;
  };
  explicit WorkingRank(int rank, int size) : identity(identityOf(rank, size)) {}

  void act() {
    for (Action& action : tables.takeActions()) {
      ASSERT_NE(action.kind, Action::Kind::Notice) << action.record.text();
      if (action.kind == Action::Kind::Send) {
        OutFrame frame;
        frame.header = action.header;
        wire.push_back({action.peer, std::move(frame)});
      } else if (action.kind == Action::Kind::MaySend) {
        tables.find(action.op_id)->transfer->roomCame(action.peer);
      }
    }
  }

  const GroupIdentity identity;
  NoLoop data_loop;
  StagingPool staging{data_loop.stagingMemory()};
  Tables tables{identity, Limits()};
  std::deque<OnWire> wire;
  Transfers transfers{tables, staging, data_loop, [this](int peer, OutFrame&& frame) {
                        wire.push_back({peer, std::move(frame)});
                      }};
};

/// Runs the operation on all ranks, with slices of so many bytes. Returns the most bytes that one slice has touched.
size_t runInSlices(const std::vector<std::shared_ptr<Operation>>& operations, size_t nbytes) {
  const int size = static_cast<int>(operations.size());
  const TimePoint now = Clock::now();
  std::vector<std::unique_ptr<WorkingRank>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<WorkingRank>(rank, size));
    ranks.back()->transfers.add(operations[static_cast<size_t>(rank)], now).transfer->start();
  }
  size_t most = 0;
  for (bool moved = true; std::exchange(moved, false);) {
    for (const auto& from : ranks) {
      from->act();
      while (!from->wire.empty()) {
        moved = true;
        const WorkingRank::OnWire on = std::move(from->wire.front());
        from->wire.pop_front();
        WorkingRank& to = *ranks[static_cast<size_t>(on.peer)];
        OperationRow* const row = to.tables.find(kId);
        if (matching::headerArrived(to.tables, row, from->identity.rank, on.frame.header, now) ==
            matching::Verdict::Accept) {
          Sink sink = to.transfers.place(*row, from->identity.rank, on.frame.header, now);
          if (sink.into.nbytes > 0) {
            std::memcpy(sink.into.ptr, on.frame.payload.ptr, sink.into.nbytes);
          }
          EXPECT_TRUE(to.transfers.arrived(row, from->identity.rank, on.frame.header, std::move(sink)));
        }
        if (on.frame.step >= 0) {
          from->tables.find(kId)->transfer->sent(static_cast<uint32_t>(on.frame.step));
        }
        to.act();
        from->act();
      }
      if (from->transfers.hasWork()) {
        moved = true;
        most = std::max(most, from->transfers.work(nbytes).nbytes);
      }
    }
  }
  for (const auto& rank : ranks) {
    EXPECT_TRUE(Transfers::isComplete(*rank->tables.find(kId))) << "rank " << rank->identity.rank;
    rank->tables.entered.clear(); // it has ended
    EXPECT_EQ(rank->staging.takenNbytes(), 0U);
  }
  return most;
}

/// Both ways, against the interpreter's scalar code. Returns the most bytes in a slice of the run that is not cut.
size_t runBothWays(const ScheduleRequest& wish) {
  const std::vector<ScheduleRequest> requests = forAllRanks(wish);
  std::vector<double> factors;
  std::vector<std::vector<float>> inputs;
  for (const ScheduleRequest& request : requests) {
    factors.push_back(wish.reduce_op == ReduceOp::PremulSum ? 0.3 * (request.rank + 1) : 1.0);
    std::vector<float> input(static_cast<size_t>(inputNumel(request)));
    for (size_t i = 0; i < input.size(); ++i) {
      input[i] = 0.001F * static_cast<float>((i * 7919 + static_cast<size_t>(request.rank) * 104729) % 20011) - 10.0F;
    }
    inputs.push_back(std::move(input));
  }
  RunOptions options;
  options.op = wish.reduce_op;
  options.window_frames = 8;
  options.premul_factors = factors;
  const std::vector<std::vector<float>> expected = runGroup(requests, inputs, options);
  size_t whole = 0;
  for (const size_t nbytes : {kAll, kSlice}) {
    std::vector<std::vector<float>> outputs;
    std::vector<std::shared_ptr<Operation>> operations;
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      outputs.emplace_back(static_cast<size_t>(outputNumel(requests[rank])));
      operations.push_back(operationOf(
          requests[rank],
          factors[rank],
          {reinterpret_cast<const std::byte*>(inputs[rank].data()), inputs[rank].size() * sizeof(float)},
          viewOf(outputs[rank])));
    }
    const size_t most = runInSlices(operations, nbytes);
    if (nbytes == kAll) {
      whole = most;
    } else {
      EXPECT_LE(most, 2 * kSlice);
    }
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      EXPECT_TRUE(toBytes(outputs[rank]) == toBytes(expected[rank])) << "rank " << rank;
    }
  }
  return whole;
}

constexpr Collective kKinds[] = {
    Collective::AllReduce,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter};
constexpr Algorithm kAlgorithms[] = {
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::BinomialTree,
    Algorithm::Direct,
    Algorithm::Pairwise,
    Algorithm::Bruck,
    Algorithm::RecursiveHalving,
    Algorithm::Hierarchical};

TEST(TransferWork, SlicesOfEveryKindOfScheduleAreBoundedAndChangeNoBit) {
  const TopologyView topology({0, 0, 1, 1});
  size_t whole = 0;
  for (const Collective kind : kKinds) {
    const bool reduces =
        kind == Collective::AllReduce || kind == Collective::Reduce || kind == Collective::ReduceScatter;
    for (const Algorithm algorithm : kAlgorithms) {
      for (const ReduceOp op : {ReduceOp::Avg, ReduceOp::PremulSum}) {
        for (const Codec codec : {Codec::None, Codec::Int8, Codec::BFloat16}) {
          ScheduleRequest wish;
          wish.kind = kind;
          wish.algorithm = algorithm;
          wish.size = 4;
          wish.dtype = DType::Float32;
          wish.numel = 150001; // a rank's part in most of them: 600 KB
          wish.segment_nbytes = 200000;
          wish.topology = &topology;
          wish.codec = codec;
          wish.reduce_op = reduces ? op : ReduceOp::None;
          wish.root = kind == Collective::Broadcast || kind == Collective::Reduce || kind == Collective::Gather ||
                  kind == Collective::Scatter
              ? 1
              : -1;
          const bool encodes = kind != Collective::Reduce && algorithm == Algorithm::Direct;
          if (!hasAlgorithm(kind, algorithm) || (codec != Codec::None && !(reduces && encodes)) ||
              (!reduces && op != ReduceOp::Avg)) {
            continue;
          }
          SCOPED_TRACE(
              std::string(collectiveName(kind)) + " " + algorithmName(algorithm) + " " + reduceOpName(op) + " " +
              codecName(codec));
          whole = std::max(whole, runBothWays(wish));
          if (::testing::Test::HasFailure()) {
            return;
          }
        }
      }
    }
  }
  EXPECT_GT(whole, 1U << 20) << "nothing here is too long to be cut";
}

// Where values overlap the place that they go to, a slice must not overwrite what a later one reads.
TEST(TransferWork, ACopyOntoItselfIsRight) {
  ScheduleRequest wish;
  wish.kind = Collective::AllToAll;
  wish.dtype = DType::UInt8;
  wish.numel = 1 << 20;
  for (const size_t shift : {size_t{0}, size_t{1}, size_t{100000}}) {
    for (const bool up : {false, true}) {
      std::vector<std::byte> memory((1 << 20) + shift);
      for (size_t i = 0; i < memory.size(); ++i) {
        memory[i] = static_cast<std::byte>(i * 2654435761U >> 24U);
      }
      const auto from = static_cast<std::ptrdiff_t>(up ? 0 : shift);
      const std::vector<std::byte> expected(memory.begin() + from, memory.begin() + from + (1 << 20));
      std::byte* const to = memory.data() + (up ? shift : 0);
      static_cast<void>(runInSlices({operationOf(wish, 1, {memory.data() + from, 1 << 20}, {to, 1 << 20})}, kSlice));
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), to)) << shift << up;
    }
  }
}

// Between two looks at the sockets, in the event that posts an operation and in each tick, a rank touches half of 1 MiB at the most.
TEST(TransferWork, OneTurnOfTheLoopTouchesABoundedNumberOfBytes) {
  NoLoop loop;
  DataPlane::Events events;
  DataPlane plane{identityOf(0, 1), loop, std::move(events)};
  ScheduleRequest wish;
  wish.kind = Collective::AllToAll;
  wish.dtype = DType::UInt8;
  wish.numel = 8 << 20;
  const std::vector<std::byte> input(static_cast<size_t>(wish.numel), std::byte{1});
  std::vector<std::byte> output(input.size());
  const auto operation = operationOf(wish, 1, {input.data(), input.size()}, viewOf(output));
  size_t copied = 0;
  const auto expectBounded = [&] {
    const auto now = static_cast<size_t>(std::count(output.begin(), output.end(), std::byte{1}));
    EXPECT_LE(now - copied, 256U << 10); // each byte is read and written
    EXPECT_GT(now, copied);
    copied = now;
  };
  plane.post(operation);
  expectBounded();
  while (!operation->done() && !HasFailure()) {
    ASSERT_EQ(plane.nextTick(), Loop::Ticker::kAtOnce);
    plane.tick(Clock::now());
    expectBounded();
  }
  EXPECT_EQ(copied, output.size());
  EXPECT_NE(plane.nextTick(), Loop::Ticker::kAtOnce);
}

} // namespace
} // namespace pycomm::testing
