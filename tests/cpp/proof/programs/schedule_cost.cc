// pycomm_schedule_cost: what an all_reduce of float32 costs on a virtual network. benchmarks/cost.py runs it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

#include "base/error.h"
#include "proof/schedule/cost_model.h"
#include "schedule/step.h"
#include "schedule/topology_view.h"

namespace {

constexpr const char* kUsage =
    "usage: pycomm_schedule_cost ALGORITHM HOST_OF_RANK_0,HOST_OF_RANK_1,... NBYTES [NETWORK]\n"
    "NETWORK: one-way latency (s), bytes/s of a NIC, latency (s) and bytes/s within a host, processor seconds per frame, bytes/s of\n"
    "adding; default: about a gigabit. Prints seconds, algorithm, and bytes through the busiest NIC.\n";

[[noreturn]] void usage() {
  std::fputs(kUsage, stderr);
  std::exit(2);
}

double numberIn(const char* text) {
  char* end = nullptr;
  const double number = std::strtod(text, &end);
  if (end == text || *end != '\0') {
    usage();
  }
  return number;
}

std::vector<int32_t> hostsIn(const char* text) {
  std::vector<int32_t> hosts;
  for (;;) {
    char* end = nullptr;
    hosts.push_back(static_cast<int32_t>(std::strtol(text, &end, 10)));
    if (end == text || (*end != ',' && *end != '\0')) {
      usage();
    }
    if (*end == '\0') {
      return hosts;
    }
    text = end + 1;
  }
}

} // namespace

int main(int argc, char** argv) {
  using namespace pycomm;
  const auto algorithm = argc > 1 ? algorithmNamed(argv[1]) : std::nullopt;
  if ((argc != 4 && argc != 10) || !algorithm) {
    usage();
  }
  NetworkModel network;
  if (argc == 10) {
    network.latency_s = numberIn(argv[4]);
    network.nic_bytes_per_s = numberIn(argv[5]);
    network.local_latency_s = numberIn(argv[6]);
    network.local_bytes_per_s = numberIn(argv[7]);
    network.message_s = numberIn(argv[8]);
    network.reduce_bytes_per_s = numberIn(argv[9]);
  }
  try {
    const TopologyView topology(hostsIn(argv[2]));
    ScheduleRequest request;
    request.kind = Collective::AllReduce;
    request.algorithm = *algorithm;
    request.size = topology.size();
    request.topology = &topology;
    request.dtype = DType::Float32;
    request.reduce_op = ReduceOp::Sum;
    request.numel = static_cast<int64_t>(numberIn(argv[3])) / 4;
    const Cost cost = costOf(request, network);
    std::printf(
        "%.17g %s %lld\n",
        cost.seconds,
        algorithmName(cost.algorithm),
        static_cast<long long>(*std::max_element(cost.sent_nbytes.begin(), cost.sent_nbytes.end())));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
