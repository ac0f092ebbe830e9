#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "transport/net/address.h"

namespace pycomm {

/// Ports a process may listen on, both ends included. {0, 0}: any free port.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;

  [[nodiscard]] bool any() const noexcept {
    return first == 0 && last == 0;
  }
  [[nodiscard]] std::string text() const;
};

/// How long a connection may take to say who it is.
inline constexpr std::chrono::seconds kStrangerWithin{kOneStepMs / 1000};
static_assert(kStrangerWithin == std::chrono::milliseconds(kOneStepMs), "the kernel counts it in seconds");

/// A listening socket, on exactly the given address, or a Unix socket for this user's processes on this host. Movable;
/// empty after a move.
class Listener {
 public:
  /// A connection from which nothing has been read. The descriptor is nonblocking and closed on exec.
  struct Incoming {
    UniqueFd fd;
    SocketAddress remote;
  };

  Listener() = default;

  /// Takes the first free port of the range. Throws Error(PortsExhausted) naming the range, the address and the errors,
  /// Error(NoInterface) if the address is not one of this host, or Error(InvalidArgument) for an unspecified address
  /// (it would listen on all interfaces) or a range that runs backwards.
  [[nodiscard]] static Listener bind(const SocketAddress& local, PortRange ports);

  /// SocketAddress::unixSocket(name). Throws Error(SystemError) where this process may have none.
  [[nodiscard]] static Listener bindUnix(const std::string& name);

  [[nodiscard]] int fd() const noexcept {
    return fd_.get();
  }
  [[nodiscard]] explicit operator bool() const noexcept {
    return static_cast<bool>(fd_);
  }
  /// The listening address, with the port that was taken.
  [[nodiscard]] const SocketAddress& address() const noexcept {
    return address_;
  }

  /// From now on a connection waits in the kernel until its client has sent something, for kStrangerWithin at
  /// most (TCP_DEFER_ACCEPT). So a client that only connects costs this process nothing. Does nothing for a Unix socket.
  void deferSilent() noexcept;

  /// The next waiting connection, or nullopt; connections of other users to a Unix socket are dropped, at most 64 of them in one
  /// call: then nullopt too, and fd() stays readable. Never blocks. Throws Error(TooManyFiles) if this process may open no more
  /// files. The connection then stays in the kernel's queue and keeps fd() readable, so the caller must pause instead
  /// of retrying at once.
  [[nodiscard]] std::optional<Incoming> accept();

 private:
  UniqueFd fd_;
  SocketAddress address_;
};

} // namespace pycomm
