#include "transport/net/host_identity.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr size_t kMaxIdentityTextNbytes = 512;

std::string firstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// 0 if the namespace is hidden, as in some sandboxes: then all processes there agree on 0.
uint64_t namespaceInode(const char* path) {
  struct stat status{};
  return ::stat(path, &status) == 0 ? static_cast<uint64_t>(status.st_ino) : 0;
}

struct ProcessStat {
  char state = 0; ///< 0: /proc does not show the process
  uint64_t start_ticks = 0;
};

// Fields 3 and 22 of /proc/<pid>/stat. The second field is the program's name in brackets and may hold anything, so counting
// starts behind the last bracket, at field 3.
ProcessStat statOf(const std::string& pid) {
  const std::string line = firstLine(("/proc/" + pid + "/stat").c_str());
  const size_t bracket = line.rfind(')');
  ProcessStat stat;
  if (bracket == std::string::npos) {
    return stat;
  }
  std::istringstream fields(line.substr(bracket + 1));
  std::string field;
  fields >> stat.state;
  for (int index = 4; index <= 22; ++index) {
    fields >> field;
  }
  std::istringstream(field) >> stat.start_ticks;
  return stat;
}

// In a new pid namespace, /proc may still show the pids of the outer one.
bool procShowsOwnPids() {
  char self[32] = {};
  const ssize_t length = ::readlink("/proc/self", self, sizeof self - 1);
  return length > 0 && std::string(self, static_cast<size_t>(length)) == std::to_string(::getpid());
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  std::string part;
  while (std::getline(in, part, separator)) {
    parts.push_back(part);
  }
  return parts;
}

std::optional<uint64_t> parseNumber(const std::string& text) {
  if (text.empty() || text.size() > 19 || text.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return std::stoull(text);
}

// The separator inside a token must not occur in its parts.
std::string clean(std::string part) {
  for (char& c : part) {
    if (c == '/' || c <= ' ' || c > '~') {
      c = '_';
    }
  }
  return part.substr(0, 128);
}

} // namespace

HostIdentity HostIdentity::ofThisProcess() {
  HostIdentity identity;
  identity.boot_id = clean(firstLine("/proc/sys/kernel/random/boot_id"));
  identity.network_namespace = namespaceInode("/proc/self/ns/net");
  identity.hostname = clean(localHostName());
  return identity;
}

std::string HostIdentity::wireText() const {
  return clean(boot_id) + "/" + std::to_string(network_namespace) + "/" + clean(hostname);
}

std::optional<HostIdentity> HostIdentity::fromWireText(const std::string& text) {
  const std::vector<std::string> parts = split(text, '/');
  if (text.size() > kMaxIdentityTextNbytes || parts.size() != 3 || parts[2].empty()) {
    return std::nullopt;
  }
  const auto inode = parseNumber(parts[1]);
  if (!inode || clean(parts[0]) != parts[0] || clean(parts[2]) != parts[2]) {
    return std::nullopt;
  }
  HostIdentity identity;
  identity.boot_id = parts[0];
  identity.network_namespace = *inode;
  identity.hostname = parts[2];
  return identity;
}

ProcessIdentity ProcessIdentity::ofThisProcess() {
  ProcessIdentity identity;
  identity.pid = ::getpid();
  identity.pid_namespace = namespaceInode("/proc/self/ns/pid");
  identity.start_ticks = statOf("self").start_ticks;
  return identity;
}

Life ProcessIdentity::life() const {
  if (pid_namespace != namespaceInode("/proc/self/ns/pid") || pid <= 0) {
    return Life::Unknown; // its pid has no meaning here
  }
  if (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) {
    return Life::Ended;
  }
  const ProcessStat stat = procShowsOwnPids() ? statOf(std::to_string(pid)) : ProcessStat();
  if (stat.state == 0 || stat.start_ticks == 0 || start_ticks == 0) {
    return Life::Unknown;
  }
  const bool is_zombie = stat.state == 'Z' || stat.state == 'X';
  return is_zombie || stat.start_ticks != start_ticks ? Life::Ended : Life::Lives; // another start: the pid was reused
}

std::string ProcessIdentity::wireText() const {
  return std::to_string(pid) + "/" + std::to_string(pid_namespace) + "/" + std::to_string(start_ticks);
}

std::optional<ProcessIdentity> ProcessIdentity::fromWireText(const std::string& text) {
  const std::vector<std::string> parts = split(text, '/');
  if (text.size() > kMaxIdentityTextNbytes || parts.size() != 3) {
    return std::nullopt;
  }
  const auto pid = parseNumber(parts[0]);
  const auto pid_namespace = parseNumber(parts[1]);
  const auto start_ticks = parseNumber(parts[2]);
  if (!pid || !pid_namespace || !start_ticks || *pid > INT32_MAX) {
    return std::nullopt;
  }
  ProcessIdentity identity;
  identity.pid = static_cast<int64_t>(*pid);
  identity.pid_namespace = *pid_namespace;
  identity.start_ticks = *start_ticks;
  return identity;
}

} // namespace pycomm
