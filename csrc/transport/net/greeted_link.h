#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "transport/net/hello.h"
#include "transport/net/socket_link.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

/// The connecting side of the handshake: sends its Hello, then reads the reply. One object per connection.
class Introduction {
 public:
  explicit Introduction(const Hello& hello) : size_(hello.size), group_(hello.group), bytes_(encodeHello(hello)) {}

  /// Makes as much progress as `link` allows; true once the peer has accepted. Reads nothing beyond the reply. Throws
  /// Error(ConnectionReset) if the peer dropped the connection before it replied, the peer's reason if it refused,
  /// Error(VersionMismatch) if another version of pycomm replied, and Error(ProtocolViolation) if the reply is invalid.
  [[nodiscard]] bool advance(Link& link);
  /// The event to poll for on link.fd() before the next advance().
  [[nodiscard]] short event() const noexcept {
    return !refused_ && written_ < bytes_.size() ? POLLOUT : POLLIN;
  }

 private:
  [[nodiscard]] bool read(Link& link, std::byte* into, size_t nbytes, size_t& got) const;

  int size_;
  uint32_t group_;
  std::string bytes_; ///< the Hello, then the reply's payload
  size_t written_ = 0;
  std::array<std::byte, sizeof(FrameHeader)> header_{}; ///< of the reply
  size_t header_got_ = 0;
  size_t payload_got_ = 0;
  bool refused_ = false; ///< bytes_ is the refusal's payload; payload_got_ bytes of it have arrived
};

/// A connection that this rank opens. finishConnect() connects, in TLS if there is a target for that, introduces this
/// rank and reads the peer's reply; only then is the link up. A peer may drop a connection before it replies (too many strangers at its port); this does not
/// mean that the peer is faulty. The link then reconnects after a pause of 5 ms that doubles up to 250 ms. If the peer
/// has gone, the next connection is refused and the link fails.
class GreetedLink final : public Link {
 public:
  /// Starts to connect. Throws what startConnect() throws, unless it only has to wait: until a Unix socket has room in its queue.
  GreetedLink(const SocketAddress& local, const SocketAddress& remote, const Hello& hello, const TlsTarget& tls = {});
  /// The same over a first connection that exists already.
  GreetedLink(
      std::unique_ptr<SocketLink> first,
      const SocketAddress& local,
      const SocketAddress& remote,
      const Hello& hello,
      const TlsTarget& tls = {});

  /// Changes with each connection. The old descriptor stays open until finishConnect() has returned and fd() has
  /// changed. If it were closed earlier, its number could be reused at once by the next connection, which
  /// the loop would take for the watched one.
  [[nodiscard]] int fd() const noexcept override {
    return pausing_ ? pause_.get() : link_->fd();
  }
  [[nodiscard]] short roomEvent() const noexcept override;
  [[nodiscard]] bool buffered() const noexcept override {
    return accepted_ && link_->buffered();
  }
  [[nodiscard]] bool unsent() const noexcept override {
    return accepted_ && link_->unsent();
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    return link_->tryWrite(views, count);
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    return link_->tryRead(into);
  }
  void shutdownWrite() noexcept override {
    if (link_ != nullptr) {
      link_->shutdownWrite();
    }
  }
  /// Throws Error(ConnectFailed) if no process listens at the address, and what TlsLink::finishConnect() and
  /// Introduction::advance() throw except for a drop.
  [[nodiscard]] bool finishConnect() override;
  [[nodiscard]] std::string describe() const override {
    return link_ != nullptr ? link_->describe() : local_.text() + " -> " + remote_.text();
  }

  /// Number of connections that the peer dropped before it replied.
  [[nodiscard]] int drops() const noexcept {
    return drops_;
  }
  /// Why it dropped the last one, if it has said so.
  [[nodiscard]] const std::string& lastDrop() const noexcept {
    return last_drop_;
  }

 private:
  void connect();
  [[nodiscard]] std::unique_ptr<Link> secured(std::unique_ptr<SocketLink> link) const;
  void pause();

  const SocketAddress local_;
  const SocketAddress remote_;
  const Hello hello_;
  const TlsTarget tls_;
  std::unique_ptr<Link> link_; ///< during a pause: the dropped one, or null
  Introduction introduction_;
  UniqueFd pause_; ///< a timer, created at the first drop
  bool pausing_ = false;
  bool connected_ = false;
  bool accepted_ = false;
  int drops_ = 0;
  std::string last_drop_;
};

} // namespace pycomm
