#include "base/process_limits.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

namespace pycomm {
namespace {

/// Microseconds of CPU time per period; 0 for no limit, or for a file that is not there.
unsigned coresOf(int64_t quota, int64_t period) {
  return quota <= 0 || period <= 0 ? 0 : static_cast<unsigned>(std::max<int64_t>(quota / period, 1));
}

unsigned quotaOf(const std::string& folder) {
  int64_t quota = 0;
  int64_t period = 0;
  if (std::ifstream both(folder + "/cpu.max");
      both >> quota >> period) { // version 2; without a limit the first word is "max"
    return coresOf(quota, period);
  }
  std::ifstream(folder + "/cpu.cfs_quota_us") >> quota; // version 1; without a limit -1
  std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  return coresOf(quota, period);
}

unsigned affinityCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int count = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  // The call fails on machines of more than 1024 cores.
  return count > 0 ? static_cast<unsigned>(count) : std::max(std::thread::hardware_concurrency(), 1U);
}

constexpr uint64_t kNoLimit = uint64_t{1} << 62; // version 1 says almost 2^63

/// A file with one number: nothing if it is not there, or says "max".
std::optional<uint64_t> numberIn(const std::string& path) {
  uint64_t number = 0;
  std::ifstream file(path);
  return file >> number ? std::optional<uint64_t>(number) : std::nullopt;
}

/// The number after a word at the beginning of a line.
uint64_t numberAfter(std::istream& lines, const std::string& word) {
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first;
    uint64_t number = 0;
    if (words >> first >> number && first == word) {
      return number;
    }
  }
  return 0;
}

uint64_t difference(uint64_t limit, uint64_t used) {
  return limit > used ? limit - used : 0;
}

/// What the kernel gets back in that group before it ends a process. Shared memory is not among it.
uint64_t reclaimableIn(const std::string& folder, const std::string& prefix) {
  uint64_t sum = 0;
  std::ifstream file(folder + "/memory.stat");
  std::string word;
  for (uint64_t number = 0; file >> word >> number;) {
    if (word == prefix + "inactive_file" || word == prefix + "active_file" || word == prefix + "slab_reclaimable") {
      sum += number;
    }
  }
  return sum;
}

/// Nothing if the group has no limit. To read memory.stat costs the kernel most, so only if it counts.
std::optional<uint64_t> roomIn(const std::string& folder, uint64_t wanted, uint64_t free_swap) {
  if (const auto limit = numberIn(folder + "/memory.max")) { // version 2
    const uint64_t used = numberIn(folder + "/memory.current").value_or(0);
    if (difference(*limit, used) >= wanted) {
      return difference(*limit, used);
    }
    const auto swap_limit = numberIn(folder + "/memory.swap.max");
    const uint64_t swap_used = numberIn(folder + "/memory.swap.current").value_or(0);
    const uint64_t swap = swap_limit ? std::min(difference(*swap_limit, swap_used), free_swap) : free_swap;
    return difference(*limit + reclaimableIn(folder, "") + swap, used);
  }
  const auto limit = numberIn(folder + "/memory.limit_in_bytes"); // version 1
  if (!limit || *limit >= kNoLimit) {
    return std::nullopt;
  }
  const uint64_t used = numberIn(folder + "/memory.usage_in_bytes").value_or(0);
  const uint64_t with_swap = std::min(numberIn(folder + "/memory.memsw.limit_in_bytes").value_or(kNoLimit), kNoLimit);
  const uint64_t used_with_swap = numberIn(folder + "/memory.memsw.usage_in_bytes").value_or(0);
  const uint64_t at_once = std::min(difference(*limit, used), difference(with_swap, used_with_swap));
  if (at_once >= wanted) {
    return at_once;
  }
  const uint64_t reclaimable = reclaimableIn(folder, "total_");
  return std::min(
      difference(*limit + reclaimable + free_swap, used), difference(with_swap + reclaimable, used_with_swap));
}

} // namespace

std::string ownControlGroups() {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream memberships;
  memberships << file.rdbuf();
  return memberships.str();
}

void forEachControlGroup(
    const std::string& memberships,
    const std::string& controller,
    const std::string& root,
    const std::function<void(const std::string& folder)>& visit) {
  std::istringstream lines(memberships);
  for (std::string line; std::getline(lines, line);) { // "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find("," + controller + ",") == std::string::npos) {
      continue;
    }
    const std::string mount = root + (controllers.empty() ? "" : "/" + controllers);
    // Each group above has its own limit. In a container the path may be the host's; then only the root of the mount is
    // found.
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      path.erase(path.find_last_not_of('/') + 1);
      visit(mount + path);
      if (path.empty()) {
        break;
      }
    }
  }
}

unsigned quotaCores(const std::string& memberships, const std::string& root) {
  unsigned fewest = 0;
  forEachControlGroup(memberships, "cpu", root, [&](const std::string& folder) {
    const unsigned cores = quotaOf(folder);
    fewest = cores == 0 ? fewest : (fewest == 0 ? cores : std::min(fewest, cores));
  });
  return fewest;
}

unsigned usableCores() {
  const unsigned allowed = affinityCores();
  const unsigned granted = quotaCores(ownControlGroups(), "/sys/fs/cgroup");
  return granted == 0 ? allowed : std::min(allowed, granted);
}

MemoryHeadroom memoryHeadroom(
    uint64_t wanted,
    const std::string& memberships,
    const std::string& root,
    const std::string& meminfo) {
  MemoryHeadroom least;
  std::istringstream lines(meminfo);
  std::istringstream again(meminfo);
  const uint64_t free_swap = numberAfter(again, "SwapFree:") << 10;
  if (const uint64_t available = numberAfter(lines, "MemAvailable:") << 10; available > 0) {
    least.nbytes = available + free_swap;
    least.limit = "the host's memory";
  }
  forEachControlGroup(memberships, "memory", root, [&](const std::string& folder) {
    const auto room = roomIn(folder, wanted, free_swap);
    if (room && *room < least.nbytes) {
      least.nbytes = *room;
      least.limit = "the memory limit in " + folder;
    }
  });
  return least;
}

MemoryHeadroom memoryHeadroom(uint64_t wanted) {
  std::ostringstream meminfo;
  meminfo << std::ifstream("/proc/meminfo").rdbuf();
  return memoryHeadroom(wanted, ownControlGroups(), "/sys/fs/cgroup", meminfo.str());
}

} // namespace pycomm
