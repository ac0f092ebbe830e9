#include "base/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <thread>

#include "base/control_groups.h"

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

} // namespace pycomm
