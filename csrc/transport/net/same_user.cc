#include "transport/net/same_user.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <fstream>

#include "transport/net/address.h"

namespace pycomm {
namespace {

constexpr uint64_t kAllUsers = UINT32_MAX; // as many as there are; the last number, -1, is none

// True if every user of the host has its own number in this user namespace (man 7 user_namespaces). False if the kernel
// does not report it.
bool mapsAllUsers() {
  std::ifstream map("/proc/self/uid_map");
  uint64_t users = 0;
  for (uint64_t inside = 0, outside = 0, count = 0; map >> inside >> outside >> count;) {
    users += count;
  }
  return users >= kAllUsers;
}

// The number that the kernel reports for unmapped users.
uid_t overflowUser() {
  uid_t user = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> user;
  return user;
}

} // namespace

bool sameUser(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid() &&
      canTellOwnUser();
}

bool canTellOwnUser() {
  return ::geteuid() != overflowUser() || mapsAllUsers();
}

UniqueFd connectToSameUser(const std::string& name, int type) {
  const SocketAddress address = SocketAddress::unixSocket(name);
  UniqueFd socket = UniqueFd::from([&] { return ::socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!socket || ::connect(socket.get(), address.raw(), address.rawLength()) != 0) {
    return UniqueFd();
  }
  if (!sameUser(socket.get())) {
    errno = EACCES;
    return UniqueFd();
  }
  return socket;
}

} // namespace pycomm
