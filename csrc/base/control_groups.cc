#include "base/control_groups.h"

#include <fstream>
#include <sstream>

namespace pycomm {

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

} // namespace pycomm
