#pragma once

#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "transport/net/introduction.h"
#include "transport/net/socket_link.h"
#include "transport/secure/tls_context.h"

namespace pycomm {

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
