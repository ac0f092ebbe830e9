#include "transport/net/socket_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"

namespace pycomm {
namespace {

constexpr size_t kMaxSendViews = 64; // far below IOV_MAX; more views simply take another call
// An idle peer is probed: its host may have vanished silently.
constexpr int kIdleS = 10;
constexpr int kProbeEveryS = 5;
constexpr int kProbes = 3;

SocketAddress addressOf(int fd, int (*query)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (query(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return {};
  }
  return SocketAddress::fromSockaddr(reinterpret_cast<const sockaddr*>(&address), length);
}

// Options that only tune: a kernel that refuses one still gives a working link.
void tune(int fd, int level, int option, int value) {
  (void)::setsockopt(fd, level, option, &value, sizeof value);
}

void configure(int fd) {
  tune(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  tune(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  tune(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
  tune(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeEveryS);
  tune(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

[[noreturn]] void throwBroken(const char* what, const SocketLink& link, int error_number) {
  const std::string summary = std::string(what) + " failed on " + link.describe();
  throw Error(systemError(ErrorCode::ConnectionReset, summary, error_number));
}

} // namespace

SocketLink::SocketLink(UniqueFd fd) : fd_(std::move(fd)) {
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) != 0 ||
      ::fcntl(fd_.get(), F_SETFD, FD_CLOEXEC) != 0) {
    throw Error(systemError(ErrorCode::SystemError, "a socket cannot be made nonblocking", errno));
  }
  local_ = addressOf(fd_.get(), ::getsockname);
  remote_ = addressOf(fd_.get(), ::getpeername);
  if (!local_.isUnix()) {
    configure(fd_.get());
  }
}

Progress SocketLink::tryWrite(const ConstBufferView* views, size_t count) {
  std::array<iovec, kMaxSendViews> parts; // NOLINT: filled below as far as it is used
  msghdr gather{};
  gather.msg_iov = parts.data();
  for (size_t i = 0; i < count && gather.msg_iovlen < kMaxSendViews; ++i) {
    if (views[i].nbytes > 0) {
      // sendmsg only reads; iovec has no const form.
      parts[gather.msg_iovlen++] = {const_cast<std::byte*>(views[i].ptr), views[i].nbytes};
    }
  }
  Progress progress;
  if (gather.msg_iovlen == 0) {
    return progress;
  }
  for (;;) {
    const Fault fault = PYCOMM_FAULT("socket.write");
    if (fault.shorten) {
      gather.msg_iovlen = 1;
      parts[0].iov_len = 1;
    }
    const ssize_t sent = fault.error_number != 0 ? failWith(fault.error_number)
                                                 : ::sendmsg(fd_.get(), &gather, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      progress.nbytes = static_cast<size_t>(sent);
      return progress;
    }
    if (errno == EAGAIN) {
      progress.would_block = true;
      return progress;
    }
    if (errno != EINTR) {
      throwBroken("writing", *this, errno);
    }
  }
}

Progress SocketLink::tryRead(BufferView into) {
  Progress progress;
  if (into.nbytes == 0) {
    return progress; // recv would return 0, which otherwise means the end
  }
  for (;;) {
    const Fault fault = PYCOMM_FAULT("socket.read");
    const size_t wanted = fault.shorten ? 1 : into.nbytes;
    const ssize_t received =
        fault.error_number != 0 ? failWith(fault.error_number) : ::recv(fd_.get(), into.ptr, wanted, MSG_DONTWAIT);
    if (received >= 0) {
      if (fault.flip) {
        flipBit(into.ptr, static_cast<size_t>(received));
      }
      progress.nbytes = static_cast<size_t>(received);
      progress.closed = received == 0;
      return progress;
    }
    if (errno == EAGAIN) {
      progress.would_block = true;
      return progress;
    }
    if (errno != EINTR) {
      throwBroken("reading", *this, errno);
    }
  }
}

void SocketLink::shutdownWrite() noexcept {
  (void)::shutdown(fd_.get(), SHUT_WR); // fails only if the connection is gone already
}

std::string SocketLink::describe() const {
  return local_.text() + " -> " + remote_.text();
}

int SocketLink::connectStatus() noexcept {
  if (!connecting_) {
    return 0;
  }
  if (refused_) {
    return ECONNREFUSED;
  }
  pollfd wait{fd_.get(), POLLOUT, 0};
  if (::poll(&wait, 1, 0) <= 0) {
    return EINPROGRESS;
  }
  // Read only after poll(): otherwise a refusal that arrives between the two would look like a connection.
  int error_number = 0;
  socklen_t length = sizeof error_number;
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error_number, &length) != 0) {
    return errno;
  }
  if (error_number != 0) {
    return error_number;
  }
  connecting_ = false;
  local_ = addressOf(fd_.get(), ::getsockname);
  // A port without a listener can be drawn as the socket's own local port; TCP then connects the socket to itself.
  return local_ == remote_ ? ECONNREFUSED : 0;
}

} // namespace pycomm
