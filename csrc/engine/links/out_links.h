#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "engine/links/connector.h"
#include "engine/links/link_owner.h"
#include "engine/links/port.h"
#include "engine/links/ring_route.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/group_identity.h"

namespace pycomm {

/// The bulk links of PeerLinks that this rank opens, at most one to each peer: frames leave on them. The first frame for a peer opens its
/// link. OutPort::State says how far one is.
///
/// A link that breaks stays broken, and so no frame is lost between two; but for one that only questions used, which is opened anew.
/// Thread: the data loop's, for everything.
class OutLinks final : private PortOwner {
 public:
  /// Begins to connect, for a simulator; empty: by a socket.
  using Connect = std::function<std::unique_ptr<Link>(int peer)>;

  /// All that is given here outlives this.
  OutLinks(
      const GroupIdentity& identity,
      const Connect& connect,
      Loop& loop,
      StagingPool& staging,
      LinkOwner& owner,
      std::vector<PeerLink>& peers);
  ~OutLinks() override;
  OutLinks(const OutLinks&) = delete;
  OutLinks& operator=(const OutLinks&) = delete;

  /// See PeerLinks.
  void send(int peer, OutFrame&& frame);
  void ask(int peer, OutFrame&& question);
  [[nodiscard]] bool flush();
  void shareRings(HostRings rings);
  void useRings(bool all_have_them);
  /// Drops every frame that is queued.
  void stopTouchingMemory() noexcept;
  bool sayGoodbyes() noexcept;
  [[nodiscard]] bool isClosing() const noexcept;
  /// Nothing is written any more.
  void stop() noexcept;

  [[nodiscard]] bool isWriting(int peer) const noexcept {
    const std::unique_ptr<OutPort>& port = peers_[static_cast<size_t>(peer)].out;
    return port != nullptr && (port->state() == OutPort::State::Open || port->state() == OutPort::State::Full);
  }
  [[nodiscard]] const RingRoute& route() const noexcept {
    return route_;
  }
  /// Links through shared memory.
  [[nodiscard]] size_t shared() const noexcept {
    return shared_.size();
  }

  /// Logs each link that has not come up for long.
  void tick(TimePoint now);
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return next_look_;
  }

  [[nodiscard]] bool pollShared();
  [[nodiscard]] bool restShared() noexcept;

 private:
  void onPortReady(int peer, uint32_t events) override;
  void onPortThrown(int peer, const std::exception_ptr& exception) noexcept override {
    owner_.onThrown(peer, exception);
  }
  void queue(int peer, OutFrame&& frame, bool needed);
  void askFailed(int peer, const Error& error);
  OutPort& portTo(int peer);
  [[nodiscard]] std::unique_ptr<OutPort> startPort(int peer);
  void forget(int peer) noexcept;
  void writeHello(OutPort& port);
  void writeReady(OutPort& port);
  void flush(OutPort& port);
  void broke(OutPort& port, const Error& error);
  void sayGoodbye(OutPort& port);

  const GroupIdentity& identity_;
  const Connect& connect_;
  Loop& loop_;
  StagingPool& staging_;
  LinkOwner& owner_;
  const Connector connector_;
  RingRoute route_;
  std::vector<PeerLink>& peers_; ///< by rank; PeerLinks' own
  std::vector<OutPort*> to_flush_; ///< ports of peers_, as the next
  std::vector<OutPort*> shared_; ///< those that have a shared link
  TimePoint next_look_ = TimePoint::max(); ///< at links that do not come up
};

} // namespace pycomm
