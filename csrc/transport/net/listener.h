#pragma once

#include <cstdint>
#include <optional>
#include <string>

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

/// A listening socket, on exactly the given address. Movable; empty after a move.
class Listener {
 public:
  /// A connection nobody has spoken on yet. The descriptor is nonblocking and closed on exec.
  struct Incoming {
    UniqueFd fd;
    SocketAddress remote;
  };

  Listener() = default;

  /// Takes the first free port of the range. Throws Error(PortsExhausted) naming range, address and the errors met,
  /// Error(NoInterface) if the address is not one of this host, Error(InvalidArgument) for an unspecified address (it
  /// would listen to the whole world) or a range that runs backwards.
  [[nodiscard]] static Listener bind(const SocketAddress& local, PortRange ports);

  [[nodiscard]] int fd() const noexcept {
    return fd_.get();
  }
  [[nodiscard]] explicit operator bool() const noexcept {
    return static_cast<bool>(fd_);
  }
  /// With the port that was taken.
  [[nodiscard]] const SocketAddress& address() const noexcept {
    return address_;
  }

  /// From now on a connection waits in the kernel until its client has sent something, for 2 s at most (TCP_DEFER_ACCEPT): a client that
  /// only connects costs this process nothing.
  void deferSilent() noexcept;

  /// The next waiting connection, or nothing. Never blocks. Throws Error(TooManyFiles) when this process may open no
  /// more files: the connection stays in the kernel's queue and keeps fd() readable, so the caller must pause, not
  /// retry.
  [[nodiscard]] std::optional<Incoming> accept();

 private:
  UniqueFd fd_;
  SocketAddress address_;
};

} // namespace pycomm
