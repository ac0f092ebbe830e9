#include "transport/net/unix_peer.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "base/fork_guard.h"
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

bool passMessage(int socket, const void* message, size_t nbytes, int fd) {
  iovec part{const_cast<void*>(message), nbytes}; // only read
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  return ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(nbytes);
}

ssize_t takeMessage(int socket, void* message, size_t nbytes, UniqueFd& fd) {
  iovec part{message, nbytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = CMSG_LEN(sizeof(int)); // with the padding of CMSG_SPACE there would be room for two
  const ForksHeldOff held_off; // until the received descriptor has an owner
  const ssize_t got = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) {
    return got;
  }
  const cmsghdr* rights = CMSG_FIRSTHDR(&header);
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof(int))) {
    int taken = -1;
    std::memcpy(&taken, CMSG_DATA(rights), sizeof taken);
    fd = UniqueFd(taken);
  }
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    errno = EMSGSIZE;
    return -1;
  }
  return got;
}

} // namespace pycomm
