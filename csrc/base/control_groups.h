#pragma once

#include <functional>
#include <string>

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

} // namespace pycomm
