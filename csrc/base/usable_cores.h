#pragma once

#include <string>

namespace pycomm {

/// The number of cores that this process may use: those that its affinity allows (sched_getaffinity), or fewer if a CPU
/// quota of its control groups is lower. At least 1.
[[nodiscard]] unsigned usableCores();

/// The number of cores that CPU quotas grant, rounded down and at least 1; 0 if there is no quota. `memberships` has
/// the format of /proc/self/cgroup. `root` is the mount point of control groups (/sys/fs/cgroup), version 1 or 2.
[[nodiscard]] unsigned quotaCores(const std::string& memberships, const std::string& root);

} // namespace pycomm
