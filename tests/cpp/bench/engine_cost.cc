// What matching and the flight recorder cost: all_reduces between two ranks that are threads of this process.
//
//   pycomm_engine_cost NUMEL ROUNDS         microseconds an operation with the recorder and without, in turns
//   pycomm_engine_cost NUMEL ROUNDS count   with the recorder only: for callgrind; see docs/evidence/faults.md
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "engine/ranks.h"

namespace {

using namespace pycomm;
using namespace pycomm::testing;

constexpr int kBatch = 20;
constexpr int kRanks = 2;

std::shared_ptr<Group> joined(Engine& engine, Store& store, int rank, const std::string& name, size_t slots) {
  Group::Config config;
  config.rendezvous.rank = rank;
  config.rendezvous.size = kRanks;
  config.rendezvous.group_name = name;
  config.rendezvous.deadline = Deadline::after(60000);
  config.flight_slots = slots;
  return Group::join(engine, store, config);
}

double batchUs(Group& group, std::vector<float>& values) {
  const TimePoint begin = Clock::now();
  for (int i = 0; i < kBatch; ++i) {
    Group::Call call = allReduceCall(values, Deadline::after(60000));
    call.waits = true;
    const auto operation = group.start(call);
    if (!group.wait(*operation, Deadline::after(60000)) || operation->error()) {
      std::fprintf(stderr, "an all_reduce failed\n");
      std::_Exit(1);
    }
  }
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / kBatch;
}

double at(const std::vector<double>& sorted, double part) {
  return sorted[static_cast<size_t>(part * static_cast<double>(sorted.size() - 1))];
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: pycomm_engine_cost NUMEL ROUNDS [count]\n");
    return 2;
  }
  const auto numel = static_cast<size_t>(std::atoll(argv[1]));
  const int rounds = std::atoi(argv[2]);
  const bool count = argc > 3;
  SharedStore store;
  std::vector<std::thread> ranks;
  std::vector<double> ratios;
  std::vector<double> plain;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      Engine engine;
      const auto with = joined(engine, store, rank, "with", 2000);
      const auto without = joined(engine, store, rank, "without", 0);
      std::vector<float> values(numel, 0.0F);
      (void)batchUs(*with, values);
      (void)batchUs(*without, values);
      for (int round = 0; round < rounds; ++round) {
        const bool first = round % 2 == 0; // who goes first changes: what drifts falls on both
        const double a = first || count ? batchUs(*with, values) : batchUs(*without, values);
        const double b = count ? a : (first ? batchUs(*without, values) : batchUs(*with, values));
        if (rank == 0) {
          ratios.push_back(first ? a / b : b / a);
          plain.push_back(first ? b : a);
        }
      }
      with->close();
      without->close();
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  std::sort(ratios.begin(), ratios.end());
  std::sort(plain.begin(), plain.end());
  if (!count) {
    std::printf(
        "all_reduce of %zu floats, 2 ranks: %.1f us without the recorder; with it %.4f times as long (median of %d pairs, "
        "middle half %.4f to %.4f)\n",
        numel,
        at(plain, 0.5),
        at(ratios, 0.5),
        rounds,
        at(ratios, 0.25),
        at(ratios, 0.75));
  }
  return 0;
}
