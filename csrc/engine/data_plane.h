#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/host_rings.h"
#include "engine/loop.h"
#include "engine/operation.h"
#include "engine/point_to_point.h"
#include "engine/port.h"
#include "engine/protocol.h"
#include "engine/send_queue.h"
#include "engine/staging_pool.h"
#include "engine/transfer.h"
#include "transport/address.h"
#include "transport/hello.h"

namespace pycomm {

class HostPlane;

/// What both planes of a group know about it.
struct GroupIdentity {
  int rank = 0;
  int size = 1;
  std::string name;
  uint32_t hash = 0;
  uint16_t epoch = 0;
  uint64_t nonce = 0;
  std::vector<std::string> hosts; ///< by rank
  std::vector<SocketAddress> addresses; ///< where each rank listens
  SocketAddress local_address; ///< to connect from
  std::string interface_name;
  /// One more interface of each rank, where several are used.
  struct Path {
    SocketAddress local_address;
    std::string interface_name;
    std::vector<SocketAddress> addresses; ///< by rank
  };
  std::vector<Path> further;
  int streams = 1; ///< connections that a bulk link is made of, taking the interfaces by turns

  /// How this rank introduces itself on a connection.
  [[nodiscard]] Hello hello(LinkPurpose purpose) const {
    Hello hello;
    hello.nonce = nonce;
    hello.rank = rank;
    hello.size = size;
    hello.epoch = epoch;
    hello.group = hash;
    hello.purpose = purpose;
    return hello;
  }
};

/// A group's half on its lane: bulk links, the protocol, and the operations under way.
///
/// It never decides that the group has failed. What it notices goes to `noticed`, the control plane agrees with the other ranks on
/// one cause, and `fail` brings that cause back.
/// Thread: the lane's, for everything.
class DataPlane final : public PortOwner, public InChannel::Receiver, public Loop::Ticker {
 public:
  /// Any thread may be behind these; they must not block.
  struct Events {
    std::function<void(ErrorRecord)> noticed;
    /// A peer said goodbye on its bulk link: the one on its control link may be lost with that.
    std::function<void(int peer)> left;
    /// A link broke a while ago that nothing waits for, and no goodbye has come: trouble if that peer is still there.
    std::function<void(ErrorRecord)> doubted;
  };

  /// What a simulator puts in other's place.
  struct Options {
    std::function<std::unique_ptr<Link>(int peer)> connect; ///< begins to connect; empty: over TCP
    Protocol::Config limits; ///< of flow control; who takes part is filled in from the identity
    size_t read_buffer_nbytes = 64 << 10; ///< of each link
  };
  /// What is kept for operations; all zero when nothing is under way, here or at peers that are ahead.
  struct Usage {
    size_t transfers = 0;
    size_t held_frames = 0;
    size_t queued_sends = 0; ///< messages that wait for room at their receiver
    size_t staging_nbytes = 0;
    size_t shared_links = 0; ///< open ones, of both directions
    Protocol::Usage protocol;
  };

  DataPlane(GroupIdentity identity, Loop& lane, Events events, Options options);
  DataPlane(GroupIdentity identity, Loop& lane, Events events)
      : DataPlane(std::move(identity), lane, std::move(events), Options()) {}
  ~DataPlane() override;

  void post(const std::shared_ptr<Operation>& operation);
  /// Watches over the deadline of an operation whose input is not there yet, until release() posts it; then nothing if it has ended.
  void hold(const std::shared_ptr<Operation>& operation);
  void release(const std::shared_ptr<Operation>& operation);
  /// A peer has connected to us.
  void adopt(int peer, std::unique_ptr<Link> link, int stream = 0);
  /// The same for a link whose bytes go through shared memory, and which `link` is the bell of.
  void adoptShared(int peer, std::unique_ptr<Link> link);
  /// Memory that the ranks of this host share: from now on they may send through it. What is for them waits for useRings().
  void shareRings(HostRings rings);
  /// Whether all of them have it: then this rank sends to them through it, else by TCP.
  void useRings(bool all_have_them);
  /// The group has failed: every operation ends, nothing is sent or received any more. Before that `told` hears what the oldest
  /// operation under way will end with; nothing if there is none.
  void fail(const ErrorRecord& cause, const std::function<void(const ErrorRecord&)>& told = nullptr) noexcept;
  /// A peer said goodbye, here or on its control link: it will send nothing more.
  void peerLeft(int peer);
  /// Says goodbye to all peers and calls `closed` when the links are down, 20 ms after the last goodbye has left. Operations that are under way, and later ones,
  /// end with `reason`; if there were some, the other ranks are told.
  void close(const ErrorRecord& reason, std::function<void()> closed) noexcept;

  /// Of a group that also has a HostPlane, which outlives this. The rest is about operations there.
  void accompany(const HostPlane* host) noexcept {
    host_ = host;
  }
  void hostStuck(std::shared_ptr<Operation> operation);
  void hostUnstuck(uint64_t op_id);

  /// Of an operation that another library runs: it is compared and watched over, and ends when it is said to have, or with the group.
  void follow(const std::shared_ptr<Operation>& operation);
  void followedEnded(uint64_t op_id, std::optional<ErrorRecord> error);

  [[nodiscard]] Usage usage() const;

  // PortOwner, InChannel::Receiver, Loop::Ticker
  void onPortReady(int peer, bool outgoing, uint32_t events) override;
  void onPortThrown(int peer, const std::exception_ptr& exception) noexcept override {
    report(peer, exception);
  }
  void onThrown(const std::exception_ptr& exception) noexcept override {
    report(-1, exception);
  }
  [[nodiscard]] Sink onHeader(int peer, const FrameHeader& header) override;
  void onFrame(int peer, const FrameHeader& header, Sink sink) override;
  [[nodiscard]] TimePoint nextTick() const noexcept override;
  void tick(TimePoint now) override;
  [[nodiscard]] Look look() override;
  [[nodiscard]] bool sharesMemory() const noexcept override {
    return !shared_in_.empty() || !shared_out_.empty();
  }
  [[nodiscard]] bool pollShared() override;
  [[nodiscard]] bool restShared() noexcept override;

 private:
  struct HeldFrame {
    int peer;
    FrameHeader header;
    StagingBuffer staging;
  };
  /// A link broke. Whether its peer died or only left in order, another link tells within 40 ms.
  struct Suspicion {
    ErrorRecord record;
    TimePoint due;
    bool patient = false; ///< waits for a link that the peer may have opened before
    bool doubt = false; ///< only for who knows whether the peer is still there
  };
  /// How long such a link may take.
  static constexpr int kLastLinkMs = 3000;

  void begin(std::shared_ptr<Operation> operation);
  void beginMessage(std::shared_ptr<Operation> operation, bool announced);
  void postPointToPoint(std::shared_ptr<Operation> operation);
  [[nodiscard]] bool goesEagerly(const Operation& message) const noexcept;
  [[nodiscard]] bool hasPlace(int peer, const Operation& message) const;
  void beginQueued(int peer);
  void messageEnded(const Operation& message);
  void asked(int peer, const FrameHeader& header);
  void askForMessages(TimePoint now);
  void askSoon(int from, uint32_t tag);
  /// How many messages a question may bring now.
  [[nodiscard]] size_t mostAnnounced(const SendQueue& queue) const noexcept;
  void ask(int peer, uint32_t tag);
  void askFailed(int peer, const Error& error);
  void missMessagesOf(int left);
  [[nodiscard]] bool hasQueued(int peer) const noexcept;
  [[nodiscard]] const Operation* oldestMessage() const noexcept;
  [[nodiscard]] ErrorRecord noMessage(const Operation& operation, uint64_t ticket) const;
  void beginMatched();
  void hear(int peer, const FrameHeader& header);
  [[nodiscard]] bool isOfPastMessage(int peer, const FrameHeader& header) const;
  void deliverToSelf();
  void missSenders(int left);
  [[nodiscard]] const Operation* withoutSenders() const noexcept;
  OutPort& portTo(int peer);
  void push(int peer, OutFrame frame);
  void writeHello(OutPort& port);
  [[nodiscard]] std::unique_ptr<Link> startStreams(int peer) const;
  [[nodiscard]] const std::string& interfaceOf(int stream) const noexcept;
  [[nodiscard]] std::unique_ptr<Link> startLink(int peer);
  [[nodiscard]] std::unique_ptr<SharedLink> startShared(int peer);
  [[nodiscard]] std::unique_ptr<SharedLink> acceptShared(int peer, std::unique_ptr<Link> bell) const;
  [[nodiscard]] uint32_t writeEvents(const OutPort& port, bool waits) const noexcept;
  void readFrom(int peer, std::unique_ptr<Link> link, SharedLink* shared);
  void watch(OutPort& port, uint32_t events);
  void watch(InPort& port);
  void unwatch(int& watched) noexcept;
  bool readPort(InPort& port); ///< whether anything came
  void writeReady(OutPort& port);
  void flush(OutPort& port);
  void flushDirty();
  void act();
  void settle(uint64_t op_id);
  void replayHeld(Transfer& transfer);
  [[nodiscard]] ErrorRecord errorIn(const Operation& operation, const Transfer* transfer, const ErrorRecord& cause)
      const;
  /// `why` gets a null transfer for a receive without a sender.
  using Why = std::function<ErrorRecord(const Operation&, const Transfer*)>;
  void endAll(const Why& why) noexcept;
  void end(Operation& operation, const Transfer* transfer, const Why& why) const noexcept;
  void endInProtocol(uint64_t op_id) noexcept;
  void stopTouchingMemory() noexcept;
  void stopPorts() noexcept;
  void sayGoodbye(OutPort& port);
  void endIfSaid(OutPort& port);
  void linkBroke(int peer, const Error& error, bool may_be_orderly);
  void portBroke(OutPort& port, const Error& error);
  /// Ranks ask each other what they wait in so that an error can name who has not entered it. Nothing else depends on that; but it
  /// does on a message that is announced.
  [[nodiscard]] bool isQuestion(const FrameHeader& header) const noexcept;
  void missLeft(int peer, const Transfer& transfer);
  void endReading(InPort& port) noexcept;
  void suspect(int peer, Suspicion suspicion);
  void checkDeadlines(TimePoint now);
  void checkHostDeadlines(TimePoint now);
  void checkFollowedDeadlines(TimePoint now);
  void endFollowed(const Why& why) noexcept;
  void checkHeldDeadlines(TimePoint now);
  void checkRefusedDeadlines(TimePoint now);
  void recallHost(uint64_t op_id);
  void notice(ErrorRecord record);
  /// Every entry from the loop goes through here: whatever is thrown becomes the group's failure (`peer` to blame, -1 for nobody),
  /// and frames that were queued leave.
  template <typename Body>
  void guarded(int peer, const Body& body) noexcept {
    try {
      body();
      flushDirty();
    } catch (...) {
      report(peer, std::current_exception());
    }
  }
  void report(int peer, const std::exception_ptr& exception) noexcept;
  template <typename Body>
  void takeUp(const std::shared_ptr<Operation>& operation, const Body& body) noexcept {
    guarded(-1, [&] { orRefuse(operation, body); });
  }
  /// For a body that takes an operation up. If nothing has the operation after an exception, refuse() has.
  template <typename Body>
  void orRefuse(const std::shared_ptr<Operation>& operation, const Body& body) {
    try {
      body();
    } catch (...) {
      if (!has(*operation)) {
        refuse(operation, std::current_exception());
      }
      throw;
    }
  }
  /// The operation ends with the group's failure, which the exception becomes. If it ended before, its waiter might begin what the
  /// other ranks do not expect, and they would blame that.
  void refuse(const std::shared_ptr<Operation>& operation, const std::exception_ptr& exception) noexcept;
  [[nodiscard]] bool has(const Operation& operation) const noexcept;
  /// Ends it with the exception as this rank's own trouble.
  void endUnfit(Operation& operation, const std::exception_ptr& exception) const noexcept;

  const GroupIdentity identity_;
  const Options options_;
  Loop& lane_;
  const Events events_;
  Protocol protocol_;
  StagingPool staging_; ///< before everything that holds its buffers
  PointToPoint point_to_point_;
  std::map<uint64_t, std::unique_ptr<Transfer>> transfers_; ///< oldest first: its deadline names who has not entered
  std::map<uint64_t, std::shared_ptr<Operation>> unmatched_; ///< receives without a message yet, by ticket
  std::map<int, SendQueue> sends_; ///< by receiver
  /// A receive that has no message asks for it, since that may wait for room which others of its sender take. There is one entry for
  /// all receives from one rank, or from any, under one tag: the oldest of them asks.
  struct Ask {
    int from;
    uint32_t tag;
    uint64_t ticket; ///< of the oldest
    std::chrono::milliseconds pause;
  };
  using Asks = std::multimap<TimePoint, Ask>;
  Asks asks_; ///< by when each is due
  std::map<std::pair<int, uint32_t>, Asks::iterator> asks_of_; ///< all of them, by rank and tag
  TimePoint asks_from_{}; ///< none asks before
  std::set<int> cannot_ask_; ///< ranks of which that has been logged
  std::map<int, std::string> not_entered_; ///< by rank that was asked and had nothing: what it did last
  std::set<std::shared_ptr<Operation>> without_input_; ///< see hold()
  std::vector<std::shared_ptr<Operation>> refused_; ///< see refuse()
  uint64_t next_ticket_ = 1;
  const HostPlane* host_ = nullptr;
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> host_stuck_; ///< in shared memory, and waiting for long
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> followed_; ///< see follow()
  int64_t host_recalled_ = 0; ///< up to this one the protocol knows them
  std::deque<OutFrame> to_self_; ///< frames between a send to this rank and its receive
  std::unordered_map<uint64_t, std::vector<HeldFrame>> held_;
  std::vector<std::unique_ptr<OutPort>> out_; ///< by rank; null until first needed
  std::vector<std::unique_ptr<InPort>> in_;
  std::map<int, std::vector<std::unique_ptr<Link>>> arriving_; ///< by rank: some of the connections of a link
  std::optional<HostRings> rings_;
  std::set<int>
      ring_links_; ///< ranks to which a link through a ring was begun: a second writer would begin to count anew
  enum class WithinHost { Tcp, Undecided, Rings };
  WithinHost within_host_ =
      WithinHost::Tcp; ///< which way to the ranks that `rings_` holds; see shareRings() and useRings()
  std::vector<std::pair<int, OutFrame>> early_; ///< what waits while that is undecided, and for which ranks
  std::vector<OutPort*> shared_out_; ///< members of out_, and the next of in_, that have a shared link
  std::vector<InPort*> shared_in_;
  std::vector<OutPort*> dirty_; ///< members of out_
  std::vector<int> looked_; ///< scratch of look()
  std::vector<bool> left_; ///< by rank: said goodbye, or is in lost_
  std::unordered_map<int, ErrorRecord> lost_; ///< by rank: the link to it broke, and it said no goodbye
  std::unordered_map<int, Suspicion> suspicions_;
  std::optional<ErrorRecord> failure_;
  TimePoint failed_at_{};
  TimePoint next_deadline_ = TimePoint::max();
  std::optional<ErrorRecord> closing_; ///< why, once close() was called
  TimePoint close_at_ = TimePoint::max();
  std::function<void()> closed_;
};

} // namespace pycomm
