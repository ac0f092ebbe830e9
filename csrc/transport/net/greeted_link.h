#pragma once

#include <memory>
#include <string>

#include "base/unique_fd.h"
#include "transport/net/introduction.h"
#include "transport/net/tcp_link.h"

namespace pycomm {

/// A connection that this rank opens. finishConnect() connects, introduces this rank and reads the peer's reply; the link is up only
/// then. A peer may drop a connection before it replies (too many strangers at its port), and that says nothing about the peer: the link
/// connects again, after a pause of 5 ms that doubles up to 250 ms. A peer that has gone refuses the next connection, which ends it.
class GreetedLink final : public Link {
 public:
  /// Begins to connect. Throws what startConnect() throws.
  GreetedLink(const SocketAddress& local, const SocketAddress& remote, const Hello& hello);
  /// The same over a first connection, which exists already.
  GreetedLink(
      std::unique_ptr<TcpLink> first,
      const SocketAddress& local,
      const SocketAddress& remote,
      const Hello& hello);

  /// Changes with each connection. What is watched is open until finishConnect() has returned with another one: a number that is
  /// closed earlier may be given out again at once, to another connection of the same StripedLink, whose loop would take it for watched.
  [[nodiscard]] int fd() const noexcept override {
    return pausing_ ? pause_.get() : link_->fd();
  }
  [[nodiscard]] short roomEvent() const noexcept override;
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    return link_->tryWrite(views, count);
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    return link_->tryRead(into);
  }
  void shutdownWrite() noexcept override {
    link_->shutdownWrite();
  }
  /// Throws Error(ConnectFailed) if there is nobody to connect to, and what Introduction::advance() throws but for a drop.
  [[nodiscard]] bool finishConnect() override;
  [[nodiscard]] std::string describe() const override {
    return link_->describe();
  }

  /// Connections that the peer has dropped before it replied.
  [[nodiscard]] int drops() const noexcept {
    return drops_;
  }

 private:
  void pause();

  const SocketAddress local_;
  const SocketAddress remote_;
  const Hello hello_;
  std::unique_ptr<TcpLink> link_; ///< while pausing: the one that was dropped
  Introduction introduction_;
  UniqueFd pause_; ///< a timer, once there was a drop
  bool pausing_ = false;
  bool connected_ = false;
  bool accepted_ = false;
  int drops_ = 0;
};

} // namespace pycomm
