#pragma once

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/unique_fd.h"
#include "transport/error_matchers.h"
#include "transport/loopback.h"
#include "transport/net/listener.h"
#include "transport/net/socket_link.h"

namespace pycomm::testing {

using SocketPair = std::pair<std::unique_ptr<SocketLink>, std::unique_ptr<SocketLink>>;

inline bool waitReadable(int fd, int timeout_ms = 10000) {
  pollfd wait{fd, POLLIN, 0};
  return ::poll(&wait, 1, timeout_ms) == 1;
}

/// Waits until all bytes that were written to this TCP socket of loopback lie at the other one, to be read, or the connection is over. On a
/// busy machine a thread of the kernel brings them, and needs a core.
inline bool waitDelivered(int fd) {
  int nbytes = 0;
  for (const Deadline deadline = Deadline::after(20000); ::ioctl(fd, SIOCOUTQ, &nbytes) == 0 && nbytes > 0;) {
    pollfd over{fd, 0, 0};
    if (::poll(&over, 1, 1) == 1) {
      return true;
    }
    if (deadline.expired()) {
      return false;
    }
  }
  return nbytes == 0;
}

/// The next connection. Throws Error(Timeout) if none comes.
inline std::unique_ptr<SocketLink> acceptOne(Listener& listener) {
  (void)waitReadable(listener.fd());
  auto incoming = listener.accept();
  if (!incoming) {
    throw Error(ErrorCode::Timeout, "nobody connected");
  }
  return std::make_unique<SocketLink>(std::move(incoming->fd));
}

/// Both ends of a TCP connection; the first one connected.
inline SocketPair tcpPair(const SocketAddress& local = kLoopback) {
  Listener listener = Listener::bind(local, {});
  auto first = connectSocket(local, listener.address(), Deadline::after(10000), kNoAbort);
  return {std::move(first), acceptOne(listener)};
}

/// Both ends of a socketpair().
inline SocketPair namelessPair() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw Error(ErrorCode::SystemError, "no pair of sockets could be made: " + errnoText(errno));
  }
  return {std::make_unique<SocketLink>(UniqueFd(ends[0])), std::make_unique<SocketLink>(UniqueFd(ends[1]))};
}

} // namespace pycomm::testing
