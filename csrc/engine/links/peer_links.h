#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/links/channel.h"
#include "engine/links/host_rings.h"
#include "engine/links/in_links.h"
#include "engine/links/link_owner.h"
#include "engine/links/out_links.h"
#include "engine/links/port.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/group_identity.h"

namespace pycomm {

/// The bulk links of one group on one rank: one that this rank opens to each peer that it sends to (OutLinks), and one that each sender
/// opens to this rank (InLinks). Frames go in and come out; what they mean, and whether the end of a link is a failure, is the owner's
/// business.
///
/// A link is a socket (TCP, or a Unix socket within a host), or a ring in memory that both ranks share (RingRoute). It is opened by the
/// first frame for that peer.
/// Thread: the data loop's, for everything.
class PeerLinks final {
 public:
  struct Options {
    OutLinks::Connect connect; ///< begins to connect, for a simulator; empty: by a socket
    size_t read_buffer_nbytes = 64 << 10; ///< of each link
  };

  /// All that is given here outlives this.
  PeerLinks(const GroupIdentity& identity, const Options& options, Loop& loop, StagingPool& staging, LinkOwner& owner)
      : peers_(static_cast<size_t>(identity.size)),
        out_(identity, options.connect, loop, staging, owner, peers_),
        in_(identity, options.read_buffer_nbytes, loop, out_.route(), owner, peers_) {}

  // ---- frames
  /// Queues a frame for another rank, and opens the link to it if there is none.
  void send(int peer, OutFrame&& frame) {
    out_.send(peer, std::move(frame));
  }
  /// The same for a question, or an answer, that nothing depends on. If it cannot be sent, that is logged once for each peer; and the end
  /// of a link on which nothing else went is not reported.
  void ask(int peer, OutFrame&& question) {
    out_.ask(peer, std::move(question));
  }
  /// Writes queued frames to one link: false if no link has any that nobody has tried to write.
  [[nodiscard]] bool flush() {
    return out_.flush();
  }

  // ---- links that arrive
  /// A peer has connected to this rank.
  void adopt(int peer, std::unique_ptr<Link> link) {
    in_.adopt(peer, std::move(link));
  }
  /// The same for a link whose bytes go through shared memory, and which `bell` is the bell of.
  void adoptShared(int peer, std::unique_ptr<Link> bell) {
    in_.adoptShared(peer, std::move(bell));
  }
  /// The other ranks of this host may send to this one through these rings from now on. Frames for them wait for useRings().
  void shareRings(HostRings rings) {
    out_.shareRings(std::move(rings));
  }
  /// Whether all of them have it: then this rank sends to them through it, else through sockets.
  void useRings(bool all_have_them) {
    out_.useRings(all_have_them);
  }

  // ---- the end
  /// No more is read from this peer: it said goodbye.
  void endReading(int peer) noexcept {
    in_.endReading(peer);
  }
  /// Drops every frame that is queued, and every place that arriving payloads go to. Links stay open.
  void stopTouchingMemory() noexcept {
    out_.stopTouchingMemory();
    in_.stopTouchingMemory();
  }
  /// Queues a goodbye on each link that is connected, as its last frame, and gives up the others. Whether there was one.
  bool sayGoodbyes() noexcept {
    return out_.sayGoodbyes();
  }
  /// A goodbye still waits for room.
  [[nodiscard]] bool isClosing() const noexcept {
    return out_.isClosing();
  }
  /// Nothing is read or written any more.
  void stop() noexcept {
    out_.stop();
    in_.stop();
  }

  // ---- questions
  /// This rank has opened a link to the peer, and frames can leave on it.
  [[nodiscard]] bool isWriting(int peer) const noexcept {
    return out_.isWriting(peer);
  }
  /// The peer has opened a link to this rank.
  [[nodiscard]] bool isOpened(int peer) const noexcept {
    return in_.isOpened(peer);
  }
  /// The link that the peer opened brings nothing more.
  [[nodiscard]] bool hasEnded(int peer) const noexcept {
    return in_.hasEnded(peer);
  }
  /// Links of both directions that go through shared memory.
  [[nodiscard]] size_t sharedLinks() const noexcept {
    return in_.shared() + out_.shared();
  }

  // ---- time
  void tick(TimePoint now) {
    out_.tick(now);
  }
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return out_.nextTick();
  }

  // ---- what a loop that spins asks: see Loop::Ticker
  /// Tries to read from the links of these peers.
  [[nodiscard]] Loop::Ticker::Look look(const std::vector<int>& peers) {
    return in_.look(peers);
  }
  [[nodiscard]] bool pollShared() {
    const bool read = in_.pollShared();
    return out_.pollShared() || read;
  }
  [[nodiscard]] bool restShared() noexcept {
    return in_.restShared() && out_.restShared();
  }

 private:
  std::vector<PeerLink> peers_; ///< by rank; before out_ and in_, which use it
  OutLinks out_; ///< before in_, which reads its route
  InLinks in_;
};

} // namespace pycomm
