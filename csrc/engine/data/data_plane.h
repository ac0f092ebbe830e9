#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/data/exchange.h"
#include "engine/data/plane_end.h"
#include "engine/data/reporter.h"
#include "engine/data/tables.h"
#include "engine/links/host_rings.h"
#include "engine/links/peer_links.h"
#include "engine/loop/loop.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// A group's half on its lane: bulk links, the protocol, and the operations under way.
///
/// Its parts: Exchange runs operations and moves frames, and has one part for each of their states; PlaneEnd says whether the plane runs,
/// has failed or closes; Reporter passes on what the plane notices. This class takes a call only if PlaneEnd allows it, and ends the plane.
///
/// It never decides that the group has failed. It reports what it notices to `noticed`, the control plane agrees with the other ranks on
/// one cause, and `fail` brings that cause back.
/// Thread: the lane's, for everything.
class DataPlane final : public Loop::Ticker {
 public:
  using Events = Reporter::Events;
  using Usage = Exchange::Usage;

  /// Parts that the simulator replaces.
  struct Options : PeerLinks::Options {
    Limits limits;
  };

  DataPlane(GroupIdentity identity, Loop& lane, Events events, Options options);
  DataPlane(GroupIdentity identity, Loop& lane, Events events)
      : DataPlane(std::move(identity), lane, std::move(events), Options()) {}
  ~DataPlane() override;

  // ---- operations
  void post(const std::shared_ptr<Operation>& operation);
  /// Watches over the deadline of an operation whose input is not there yet, until release() posts it; then nothing if it has ended.
  void hold(const std::shared_ptr<Operation>& operation);
  void release(const std::shared_ptr<Operation>& operation);
  /// See WatchedOperations, as for the next two.
  void accompany(HostPlane* host) noexcept {
    exchange_.watched().accompany(host);
  }
  void hostStuck(const std::shared_ptr<Operation>& operation, uint64_t lacking);
  void hostEnded(const OperationId& id, const Descriptor& descriptor);
  /// Of an operation that another library runs: it is compared and watched over, and ends when it is said to have, or with the group.
  void follow(const std::shared_ptr<Operation>& operation);
  void followedEnded(uint64_t op_id, std::optional<ErrorRecord> error);

  // ---- links
  /// A peer has connected to us.
  void adopt(int peer, std::unique_ptr<Link> link);
  /// The same for a link whose bytes go through shared memory, and which `link` is the bell of.
  void adoptShared(int peer, std::unique_ptr<Link> link);
  /// The other ranks of this host may send to this one through these rings from now on. Frames for them wait for useRings().
  void shareRings(HostRings rings);
  /// If all of them have the memory, this rank sends to them through it, else through sockets.
  void useRings(bool all_have_them);
  /// A peer said goodbye, here or on its control link: it will send nothing more.
  void peerLeft(int peer);
  /// A question or an answer has arrived on a control link.
  void heardQuestion(int peer, const FrameHeader& question);

  // ---- the end
  /// The group has failed: every operation ends, nothing is sent or received any more. Before that it calls `told` with the error that
  /// the oldest operation under way will end with, if there is one.
  void fail(const ErrorRecord& cause, const std::function<void(const ErrorRecord&)>& told = nullptr) noexcept;
  /// Says goodbye to all peers and calls `closed` when the links are down, 20 ms after the last goodbye has left. Operations that are under
  /// way, and later ones, end with `reason`; if there were some, the other ranks are notified.
  void close(const ErrorRecord& reason, std::function<void()> closed) noexcept;

  [[nodiscard]] Usage usage() const {
    return exchange_.usage();
  }

  // Loop::Ticker
  void onThrown(const std::exception_ptr& exception) noexcept override {
    exchange_.ends().thrown(-1, exception);
  }
  [[nodiscard]] TimePoint nextTick() const noexcept override;
  void tick(TimePoint now) override;
  [[nodiscard]] Look look() override;
  [[nodiscard]] bool sharesMemory() const noexcept override {
    return exchange_.links().sharedLinks() != 0;
  }
  [[nodiscard]] bool pollShared() override {
    return exchange_.links().pollShared();
  }
  [[nodiscard]] bool restShared() noexcept override {
    return exchange_.links().restShared();
  }

 private:
  const GroupIdentity identity_;
  const Options options_;
  Loop& lane_;
  PlaneEnd end_;
  const Reporter reporter_;
  Exchange exchange_;
  std::vector<int> looked_; ///< scratch of look()
};

} // namespace pycomm
