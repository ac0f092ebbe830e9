#pragma once

#include <cstdint>
#include <exception>
#include <memory>

#include "engine/channel.h"
#include "engine/loop.h"
#include "transport/link.h"
#include "transport/shared_link.h"

namespace pycomm {

/// Told when a port's descriptor is ready. Both planes of a group own ports and decide what happens on them.
class PortOwner {
 public:
  virtual ~PortOwner() = default;
  virtual void onPortReady(int peer, bool outgoing, uint32_t events) = 0;
  virtual void onPortThrown(int peer, const std::exception_ptr& exception) noexcept = 0;
};

/// The connection that this rank opened to a peer, to write frames. The peer never writes on it.
struct OutPort final : Loop::Handler {
  OutPort(PortOwner& port_owner, int peer_rank, std::unique_ptr<Link> connecting)
      : owner(port_owner), peer(peer_rank), link(std::move(connecting)), channel(*link) {}
  void onReady(uint32_t events) override {
    owner.onPortReady(peer, true, events);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    owner.onPortThrown(peer, exception);
  }

  PortOwner& owner; ///< holds this port
  const int peer;
  std::unique_ptr<Link> link;
  OutChannel channel;
  SharedLink* shared = nullptr; ///< `link`, where it is one
  int watched = -1; ///< the descriptor of the link that the loop watches
  uint32_t watched_events = 0;
  bool connected = false;
  bool waits_for_room = false; ///< the loop watches for writability
  bool dirty = false; ///< has frames that nobody tried to write yet
  bool broken = false;
  bool only_asks = true; ///< no frame has been queued that the peer needs
  bool reader_gone = false; ///< of a shared link: the next write will fail
  bool says_goodbye = false; ///< its last frame is queued: the write side ends when that has left
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
    owner.onPortReady(peer, false, events);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    owner.onPortThrown(peer, exception);
  }

  PortOwner& owner; ///< holds this port
  const int peer;
  std::unique_ptr<Link> link;
  InChannel channel;
  SharedLink* shared = nullptr; ///< `link`, where it is one
  int watched = -1;
  bool ended = false; ///< the peer closed it, or we stopped reading
};

} // namespace pycomm
