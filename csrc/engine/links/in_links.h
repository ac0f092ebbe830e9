#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "engine/links/link_owner.h"
#include "engine/links/port.h"
#include "engine/links/ring_route.h"
#include "engine/loop/loop.h"
#include "engine/operation/group_identity.h"

namespace pycomm {

/// The bulk links of PeerLinks that peers opened to this rank, at most one per peer: frames arrive on them. A link that has ended, or
/// that this rank has stopped reading, stays until the group ends: the peer opens no second one.
/// Thread: the data loop's, for everything.
class InLinks final : private PortOwner {
 public:
  /// All that is given here outlives this. `buffer_nbytes`: of each link.
  InLinks(
      const GroupIdentity& identity,
      size_t buffer_nbytes,
      Loop& loop,
      const RingRoute& route,
      LinkOwner& owner,
      std::vector<PeerLink>& peers);
  ~InLinks() override;
  InLinks(const InLinks&) = delete;
  InLinks& operator=(const InLinks&) = delete;

  /// See PeerLinks.
  void adopt(int peer, std::unique_ptr<Link> link);
  void adoptShared(int peer, std::unique_ptr<Link> bell);
  void endReading(int peer) noexcept;
  /// Drops every place that arriving payloads go to.
  void stopTouchingMemory() noexcept;
  /// Nothing is read any more.
  void stop() noexcept;

  [[nodiscard]] bool isOpened(int peer) const noexcept {
    return peers_[static_cast<size_t>(peer)].in != nullptr;
  }
  [[nodiscard]] bool isReading(int peer) const noexcept {
    return isOpened(peer) && !peers_[static_cast<size_t>(peer)].in->ended;
  }
  [[nodiscard]] bool hasEnded(int peer) const noexcept {
    return isOpened(peer) && !isReading(peer);
  }
  /// Links through shared memory.
  [[nodiscard]] size_t shared() const noexcept {
    return shared_.size();
  }

  [[nodiscard]] Loop::Ticker::Look look(const std::vector<int>& peers);
  [[nodiscard]] bool pollShared();
  [[nodiscard]] bool restShared() noexcept;

 private:
  void onPortReady(int peer, uint32_t events) override;
  void onPortThrown(int peer, const std::exception_ptr& exception) noexcept override {
    owner_.onThrown(peer, exception);
  }
  void open(int peer, std::unique_ptr<Link> link, SharedLink* shared);
  bool read(InPort& port); ///< whether anything came
  void endReading(InPort& port) noexcept;

  const GroupIdentity& identity_;
  const size_t buffer_nbytes_;
  Loop& loop_;
  const RingRoute& route_;
  LinkOwner& owner_;
  std::vector<PeerLink>& peers_; ///< by rank; PeerLinks' own
  std::vector<InPort*> shared_; ///< those that have a shared link
};

} // namespace pycomm
