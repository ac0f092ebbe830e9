#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/data/messages.h"
#include "engine/data/protocol.h"
#include "engine/data/transfer.h"
#include "engine/data/watched_operations.h"
#include "engine/links/host_rings.h"
#include "engine/links/peer_links.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/monitor/departures.h"
#include "engine/monitor/question.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// A group's half on its lane: bulk links, the protocol, and the operations under way.
///
/// Its parts: PeerLinks moves frames, Protocol (RollCall and Credits) says what they mean, Transfer runs one operation, Messages has the
/// point-to-point operations that have not begun, WatchedOperations those that run elsewhere, Departures decides what it means when a
/// rank goes away.
///
/// It never decides that the group has failed. What it notices goes to `noticed`, the control plane agrees with the other ranks on
/// one cause, and `fail` brings that cause back.
/// Thread: the lane's, for everything.
class DataPlane final : public Loop::Ticker,
                        private PeerLinks::Owner,
                        private Departures::Dealings,
                        private Messages::Owner {
 public:
  /// Any thread may be behind these; they must not block.
  struct Events {
    std::function<void(ErrorRecord)> noticed;
    /// A peer said goodbye on its bulk link: the one on its control link may be lost with that.
    std::function<void(int peer)> left;
    /// A link broke a while ago that nothing waits for, and no goodbye has come: trouble if that peer is still there.
    std::function<void(ErrorRecord)> doubted;
    /// For other ranks, over control links.
    std::function<void(std::vector<Question>)> ask;
  };

  /// What a simulator puts in other's place.
  struct Options : PeerLinks::Options {
    Protocol::Config limits; ///< of flow control; who takes part is filled in from the identity
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
  /// A question or an answer has arrived on a control link.
  void heardQuestion(int peer, const FrameHeader& question);
  /// Says goodbye to all peers and calls `closed` when the links are down, 20 ms after the last goodbye has left. Operations that are under way, and later ones,
  /// end with `reason`; if there were some, the other ranks are told.
  void close(const ErrorRecord& reason, std::function<void()> closed) noexcept;

  /// See WatchedOperations, as for the next two.
  void accompany(const HostPlane* host) noexcept {
    watched_.accompany(host);
  }
  void hostStuck(std::shared_ptr<Operation> operation);
  void hostUnstuck(uint64_t op_id);

  /// Of an operation that another library runs: it is compared and watched over, and ends when it is said to have, or with the group.
  void follow(const std::shared_ptr<Operation>& operation);
  void followedEnded(uint64_t op_id, std::optional<ErrorRecord> error);

  [[nodiscard]] Usage usage() const;

  // Loop::Ticker
  void onThrown(const std::exception_ptr& exception) noexcept override {
    report(-1, exception);
  }
  [[nodiscard]] TimePoint nextTick() const noexcept override;
  void tick(TimePoint now) override;
  [[nodiscard]] Look look() override;
  [[nodiscard]] bool sharesMemory() const noexcept override {
    return links_.sharedLinks() != 0;
  }
  [[nodiscard]] bool pollShared() override {
    return links_.pollShared();
  }
  [[nodiscard]] bool restShared() noexcept override {
    return links_.restShared();
  }

 private:
  // PeerLinks::Owner
  [[nodiscard]] Sink onHeader(int peer, const FrameHeader& header) override;
  void onFrame(int peer, const FrameHeader& header, Sink sink) override;
  void onSent(const std::vector<OutFrame>& frames) override;
  void onReadingEnded(int peer, const Error& error) override;
  void onWritingBroke(int peer, const Error& error) override;
  void onGoodbyesSaid() override;
  void onThrown(int peer, const std::exception_ptr& exception) noexcept override {
    report(peer, exception);
  }
  void run(int peer, void (*body)(const void* context), const void* context) noexcept override {
    guarded(peer, [&] { body(context); });
  }
  // Departures::Dealings
  [[nodiscard]] Departures::Reading reading(int peer) const noexcept override;
  [[nodiscard]] const Operation* owing(int peer) const noexcept override;
  [[nodiscard]] const Operation* awaiting(int peer) const noexcept override;
  [[nodiscard]] const Operation* awaitingAnyone() const noexcept override;

  // Messages::Owner
  void begin(const std::shared_ptr<Operation>& message) override {
    orRefuse(message, [&] { start(message); });
  }
  /// The operation ends with the group's failure, which the exception becomes. If it ended before, its waiter might begin what the
  /// other ranks do not expect, and they would blame that.
  void cannotBegin(const std::shared_ptr<Operation>& operation) noexcept override;
  void send(int peer, const FrameHeader& header) override;
  [[nodiscard]] bool hasSent(int peer) const noexcept override {
    return links_.isOpened(peer);
  }
  [[nodiscard]] bool isAway(int peer) const noexcept override {
    return departures_.isAway(peer);
  }
  void notice(ErrorRecord record) override;

  struct HeldFrame {
    int peer;
    FrameHeader header;
    StagingBuffer staging;
  };
  /// How the plane ends: it fails, or is closed, or both in that order.
  struct End {
    std::optional<ErrorRecord> failure;
    TimePoint failed_at{};
    std::optional<ErrorRecord> closing; ///< why, once close() was called
    TimePoint close_at = TimePoint::max();
    std::function<void()> closed;
    [[nodiscard]] bool running() const noexcept {
      return !failure && !closing;
    }
  };

  void start(const std::shared_ptr<Operation>& operation);
  void endAtOnce(Operation& operation) noexcept;
  void deliverToSelf();
  void push(int peer, OutFrame frame);
  void flush();
  void act();
  void settle(uint64_t op_id);
  void replayHeld(Transfer& transfer);
  [[nodiscard]] ErrorRecord errorIn(const Operation& operation, const Transfer* transfer, const ErrorRecord& cause)
      const;
  /// `why` gets a null transfer for a receive without a sender.
  using Why = std::function<ErrorRecord(const Operation&, const Transfer*)>;
  /// The one way in which operations end together: first nothing touches their memory any more, then they end.
  void endAll(const Why& why) noexcept;
  void end(Operation& operation, const Transfer* transfer, const Why& why) const noexcept;
  void endInProtocol(uint64_t op_id) noexcept;
  void stopTouchingMemory() noexcept;
  [[nodiscard]] ErrorRecord brokenLink(int peer, const Error& error) const;
  /// Ranks ask each other what they wait in so that an error can name who has not entered it. Nothing else depends on that; but it
  /// does on a message that is announced.
  [[nodiscard]] bool isQuestion(const FrameHeader& header) const noexcept;
  /// Over the bulk link if there is one, else over control links: see RollCall::Way.
  void ask(int peer, const FrameHeader& question);
  void sendQuestions();
  void actOnDepartures();
  void overdue(uint64_t op_id);
  /// Every entry from the loop goes through here: whatever is thrown becomes the group's failure (`peer` to blame, -1 for nobody),
  /// and frames that were queued leave.
  template <typename Body>
  void guarded(int peer, const Body& body) noexcept {
    try {
      body();
      flush();
      sendQuestions();
    } catch (...) {
      report(peer, std::current_exception());
    }
  }
  void report(int peer, const std::exception_ptr& exception) noexcept;
  template <typename Body>
  void takeUp(const std::shared_ptr<Operation>& operation, const Body& body) noexcept {
    guarded(-1, [&] { orRefuse(operation, body); });
  }
  /// For a body that takes an operation up. If nothing has the operation after an exception, refused_ has.
  template <typename Body>
  void orRefuse(const std::shared_ptr<Operation>& operation, const Body& body) {
    try {
      body();
    } catch (...) {
      cannotBegin(operation);
      throw;
    }
  }
  [[nodiscard]] bool has(const Operation& operation) const noexcept;
  /// Ends it with the exception as this rank's own trouble.
  void endUnfit(Operation& operation, const std::exception_ptr& exception) const noexcept;

  const GroupIdentity identity_;
  const Options options_;
  Loop& lane_;
  const Events events_;
  Protocol protocol_;
  StagingPool staging_; ///< before everything that holds its buffers
  std::map<uint64_t, std::unique_ptr<Transfer>> transfers_; ///< oldest first: its deadline names who has not entered
  std::vector<Question> questions_; ///< that have not left yet
  std::deque<OutFrame> to_self_; ///< frames between a send to this rank and its receive
  std::unordered_map<uint64_t, std::vector<HeldFrame>> held_;
  PeerLinks links_;
  std::vector<int> looked_; ///< scratch of look()
  Departures departures_;
  Messages messages_;
  std::vector<std::shared_ptr<Operation>> refused_; ///< see cannotBegin()
  WatchedOperations watched_;
  End end_;
};

} // namespace pycomm
