#include "transport/net/listener.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <map>

#include "base/error.h"
#include "base/fault_point.h"
#include "transport/net/unix_peer.h"

namespace pycomm {
namespace {

constexpr int kBacklog = 1024; // the kernel caps it at net.core.somaxconn
constexpr int kMostOthers = 64; // a flood must not keep the caller

// Listens on one port. Returns errno, or 0 if it succeeded.
int listenOn(const UniqueFd& fd, const SocketAddress& address) {
  const Fault fault = PYCOMM_FAULT("listener.bind");
  if (fault.error_number != 0) {
    return fault.error_number;
  }
  const int on = 1;
  // A fixed port may still have connections of the last run in TIME_WAIT; they must not keep us from it. On Linux the
  // option never lets two sockets listen on one port. For any free port it would only widen the choice to busy ones.
  if (address.port() != 0 && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) {
    return errno;
  }
  if (address.family() == AddressFamily::IPv6 &&
      ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on) != 0) {
    return errno;
  }
  if (::bind(fd.get(), address.raw(), address.rawLength()) != 0) {
    return errno;
  }
  return ::listen(fd.get(), kBacklog) == 0 ? 0 : errno;
}

std::string counted(const std::map<int, int>& errors) {
  std::string out;
  for (const auto& [error_number, count] : errors) {
    out += (out.empty() ? "" : ", ") + errnoText(error_number) + " on " + std::to_string(count) +
        (count == 1 ? " port" : " ports");
  }
  return out;
}

} // namespace

std::string PortRange::text() const {
  return any() ? "any" : std::to_string(first) + "-" + std::to_string(last);
}

Listener Listener::bind(const SocketAddress& local, PortRange ports) {
  if (local.empty() || local.isUnspecified()) {
    throw Error(
        ErrorCode::InvalidArgument,
        "a listener needs one address of this host, not " + local.text(),
        "an unspecified address would let the whole network connect");
  }
  if (ports.first > ports.last || (ports.first == 0 && ports.last != 0)) {
    throw Error(
        ErrorCode::InvalidArgument, "port range " + ports.text() + " holds no port", "PYCOMM_PORT_RANGE=29600-29699");
  }
  std::map<int, int> errors;
  for (uint32_t port = ports.first; port <= ports.last; ++port) {
    const SocketAddress wanted = local.withPort(static_cast<uint16_t>(port));
    // A new socket for each port: one that was bound before listen() failed cannot be bound again.
    UniqueFd fd = UniqueFd::from(
        [&] { return ::socket(wanted.raw()->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
    if (!fd) {
      throw Error(systemError(ErrorCode::SystemError, "no socket to listen on could be made", errno));
    }
    const int error_number = listenOn(fd, wanted);
    if (error_number == 0) {
      sockaddr_storage bound{};
      socklen_t length = sizeof bound;
      if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
        throw Error(systemError(ErrorCode::SystemError, "the port of a listener cannot be read", errno));
      }
      Listener listener;
      listener.fd_ = std::move(fd);
      listener.address_ = SocketAddress::fromSockaddr(reinterpret_cast<const sockaddr*>(&bound), length);
      return listener;
    }
    if (error_number == EADDRNOTAVAIL) {
      throw Error(systemError(ErrorCode::NoInterface, "this host has no address " + local.ip(), error_number));
    }
    ++errors[error_number];
  }
  ErrorRecord record;
  record.code = ErrorCode::PortsExhausted;
  record.summary = ports.any() ? "no free port on " + local.ip()
                               : "no port of the range " + ports.text() + " on " + local.ip() + " can be listened on";
  record.cause = counted(errors);
  record.hint = "a wider PYCOMM_PORT_RANGE, one port per rank on each host; `ss -ltnp` shows who holds them";
  throw Error(record);
}

Listener Listener::bindUnix(const std::string& name) {
  Listener listener;
  listener.address_ = SocketAddress::unixSocket(name);
  listener.fd_ = UniqueFd::from([] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  const Fault fault = PYCOMM_FAULT("listener.bind_unix");
  if (!listener.fd_ || fault.error_number != 0 ||
      ::bind(listener.fd_.get(), listener.address_.raw(), listener.address_.rawLength()) != 0 ||
      ::listen(listener.fd_.get(), kBacklog) != 0) {
    const int error_number = fault.error_number != 0 ? fault.error_number : errno;
    throw Error(systemError(ErrorCode::SystemError, "no Unix socket in the abstract namespace", error_number));
  }
  return listener;
}

void Listener::deferSilent() noexcept {
  if (address_.isUnix()) {
    return;
  }
  constexpr auto kSeconds = static_cast<int>(kStrangerWithin.count());
  // A pure optimisation: if a kernel refuses it, the listener still works.
  (void)::setsockopt(fd_.get(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &kSeconds, sizeof kSeconds);
}

std::optional<Listener::Incoming> Listener::accept() {
  for (int others = 0; others < kMostOthers;) {
    sockaddr_storage remote{};
    socklen_t length = sizeof remote;
    const Fault fault = PYCOMM_FAULT("listener.accept");
    UniqueFd fd = UniqueFd::from([&] {
      return fault.error_number != 0
          ? failWith(fault.error_number)
          : ::accept4(fd_.get(), reinterpret_cast<sockaddr*>(&remote), &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    });
    if (fd && address_.isUnix() && !sameUser(fd.get())) {
      ++others;
      continue;
    }
    if (fd) {
      return Incoming{std::move(fd), SocketAddress::fromSockaddr(reinterpret_cast<const sockaddr*>(&remote), length)};
    }
    switch (errno) {
      case EAGAIN:
        return std::nullopt;
      case EINTR:
      // Errors of the connection that was about to be accepted, not of the listener (man 2 accept): take the next.
      case ECONNABORTED:
      case ENETDOWN:
      case EPROTO:
      case ENOPROTOOPT:
      case EHOSTDOWN:
      case ENONET:
      case EHOSTUNREACH:
      case EOPNOTSUPP:
      case ENETUNREACH:
      case EPERM:
        continue;
    }
    throw Error(systemError(ErrorCode::SystemError, "no connection can be accepted on " + address_.text(), errno));
  }
  return std::nullopt;
}

} // namespace pycomm
