#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

// How much of this machine this process may use, by the limits of its control groups (versions 1 and 2) and by what the host has.

namespace pycomm {

/// The contents of /proc/self/cgroup: the control groups of this process, version 1 or 2.
[[nodiscard]] std::string ownControlGroups();

/// Calls `visit` with the folder of each control group that has a word in what `controller` ("cpu", "memory") limits, and of those
/// above it, the lowest first; a folder need not be there. `memberships` has the format of /proc/self/cgroup. `root` is the mount point of
/// control groups (/sys/fs/cgroup).
void forEachControlGroup(
    const std::string& memberships,
    const std::string& controller,
    const std::string& root,
    const std::function<void(const std::string& folder)>& visit);

// ---- cores

/// The number of cores that this process may use: those that its affinity allows (sched_getaffinity), or fewer if a CPU
/// quota of its control groups is lower. At least 1.
[[nodiscard]] unsigned usableCores();

/// The number of cores that CPU quotas grant, rounded down and at least 1; 0 if there is no quota. `memberships` has
/// the format of /proc/self/cgroup. `root` is the mount point of control groups (/sys/fs/cgroup), version 1 or 2.
[[nodiscard]] unsigned quotaCores(const std::string& memberships, const std::string& root);

// ---- memory

/// How much memory this process may still take before the kernel ends a process to get some.
struct MemoryHeadroom {
  uint64_t nbytes = std::numeric_limits<uint64_t>::max();
  std::string
      limit; ///< what allows no more, for an error: "the memory limit in /sys/fs/cgroup/job"; empty if not known

  [[nodiscard]] bool has(uint64_t wanted) const noexcept {
    return wanted <= nbytes;
  }
};

/// The least of what the memory limits of this process's control groups leave (versions 1 and 2) and what the host has available, with
/// what the kernel can get back from the page cache or move to swap. It may be more than is said if there is room for `wanted`.
/// Another process may take it a moment later. Throws std::bad_alloc.
[[nodiscard]] MemoryHeadroom memoryHeadroom(uint64_t wanted);

/// The same from other files. `memberships` has the format of /proc/self/cgroup, `meminfo` that of /proc/meminfo; `root` is the mount
/// point of control groups (/sys/fs/cgroup).
[[nodiscard]] MemoryHeadroom memoryHeadroom(
    uint64_t wanted,
    const std::string& memberships,
    const std::string& root,
    const std::string& meminfo);

} // namespace pycomm
