#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/links/channel.h"
#include "engine/links/connector.h"
#include "engine/links/host_rings.h"
#include "engine/links/port.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/group_identity.h"

namespace pycomm {

/// The bulk links of one group on one rank: one that this rank opens to each peer that it sends to, and one that each sender opens to this
/// rank. Frames go in and come out; what they mean, and whether the end of a link is a failure, is the owner's business.
///
/// A link is a TCP connection, several that use the interfaces in turn, or a ring in memory that both ranks share. It is opened by the
/// first frame for that peer.
/// Thread: the lane's, for everything.
class PeerLinks final : private PortOwner {
 public:
  /// onHeader() and onFrame() get what arrives. All on the lane.
  class Owner : public InChannel::Receiver {
   public:
    /// A link has taken these frames whole.
    virtual void onSent(const std::vector<OutFrame>& frames) = 0;
    /// The link that the peer opened has ended, without endReading() before.
    virtual void onReadingEnded(int peer, const Error& error) = 0;
    /// The link that this rank opened to the peer broke, or cannot be opened.
    virtual void onWritingBroke(int peer, const Error& error) = 0;
    /// After sayGoodbyes(): the last of them has left, or cannot.
    virtual void onGoodbyesSaid() = 0;
    /// The group fails, with `peer` to blame.
    virtual void onThrown(int peer, const std::exception_ptr& exception) noexcept = 0;
    /// Calls `body` with `context`, on behalf of `peer`: what it throws is onThrown(). Frames that it queues leave afterwards, by flush().
    virtual void run(int peer, void (*body)(const void* context), const void* context) noexcept = 0;
  };

  struct Options {
    std::function<std::unique_ptr<Link>(int peer)> connect; ///< begins to connect, for a simulator; empty: over TCP
    size_t read_buffer_nbytes = 64 << 10; ///< of each link
  };

  /// The owner, the loop and the pool outlive this.
  PeerLinks(const GroupIdentity& identity, const Options& options, Loop& loop, StagingPool& staging, Owner& owner);
  ~PeerLinks() override;
  PeerLinks(const PeerLinks&) = delete;
  PeerLinks& operator=(const PeerLinks&) = delete;

  // ---- frames
  /// Queues a frame for another rank, and opens the link to it if there is none.
  void send(int peer, OutFrame frame);
  /// The same for a question, or an answer, that nothing depends on. If it cannot be sent, that is logged once for each peer; and the end
  /// of a link on which nothing else went is not reported.
  void ask(int peer, OutFrame question);
  /// Writes queued frames to one link: false if no link has any that nobody has tried to write.
  [[nodiscard]] bool flush();

  // ---- links that arrive
  /// A peer has connected to this rank.
  void adopt(int peer, std::unique_ptr<Link> link, int stream);
  /// The same for a link whose bytes go through shared memory, and which `bell` is the bell of.
  void adoptShared(int peer, std::unique_ptr<Link> bell);
  /// Memory that the ranks of this host share: from now on they may send through it. Frames for them wait for useRings().
  void shareRings(HostRings rings);
  /// Whether all of them have it: then this rank sends to them through it, else by TCP.
  void useRings(bool all_have_them);

  // ---- the end
  /// No more is read from this peer: it said goodbye.
  void endReading(int peer) noexcept;
  /// Drops every frame that is queued, and every place that arriving payloads go to. Links stay open.
  void stopTouchingMemory() noexcept;
  /// Queues a goodbye on each link that is connected, as its last frame, and gives up the others. Whether there was one.
  bool sayGoodbyes() noexcept;
  /// A goodbye still waits for room.
  [[nodiscard]] bool isClosing() const noexcept;
  /// Nothing is read or written any more.
  void stop() noexcept;

  // ---- questions
  /// The peer has opened a link to this rank, at some time.
  [[nodiscard]] bool isOpened(int peer) const noexcept {
    return in_[static_cast<size_t>(peer)] != nullptr;
  }
  /// This rank has opened a link to the peer, and frames can leave on it.
  [[nodiscard]] bool isWriting(int peer) const noexcept {
    const std::unique_ptr<OutPort>& port = out_[static_cast<size_t>(peer)];
    return port != nullptr && (port->state() == OutPort::State::Open || port->state() == OutPort::State::Full);
  }
  /// The link that the peer opened may still bring something.
  [[nodiscard]] bool isReading(int peer) const noexcept {
    return isOpened(peer) && !in_[static_cast<size_t>(peer)]->ended;
  }
  /// The interface that holds up a link of several connections, see Link::readsFrom() and writesTo().
  [[nodiscard]] std::string readsFrom(int peer) const;
  [[nodiscard]] std::string writesTo(int peer) const;
  /// Links of both directions that go through shared memory.
  [[nodiscard]] size_t sharedLinks() const noexcept {
    return shared_in_.size() + shared_out_.size();
  }

  // ---- what a loop that spins asks: see Loop::Ticker
  /// Tries to read from the links of these peers.
  [[nodiscard]] Loop::Ticker::Look look(const std::vector<int>& peers);
  [[nodiscard]] bool pollShared();
  [[nodiscard]] bool restShared() noexcept;

 private:
  enum class WithinHost { Tcp, Undecided, Rings };

  void onPortReady(int peer, bool outgoing, uint32_t events) override;
  void onPortThrown(int peer, const std::exception_ptr& exception) noexcept override {
    owner_.onThrown(peer, exception);
  }
  template <typename Body>
  void onBehalfOf(int peer, const Body& body) noexcept {
    owner_.run(peer, [](const void* context) { (*static_cast<const Body*>(context))(); }, &body);
  }
  void queue(int peer, OutFrame frame, bool needed);
  void askFailed(int peer, const Error& error);
  OutPort& portTo(int peer);
  void forget(int peer) noexcept;
  [[nodiscard]] std::unique_ptr<Link> startLink(int peer);
  [[nodiscard]] std::unique_ptr<SharedLink> startShared(int peer);
  void writeHello(OutPort& port);
  void readFrom(int peer, std::unique_ptr<Link> link, SharedLink* shared);
  bool read(InPort& port); ///< whether anything came
  void writeReady(OutPort& port);
  void flush(OutPort& port);
  void broke(OutPort& port, const Error& error);
  void sayGoodbye(OutPort& port);
  void endReading(InPort& port) noexcept;
  [[nodiscard]] uint32_t writeEvents(const OutPort& port) const noexcept;
  void watch(OutPort& port);
  void watch(InPort& port);
  void unwatch(int& watched) noexcept;

  const GroupIdentity& identity_; ///< the owner's, as are the next four
  const Options& options_;
  Loop& loop_;
  StagingPool& staging_;
  Owner& owner_;
  const Connector connector_;
  std::vector<std::unique_ptr<OutPort>> out_; ///< by rank; null until first needed
  std::vector<std::unique_ptr<InPort>> in_;
  std::map<int, std::vector<std::unique_ptr<Link>>> arriving_; ///< by rank: some of the connections of a link
  std::vector<OutPort*> to_flush_; ///< members of out_, as the next
  std::vector<OutPort*> shared_out_; ///< those that have a shared link, as the next of in_
  std::vector<InPort*> shared_in_;
  std::set<int> cannot_ask_; ///< peers of which that has been logged
  std::optional<HostRings> rings_;
  std::set<int>
      ring_links_; ///< peers to which a link through a ring was begun: a second writer would begin to count anew
  WithinHost within_host_ = WithinHost::Tcp; ///< the way to the ranks that rings_ holds
  struct Undecided {
    int peer;
    OutFrame frame;
    bool needed;
  };
  std::vector<Undecided> undecided_; ///< frames that wait while within_host_ is that
};

} // namespace pycomm
