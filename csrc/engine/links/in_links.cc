#include "engine/links/in_links.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace pycomm {

InLinks::InLinks(
    const GroupIdentity& identity,
    size_t buffer_nbytes,
    Loop& loop,
    const RingRoute& route,
    LinkOwner& owner,
    std::vector<PeerLink>& peers)
    : identity_(identity), buffer_nbytes_(buffer_nbytes), loop_(loop), route_(route), owner_(owner), peers_(peers) {}

InLinks::~InLinks() {
  stop();
  for (PeerLink& peer : peers_) {
    peer.in = nullptr;
  }
}

// ---- links that arrive

void InLinks::adopt(int peer, std::unique_ptr<Link> link) {
  if (!isOpened(peer)) { // a second connection of one rank is no peer of ours: drop it
    open(peer, std::move(link), nullptr);
  }
}

void InLinks::adoptShared(int peer, std::unique_ptr<Link> bell) {
  if (isOpened(peer)) {
    return;
  }
  auto link = std::make_unique<SharedLink>(std::move(bell), route_.incoming(peer));
  SharedLink* const shared = link.get();
  open(peer, std::move(link), shared);
}

void InLinks::open(int peer, std::unique_ptr<Link> link, SharedLink* shared) {
  PortOwner& self = *this;
  auto port = std::make_unique<InPort>(self, peer, std::move(link), owner_, buffer_nbytes_);
  port->shared = shared;
  shared_.reserve(shared_.size() + (shared != nullptr ? 1 : 0)); // kept and watched, or neither
  port->watch(loop_);
  if (shared != nullptr) {
    shared_.push_back(port.get());
  }
  InPort& kept = *(peers_[static_cast<size_t>(peer)].in = std::move(port));
  read(kept);
}

// ---- reading

void InLinks::onPortReady(int peer, uint32_t) {
  owner_.onBehalfOf(peer, [&] { read(*peers_[static_cast<size_t>(peer)].in); });
}

bool InLinks::read(InPort& port) {
  if (port.ended) {
    return false;
  }
  bool open = true;
  std::optional<Error> broken;
  try {
    open = port.channel.read();
    if (open) {
      port.watch(loop_);
    }
  } catch (const Error& error) {
    const ErrorCode code = error.record().code;
    if (code != ErrorCode::ConnectionReset && code != ErrorCode::DataCorrupt) {
      endReading(port); // the owner may have taken in a part of a frame, and must not get it again or miss its rest
      throw;
    }
    broken = error;
    open = false;
  } catch (...) {
    endReading(port);
    throw;
  }
  if (!open && !port.ended) {
    endReading(port);
    owner_.onReadingEnded(port.peer, broken ? *broken : Error(ErrorCode::ConnectionReset, "the connection was closed"));
  }
  return !open || port.channel.moved();
}

Loop::Ticker::Look InLinks::look(const std::vector<int>& peers) {
  Loop::Ticker::Look looked = Loop::Ticker::Look::Nothing;
  for (const int peer : peers) {
    if (!isReading(peer)) {
      continue;
    }
    looked = Loop::Ticker::Look::NotYet;
    InPort& port = *peers_[static_cast<size_t>(peer)].in;
    if (port.shared != nullptr) {
      continue; // see pollShared()
    }
    bool moved = false;
    owner_.onBehalfOf(peer, [&] { moved = read(port); });
    if (moved) {
      return Loop::Ticker::Look::Moved;
    }
  }
  return looked;
}

bool InLinks::pollShared() {
  bool moved = false;
  for (size_t i = 0; i < shared_.size(); ++i) { // reading may open another one
    InPort& port = *shared_[i];
    if (!port.ended && port.shared->canRead()) {
      owner_.onBehalfOf(port.peer, [&] { read(port); });
      moved = true;
    }
  }
  return moved;
}

bool InLinks::restShared() noexcept {
  return std::all_of(
      shared_.begin(), shared_.end(), [](InPort* port) { return port->ended || port->shared->readSleeps(); });
}

// ---- the end

void InLinks::endReading(int peer) noexcept {
  endReading(*peers_[static_cast<size_t>(peer)].in);
}

void InLinks::endReading(InPort& port) noexcept {
  port.ended = true;
  port.unwatch(loop_);
}

void InLinks::stopTouchingMemory() noexcept {
  for (PeerLink& peer : peers_) {
    if (peer.in != nullptr) {
      peer.in->channel.stopTouchingMemory();
    }
  }
}

void InLinks::stop() noexcept {
  for (PeerLink& peer : peers_) {
    if (peer.in != nullptr) {
      endReading(*peer.in);
    }
  }
}

} // namespace pycomm
