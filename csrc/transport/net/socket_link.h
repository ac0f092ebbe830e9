#pragma once

#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "transport/link.h"
#include "transport/net/address.h"

namespace pycomm {

/// A Link over one socket: TCP, or a Unix socket within a host. `would_block` and `closed` are set only if the kernel
/// reports so: a short read or write
/// implies neither. Interrupted calls are repeated.
class SocketLink final : public Link {
 public:
  /// Takes over a connected socket. Sets it nonblocking and closed on exec; over TCP, the kernel probes an idle peer.
  explicit SocketLink(UniqueFd fd);

  [[nodiscard]] int fd() const noexcept override {
    return fd_.get();
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override;
  [[nodiscard]] Progress tryRead(BufferView into) override;
  void shutdownWrite() noexcept override;
  [[nodiscard]] std::string describe() const override;

  /// For a link of startConnect(): true once connected, false while the kernel is still trying. Poll fd() for writing
  /// before the next call. Throws Error(ConnectFailed) with errno's name in `cause`; the link is unusable then.
  [[nodiscard]] bool finishConnect() override;
  /// The same as a number: 0, EINPROGRESS, or the errno of the failure (once; the kernel forgets it).
  [[nodiscard]] int connectStatus() noexcept;

  [[nodiscard]] const SocketAddress& local() const noexcept {
    return local_;
  }
  [[nodiscard]] const SocketAddress& remote() const noexcept {
    return remote_;
  }

 private:
  friend class SocketConnector; // sets remote_ and connecting_, see socket_connect.cc

  UniqueFd fd_;
  SocketAddress local_;
  SocketAddress remote_;
  bool connecting_ = false;
  bool refused_ = false; ///< a Unix socket that nobody listens at
};

/// Starts to connect and returns at once. `local` is the address to connect from (its port does not count); if empty,
/// the kernel chooses, as it does for a Unix socket. The process behind a Unix socket must be this user's. A link-local `remote` without a scope gets that of `local`. Throws Error(ConnectFailed),
/// Error(TooManyFiles).
[[nodiscard]] std::unique_ptr<SocketLink> startConnect(const SocketAddress& local, const SocketAddress& remote);

inline constexpr int kLastConnectPauseMs = 250; ///< between attempts: doubled from kShortPauseMs up to this

/// Connects, and retries until the deadline while the peer refuses or is unreachable. Throws Error(ConnectFailed)
/// naming both addresses, the interface, the number of attempts and the last errno; the token's reason when aborted.
[[nodiscard]] std::unique_ptr<SocketLink> connectSocket(
    const SocketAddress& local,
    const SocketAddress& remote,
    Deadline deadline,
    const AbortToken& abort);

} // namespace pycomm
