#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "engine/links/channel.h"
#include "engine/links/host_rings.h"
#include "engine/operation/group_identity.h"
#include "transport/memory/shared_link.h"

namespace pycomm {

/// The way to the other ranks of this host: through sockets, or through rings in memory that these ranks share.
///
/// Links are sockets until share() brings the memory. Then the way is undecided until decide(): a link that was opened meanwhile would be
/// a socket for good, so frames are kept. If the memory turns out to be too small later, links that have not been opened are sockets again.
/// Thread: the data loop's, for everything.
class RingRoute {
 public:
  /// A frame that waits for decide().
  struct Kept {
    int peer;
    OutFrame frame;
    bool needed; ///< an operation cannot go on without it
  };

  /// The identity outlives this.
  explicit RingRoute(const GroupIdentity& identity) : identity_(identity) {}

  void share(HostRings rings);
  /// `all_have_them`: all ranks of this host have the memory, so this rank sends through it, else through sockets. Returns the frames
  /// that were kept, in order.
  [[nodiscard]] std::vector<Kept> decide(bool all_have_them);

  /// Frames for this peer must be kept.
  [[nodiscard]] bool isUndecided(int peer) const {
    return way_ == Way::Undecided && rings_->holds(peer);
  }
  void keep(int peer, OutFrame&& frame, bool needed) {
    kept_.push_back(Kept{peer, std::move(frame), needed});
  }
  void dropKept() noexcept {
    kept_.clear();
  }

  /// The ring for a new link to this peer. Nothing if the link is a socket, also because there is no memory for a ring, or because an earlier
  /// link used it: a second writer would begin to count anew.
  /// `used`: whether one has; it is set.
  [[nodiscard]] std::optional<SharedLink::Rings> take(int peer, bool& used);
  /// The ring through which this peer sends. Throws Error(ProtocolViolation) if there is none.
  [[nodiscard]] SharedLink::Rings incoming(int peer) const;

 private:
  enum class Way { Sockets, Undecided, Rings };

  const GroupIdentity& identity_;
  Way way_ = Way::Sockets;
  std::optional<HostRings> rings_;
  std::vector<Kept> kept_;
};

} // namespace pycomm
