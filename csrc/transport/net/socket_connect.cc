#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "transport/net/interfaces.h"
#include "transport/net/socket_link.h"
#include "transport/net/unix_peer.h"

namespace pycomm {

/// One attempt to connect: either `link` is set, connected or connecting, or `error_number` gives the reason.
class SocketConnector {
 public:
  SocketConnector(const SocketAddress& local, const SocketAddress& remote) {
    const bool needs_scope = remote.isLinkLocal() && remote.scopeId() == 0;
    const SocketAddress target = needs_scope ? remote.withScopeId(local.scopeId()) : remote;
    UniqueFd fd = UniqueFd::from(
        [&] { return ::socket(target.raw()->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
    if (!fd || !bindTo(fd, local)) {
      error_number = errno;
      return;
    }
    const Fault fault = PYCOMM_FAULT("socket.connect");
    if (fault.error_number != 0) {
      error_number = fault.error_number;
      return;
    }
    auto fresh = std::make_unique<SocketLink>(std::move(fd));
    fresh->remote_ = target;
    fresh->connecting_ = true;
    if (::connect(fresh->fd(), target.raw(), target.rawLength()) != 0 && errno != EINPROGRESS && errno != EINTR) {
      if (target.isUnix() && errno == ECONNREFUSED) {
        // connectStatus() reports the refusal, as for TCP: a peer that leaves has said goodbye on its control link, which is read first.
        fresh->refused_ = true;
        link = std::move(fresh);
        return;
      }
      error_number = errno; // after EINTR the attempt goes on by itself, as after EINPROGRESS
      return;
    }
    if (target.isUnix() && !sameUser(fresh->fd())) {
      error_number = EACCES;
      return;
    }
    link = std::move(fresh);
  }

  std::unique_ptr<SocketLink> link;
  int error_number = 0;

 private:
  static bool bindTo(const UniqueFd& fd, const SocketAddress& local) {
    if (local.empty() || local.isUnix()) {
      return true;
    }
    // The port is chosen at connect(), which may share one among different peers; bind() would take one for us alone.
    const int on = 1;
    (void)::setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    const SocketAddress any_port = local.withPort(0);
    return ::bind(fd.get(), any_port.raw(), any_port.rawLength()) == 0;
  }
};

namespace {

ErrorRecord connectFailed(const SocketAddress& local, const SocketAddress& remote, int error_number) {
  const std::string from = local.empty() ? "" : " from " + local.ip();
  ErrorRecord record = systemError(ErrorCode::ConnectFailed, "no connection to " + remote.text() + from, error_number);
  record.phase = ErrorPhase::Connect;
  return record;
}

// A refusal can mean "not listening yet"; a route, a neighbour or a free local port can be missing for a moment.
bool worthAnotherTry(int error_number) {
  switch (error_number) {
    case ECONNREFUSED:
    case ECONNRESET:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case EADDRNOTAVAIL:
    case EAGAIN:
      return true;
  }
  return false;
}

std::string interfaceOf(const SocketAddress& local) {
  try {
    for (const Interface& interface : listInterfaces()) {
      for (const SocketAddress& address : interface.addresses) {
        if (address.sameIp(local)) {
          return " on " + interface.name;
        }
      }
    }
  } catch (const Error&) {
    // it only decorates a report
  }
  return "";
}

// One attempt up to its end. 0 or an errno; ETIMEDOUT at the deadline.
int attempt(SocketConnector& connector, Deadline deadline, const AbortToken& abort) {
  if (!connector.link) {
    return connector.error_number;
  }
  for (;;) {
    const int status = connector.link->connectStatus();
    if (status != EINPROGRESS) {
      return status;
    }
    abort.throwIfAborted();
    if (deadline.expired()) {
      return ETIMEDOUT;
    }
    pollfd wait{connector.link->fd(), POLLOUT, 0};
    (void)::poll(&wait, 1, deadline.remainingMs(kAbortSliceMs));
  }
}

} // namespace

bool SocketLink::finishConnect() {
  const int status = connectStatus();
  if (status != 0 && status != EINPROGRESS) {
    throw Error(connectFailed(local_, remote_, status));
  }
  return status == 0;
}

std::unique_ptr<SocketLink> startConnect(const SocketAddress& local, const SocketAddress& remote) {
  SocketConnector connector(local, remote);
  if (!connector.link) {
    throw Error(connectFailed(local, remote, connector.error_number));
  }
  return std::move(connector.link);
}

std::unique_ptr<SocketLink> connectSocket(
    const SocketAddress& local,
    const SocketAddress& remote,
    Deadline deadline,
    const AbortToken& abort) {
  const TimePoint begin = Clock::now();
  int pause_ms = kShortPauseMs;
  for (int attempts = 1;; ++attempts) {
    abort.throwIfAborted();
    SocketConnector connector(local, remote);
    const int status = attempt(connector, deadline, abort);
    if (status == 0) {
      return std::move(connector.link);
    }
    if (!worthAnotherTry(status) || deadline.expired()) {
      ErrorRecord record = connectFailed(local, remote, status);
      const auto elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
      record.elapsed_ms = elapsed.count();
      record.summary += (local.empty() ? "" : interfaceOf(local)) + " after " + std::to_string(attempts) +
          (attempts == 1 ? " attempt" : " attempts");
      if (record.hint.empty() && remote.isUnix()) {
        record.hint = "does that process still run? PYCOMM_TRANSPORT=tcp does without Unix sockets";
      }
      if (record.hint.empty()) {
        record.hint =
            "is the peer running, and does a firewall between the hosts let this port through? python -m pycomm doctor, on "
            "each host, finds the blocked port; "
            "PYCOMM_SOCKET_IFNAME chooses the interface, PYCOMM_PORT_RANGE the ports";
      }
      throw Error(record);
    }
    connector.link.reset();
    pauseFor(pause_ms, deadline, abort);
    pause_ms = std::min(pause_ms * 2, kLastConnectPauseMs);
  }
}

} // namespace pycomm
