#include "base/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
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

} // namespace

unsigned quotaCores(const std::string& memberships, const std::string& root) {
  unsigned fewest = 0;
  std::istringstream lines(memberships);
  for (std::string line; std::getline(lines, line);) { // "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) {
      continue;
    }
    const std::string mount = root + (controllers.empty() ? "" : "/" + controllers);
    // Each group above has its own quota. In a container the path may be the host's; then only the root of the mount is
    // found.
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      path.erase(path.find_last_not_of('/') + 1);
      const unsigned cores = quotaOf(mount + path);
      fewest = cores == 0 ? fewest : (fewest == 0 ? cores : std::min(fewest, cores));
      if (path.empty()) {
        break;
      }
    }
  }
  return fewest;
}

unsigned usableCores() {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream memberships;
  memberships << file.rdbuf();
  const unsigned allowed = affinityCores();
  const unsigned granted = quotaCores(memberships.str(), "/sys/fs/cgroup");
  return granted == 0 ? allowed : std::min(allowed, granted);
}

} // namespace pycomm
