#include "transport/memory/unix_passing.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "base/fork_guard.h"

namespace pycomm {

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
