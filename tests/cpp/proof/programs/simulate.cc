// pycomm_simulate: runs seeds of the simulator, or replays one.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/operation/issue_context.h"
#include "proof/sim/verdict.h"

namespace {

using pycomm::sim::Report;

constexpr const char* kUsage =
    "usage: pycomm_simulate [--seeds FIRST:LAST] [--jobs N] [--most-failures N]\n"
    "       pycomm_simulate --seeds-of FILE [--jobs N]     one seed a line; # begins a comment\n"
    "       pycomm_simulate --replay SEED [--verbose]\n";

struct Options {
  uint64_t first = 1;
  uint64_t last = 10000;
  bool listed = false; ///< only those of `seeds`
  std::vector<uint64_t> seeds;
  int jobs = 1;
  size_t most_failures = 10;
  bool replay = false;
  bool verbose = false;
};

struct Tally {
  int64_t runs = 0;
  int64_t failed = 0; ///< runs in which some rank's group failed
  int64_t violated = 0;
};

[[noreturn]] void usage() {
  std::fputs(kUsage, stderr);
  std::exit(2);
}

std::vector<uint64_t> readSeeds(const char* path) {
  std::ifstream file(path);
  std::vector<uint64_t> seeds;
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(' ') == std::string::npos) {
      continue;
    }
    char* end = nullptr;
    seeds.push_back(std::strtoull(line.c_str(), &end, 10));
    if (end == line.c_str()) {
      std::fprintf(stderr, "%s: '%s' is no seed\n", path, line.c_str());
      std::exit(2);
    }
  }
  if (!file.eof()) {
    std::fprintf(stderr, "%s cannot be read\n", path);
    std::exit(2);
  }
  return seeds;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--verbose") {
      options.verbose = true;
      continue;
    }
    if (name == "--seeds-of") {
      options.listed = true;
      options.seeds = readSeeds(value);
      ++i;
      continue;
    }
    char* end = nullptr;
    const uint64_t number = std::strtoull(value, &end, 10);
    if (end == value) {
      usage();
    }
    ++i;
    if (name == "--seeds" && *end == ':') {
      options.first = number;
      options.last = std::strtoull(end + 1, nullptr, 10);
    } else if (name == "--replay") {
      options.replay = true;
      options.first = options.last = number;
    } else if (name == "--jobs") {
      options.jobs = static_cast<int>(number);
    } else if (name == "--most-failures") {
      options.most_failures = number;
    } else {
      usage();
    }
  }
  return options;
}

void print(const Report& report) {
  std::printf("%s", report.plan.c_str());
  for (const std::string& line : report.trace) {
    std::printf("%s\n", line.c_str());
  }
  for (const std::string& violation : report.violations) {
    std::printf("  VIOLATION: %s\n", violation.c_str());
  }
}

int replay(const Options& options) {
  const Report report = pycomm::sim::simulate(options.first, options.verbose);
  print(report);
  std::printf(
      "%lld operations, %lld succeeded, %lld frames, %lld events, %.3f s of virtual time, fingerprint %016llx: %s\n",
      static_cast<long long>(report.operations),
      static_cast<long long>(report.succeeded),
      static_cast<long long>(report.frames),
      static_cast<long long>(report.events),
      static_cast<double>(report.elapsed.count()) / 1e9,
      static_cast<unsigned long long>(report.fingerprint),
      report.violations.empty() ? "kept every promise" : "broke a promise");
  return report.violations.empty() ? 0 : 1;
}

int sweep(const Options& options) {
  const uint64_t end = options.listed ? options.seeds.size() : options.last + 1;
  std::atomic<uint64_t> next{options.listed ? 0 : options.first};
  std::mutex mutex; // guards what follows
  std::map<std::string, Tally> tallies;
  Tally all;
  int64_t operations = 0;
  int64_t succeeded = 0;
  int64_t frames = 0;
  double virtual_s = 0;
  uint64_t digest = 0; // equal for two builds whose runs of these seeds are alike in all that sim::digestOf() has
  const auto begin = std::chrono::steady_clock::now();
  const auto work = [&] {
    for (uint64_t at = next.fetch_add(1); at < end; at = next.fetch_add(1)) {
      const uint64_t seed = options.listed ? options.seeds[at] : at;
      const Report report = pycomm::sim::simulate(seed);
      const std::lock_guard<std::mutex> lock(mutex);
      for (Tally* tally : {&all, &tallies[report.first_fault]}) {
        ++tally->runs;
        tally->failed += report.group_failed ? 1 : 0;
        tally->violated += report.violations.empty() ? 0 : 1;
      }
      operations += report.operations;
      succeeded += report.succeeded;
      frames += report.frames;
      virtual_s += static_cast<double>(report.elapsed.count()) / 1e9;
      digest += pycomm::mix64(
          pycomm::mix64(report.fingerprint ^ seed) + static_cast<uint64_t>(report.succeeded) +
          report.violations.size());
      if (!report.violations.empty() && static_cast<size_t>(all.violated) <= options.most_failures) {
        print(report);
        std::printf("seed %llu broke a promise\n", static_cast<unsigned long long>(seed));
        std::fflush(stdout);
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < options.jobs; ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) {
    thread.join();
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%-12s %9s %13s %9s\n", "fault", "seeds", "group failed", "violated");
  for (const auto& entry : tallies) {
    std::printf(
        "%-12s %9lld %13lld %9lld\n",
        entry.first.c_str(),
        static_cast<long long>(entry.second.runs),
        static_cast<long long>(entry.second.failed),
        static_cast<long long>(entry.second.violated));
  }
  std::printf(
      "%-12s %9lld %13lld %9lld\n",
      "all",
      static_cast<long long>(all.runs),
      static_cast<long long>(all.failed),
      static_cast<long long>(all.violated));
  std::printf(
      "%lld operations, %lld succeeded; %lld frames; %.1f h of virtual time in %.1f s: %.0f seeds/s with %d jobs\n",
      static_cast<long long>(operations),
      static_cast<long long>(succeeded),
      static_cast<long long>(frames),
      virtual_s / 3600,
      seconds,
      static_cast<double>(all.runs) / seconds,
      options.jobs);
  std::printf("digest of all runs %016llx\n", static_cast<unsigned long long>(digest));
  return all.violated == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  return options.replay ? replay(options) : sweep(options);
}
