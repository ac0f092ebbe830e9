// pycomm_agree: runs seeds of the simulation of agreement, or replays one: docs/evidence/agreement.md.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proof/elastic/world.h"

namespace {

using pycomm::elastic::sim::Report;

constexpr const char* kUsage =
    "usage: pycomm_agree [--seeds FIRST:LAST] [--jobs N] [--most-failures N]\n"
    "       pycomm_agree --replay SEED [--verbose]\n";

[[noreturn]] void usage() {
  std::fputs(kUsage, stderr);
  std::exit(2);
}

void print(const std::string& plan, const Report& report) {
  std::printf("%s", plan.c_str());
  for (const std::string& line : report.trace) {
    std::printf("%s\n", line.c_str());
  }
  for (const std::string& violation : report.violations) {
    std::printf("  VIOLATION: %s\n", violation.c_str());
  }
}

} // namespace

int main(int argc, char** argv) {
  uint64_t first = 1;
  uint64_t last = 10000;
  int jobs = 1;
  uint64_t most_failures = 10;
  bool replay = false;
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--verbose") {
      verbose = true;
      continue;
    }
    const char* value = i + 1 < argc ? argv[++i] : "";
    char* end = nullptr;
    const uint64_t number = std::strtoull(value, &end, 10);
    if (end == value) {
      usage();
    }
    if (name == "--seeds" && *end == ':') {
      first = number;
      last = std::strtoull(end + 1, nullptr, 10);
    } else if (name == "--replay") {
      replay = true;
      first = last = number;
    } else if (name == "--jobs") {
      jobs = static_cast<int>(number);
    } else if (name == "--most-failures") {
      most_failures = number;
    } else {
      usage();
    }
  }
  if (replay) {
    const auto plan = pycomm::elastic::sim::drawPlan(first);
    const Report report = pycomm::elastic::sim::run(plan, verbose);
    print(plan.text(), report);
    std::printf(
        "%lld events, %lld messages, %lld views installed, %lld rounds committed, %lld redone, %lld admissions, %lld joined, %lld "
        "raised: %s\n",
        static_cast<long long>(report.events),
        static_cast<long long>(report.messages),
        static_cast<long long>(report.agreements),
        static_cast<long long>(report.committed),
        static_cast<long long>(report.redone),
        static_cast<long long>(report.admissions),
        static_cast<long long>(report.joined),
        static_cast<long long>(report.raised),
        report.violations.empty() ? "kept every promise" : "broke a promise");
    return report.violations.empty() ? 0 : 1;
  }
  std::atomic<uint64_t> next{first};
  std::mutex mutex; // guards what follows
  Report sum;
  uint64_t violated = 0;
  std::map<std::string, uint64_t> by_promise;
  const auto begin = std::chrono::steady_clock::now();
  const auto work = [&] {
    for (uint64_t seed = next.fetch_add(1); seed <= last; seed = next.fetch_add(1)) {
      const auto plan = pycomm::elastic::sim::drawPlan(seed);
      const Report report = pycomm::elastic::sim::run(plan);
      const std::lock_guard<std::mutex> lock(mutex);
      sum.events += report.events;
      sum.messages += report.messages;
      sum.agreements += report.agreements;
      sum.committed += report.committed;
      sum.redone += report.redone;
      sum.admissions += report.admissions;
      sum.joined += report.joined;
      sum.raised += report.raised;
      sum.digest ^= report.digest * (2 * seed + 1);
      if (report.violations.empty()) {
        continue;
      }
      ++by_promise[report.violations.front().substr(0, report.violations.front().find(':'))];
      if (++violated <= most_failures) {
        print(plan.text(), report);
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < jobs; ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) {
    thread.join();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const auto& [promise, count] : by_promise) {
    std::printf("%s: %llu\n", promise.c_str(), static_cast<unsigned long long>(count));
  }
  std::printf(
      "%llu seeds, %llu violated; %lld events, %lld messages, %lld views installed, %lld rounds committed, %lld redone, %lld "
      "admissions, %lld joined, %lld raised; %.1f s\n",
      static_cast<unsigned long long>(last - first + 1),
      static_cast<unsigned long long>(violated),
      static_cast<long long>(sum.events),
      static_cast<long long>(sum.messages),
      static_cast<long long>(sum.agreements),
      static_cast<long long>(sum.committed),
      static_cast<long long>(sum.redone),
      static_cast<long long>(sum.admissions),
      static_cast<long long>(sum.joined),
      static_cast<long long>(sum.raised),
      seconds);
  std::printf("digest of all runs %016llx\n", static_cast<unsigned long long>(sum.digest));
  return violated == 0 ? 0 : 1;
}
