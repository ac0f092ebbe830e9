#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace pycomm {

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
