// Ranks that leave in the middle of everything, many times: what an operation has used is freed the moment that it has ended, as that of
// a dropped Work is, and AddressSanitizer reports whatever touches it later.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "ranks.h"

namespace pycomm::testing {
namespace {

constexpr int kRanks = 3;

/// Operations of every kind over links, each of whose memory nobody but the operation keeps.
std::vector<std::shared_ptr<Operation>> startDropped(
    Group& group,
    CallbackPool& callbacks,
    int rank,
    std::atomic<size_t>& freed) {
  std::vector<std::shared_ptr<Operation>> started;
  const auto start = [&](Collective kind, size_t numel, size_t outputs) {
    auto input = std::make_unique<std::vector<float>>(numel, static_cast<float>(rank + 1));
    auto output = std::make_unique<std::vector<float>>(numel * outputs);
    Group::Call call;
    call.schedule.kind = kind;
    call.schedule.dtype = DType::Float32;
    call.schedule.numel = static_cast<int64_t>(numel);
    call.schedule.reduce_op = kind == Collective::AllReduce ? ReduceOp::Sum : ReduceOp::None;
    call.schedule.algorithm =
        kind == Collective::Send || kind == Collective::Recv ? Algorithm::Auto : Algorithm::Ring; // over links
    call.input = viewOf(*input);
    call.output = viewOf(*output);
    call.peer = kind == Collective::Send ? (rank + 1) % kRanks : (rank + kRanks - 1) % kRanks;
    call.deadline = Deadline::after(60000);
    std::shared_ptr<Operation> operation = group.start(call);
    started.push_back(operation);
    auto* const memory = new std::pair(std::move(input), std::move(output));
    operation->onDone([&callbacks, &freed, memory] {
      callbacks.submit([&freed, memory] {
        delete memory;
        ++freed;
      });
    });
  };
  for (size_t k = 0; k < 6; ++k) {
    start(Collective::AllReduce, 1 + 50000 * k, 1);
  }
  start(Collective::Send, 300000, 1);
  start(Collective::Recv, 300000, 1);
  start(Collective::AllGather, 200000, kRanks);
  return started;
}

TEST(Exits, InTheMiddleOfDroppedOperations) {
  const char* const text = std::getenv("PYCOMM_EXIT_ROUNDS");
  const int rounds = text == nullptr ? 6 : std::atoi(text);
  const char* const seed = std::getenv("PYCOMM_EXIT_SEED"); // for several at once
  const int first = seed == nullptr ? 0 : std::atoi(seed);
  int cut_short = 0;
  // On a busy machine ranks may leave when all is over. More rounds then.
  for (int round = first; round < first + rounds || (cut_short <= rounds && round < first + 10 * rounds); ++round) {
    SharedStore store;
    std::atomic<int> joined{0};
    std::atomic<int> cut{0};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        std::mt19937_64 dice(static_cast<uint64_t>(1000 * round + rank));
        Engine engine;
        Group::Config config = groupConfig(rank, kRanks);
        config.rendezvous.deadline = Deadline::after(60000);
        config.transport = round % 2 == 0 ? Transport::Auto : Transport::Tcp; // rings, sockets
        std::shared_ptr<Group> group = Group::join(engine, store, config);
        for (++joined; joined < kRanks;) { // a rank that joins late fails because others have left
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        std::atomic<size_t> freed{0};
        const auto started = startDropped(*group, engine.callbacks(), rank, freed);
        std::this_thread::sleep_for(std::chrono::microseconds(dice() % 4000));
        if (dice() % 2 == 0) {
          group->close();
        }
        EXPECT_TRUE(engine.shutdown(Deadline::after(20000)));
        EXPECT_EQ(freed, started.size());
        for (const auto& operation : started) {
          EXPECT_TRUE(operation->done());
          cut += operation->error() ? 1 : 0;
        }
      });
    }
    for (std::thread& rank : ranks) {
      rank.join();
    }
    cut_short += cut;
    if (::testing::Test::HasFailure()) {
      FAIL() << "in round " << round;
    }
  }
  RecordProperty("cut_short", cut_short);
  EXPECT_GT(cut_short, rounds) << "the ranks left when everything was over";
}

} // namespace
} // namespace pycomm::testing
