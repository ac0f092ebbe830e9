#pragma once

#include <cassert>
#include <cstdint>
#include <exception>
#include <memory>

#include "base/deadline.h"
#include "base/slow_wait.h"
#include "engine/links/channel.h"
#include "engine/loop/loop.h"
#include "transport/link.h"
#include "transport/memory/shared_link.h"

namespace pycomm {

/// Is called when a port's descriptor is ready.
class PortOwner {
 public:
  virtual ~PortOwner() = default;
  virtual void onPortReady(int peer, uint32_t events) = 0;
  virtual void onPortThrown(int peer, const std::exception_ptr& exception) noexcept = 0;
};

/// The descriptor of a port's link that the loop watches, as links change theirs.
struct PortWatch {
  void set(Loop& loop, int fd, uint32_t events, Loop::Handler& port);
  void end(Loop& loop) noexcept;

 private:
  int fd_ = -1; ///< none
  uint32_t events_ = 0;
};

/// The connection that this rank opened to a peer, to write frames. The peer writes only its HelloReply on it and, of a shared link, bytes
/// that wake this rank.
struct OutPort final : Loop::Handler {
  enum class State {
    Connecting, ///< no frame can leave yet
    Open, ///< a frame that is queued leaves at the next flush
    Full, ///< frames wait for room
    Closing, ///< its last frame, a goodbye, waits for room
    Ended, ///< the goodbye has left
    Broken, ///< nothing can leave any more
  };

  OutPort(PortOwner& port_owner, int peer_rank, std::unique_ptr<Link> connecting)
      : owner(port_owner), peer(peer_rank), link(std::move(connecting)), channel(*link) {}
  void onReady(uint32_t events) override {
    owner.onPortReady(peer, events);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    owner.onPortThrown(peer, exception);
  }

  /// Whether a port may go from one state to another: forward, except that a full one opens again.
  [[nodiscard]] static bool mayFollow(State next, State now) noexcept {
    switch (now) {
      case State::Connecting:
        return next == State::Open || next == State::Broken;
      case State::Open:
      case State::Full:
        return next == State::Open || next == State::Full || next == State::Closing || next == State::Broken;
      case State::Closing:
        return next == State::Ended || next == State::Broken;
      case State::Ended:
      case State::Broken:
        return next == State::Broken;
    }
    return false;
  }
  void become(State next) noexcept {
    assert(mayFollow(next, state_));
    state_ = next;
  }
  [[nodiscard]] State state() const noexcept {
    return state_;
  }
  [[nodiscard]] bool connected() const noexcept {
    return state_ == State::Open || state_ == State::Full || state_ == State::Closing;
  }
  [[nodiscard]] bool waitsForRoom() const noexcept {
    return state_ == State::Full || state_ == State::Closing;
  }

  /// Has the loop watch the connection that the link goes on with, for what this state needs.
  void watch(Loop& loop);
  void unwatch(Loop& loop) noexcept {
    watch_.end(loop);
  }
  /// The peer has closed: its hang-up would wake the loop again and again.
  void stopWatching(Loop& loop) noexcept {
    unwatch(loop);
    hung_up_ = true;
  }

  PortOwner& owner; ///< holds this port
  const int peer;
  std::unique_ptr<Link> link;
  OutChannel channel;
  SharedLink* shared = nullptr; ///< `link`, if it is one
  bool needed = false; ///< a frame has been queued that an operation cannot go on without
  bool to_flush = false; ///< is in the list of ports whose frames nobody tried to write yet
  bool reader_gone = false; ///< of a shared link: the next write will fail
  SlowWait slow{Clock::now()}; ///< while it connects

 private:
  [[nodiscard]] uint32_t events() const noexcept;

  State state_ = State::Connecting;
  bool hung_up_ = false;
  PortWatch watch_;
};

/// The connection that a peer opened to this rank, to read frames.
struct InPort final : Loop::Handler {
  InPort(
      PortOwner& port_owner,
      int peer_rank,
      std::unique_ptr<Link> accepted,
      InChannel::Receiver& receiver,
      size_t buffer_nbytes)
      : owner(port_owner),
        peer(peer_rank),
        link(std::move(accepted)),
        channel(peer_rank, *link, receiver, buffer_nbytes) {}
  void onReady(uint32_t events) override {
    owner.onPortReady(peer, events);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    owner.onPortThrown(peer, exception);
  }

  /// Has the loop watch the connection that the link goes on with, unless it has ended.
  void watch(Loop& loop);
  void unwatch(Loop& loop) noexcept {
    watch_.end(loop);
  }

  PortOwner& owner; ///< holds this port
  const int peer;
  std::unique_ptr<Link> link;
  InChannel channel;
  SharedLink* shared = nullptr; ///< `link`, if it is one
  bool ended = false; ///< the peer closed it, or this rank stopped reading

 private:
  [[nodiscard]] uint32_t events() const noexcept;

  PortWatch watch_;
};

/// The bulk links between this rank and one peer.
struct PeerLink {
  std::unique_ptr<OutPort> out; ///< null until first needed
  std::unique_ptr<InPort> in; ///< null until the peer has opened it
  bool cannot_be_asked = false; ///< that has been logged
  bool ring_used = false; ///< by an earlier link to it: a second writer would begin to count anew
};

} // namespace pycomm
