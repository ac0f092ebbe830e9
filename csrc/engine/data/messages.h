#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/point_to_point.h"
#include "engine/data/send_queue.h"
#include "engine/data/tables.h"
#include "engine/loop/loop.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// The point-to-point messages of one group on one rank that have not begun: sends that wait for room at their receiver, and receives
/// that have no message yet. A message that begins is an operation like any other, and belongs to the owner.
///
/// A receive that waits asks its sender for a message under its tag, since that message may wait for room which others of its sender
/// take: after 2 ms, and then each time after eight times as long, up to a second. The sender begins a message under that tag although
/// there is no room for it: it announces the message, and the receiver grants credit.
/// Thread: the lane's.
class Messages {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    /// Runs a message from now on. If it throws, the owner has the message nevertheless, and ends it.
    virtual void begin(const std::shared_ptr<Operation>& message) = 0;
    /// A message that is out of its queue cannot begin, because of the exception that is being handled: the owner ends it.
    virtual void cannotBegin(const std::shared_ptr<Operation>& message) noexcept = 0;
    /// Sends a question over the bulk link. It may be lost: the receive asks again.
    virtual void ask(int peer, const FrameHeader& question) = 0;
    /// Whether a receive from any rank asks this one: a rank that has never opened a link to this one is not asked.
    [[nodiscard]] virtual bool hasOpenedLink(int peer) const noexcept = 0;
    [[nodiscard]] virtual bool isAway(int peer) const noexcept = 0;
    virtual void notice(ErrorRecord record) = 0;
  };

  /// The tables, the loop and the owner outlive this.
  Messages(Tables& tables, Loop& lane, Owner& owner)
      : tables_(tables),
        identity_(tables.identity),
        lane_(lane),
        owner_(owner),
        names_(tables.identity.rank, tables.identity.size, tables.identity.hash) {}

  // ---- events
  /// Begins the message, or keeps it.
  void post(const std::shared_ptr<Operation>& message);
  /// The peer asks for messages under a tag (Waiting of PointToPoint::kAskId), or answers such a question (NotEntered).
  void asked(int peer, const FrameHeader& header);
  /// The header of a frame of a message. If a receive waits for it, that has begun by the time this returns. `running`: the owner has
  /// that operation. False if nothing is to be done about the frame: its message has ended here, or the peer broke the protocol.
  [[nodiscard]] bool arrived(int peer, const FrameHeader& header, bool running);
  /// There may be room at that peer.
  void beginQueued(int peer);
  /// A message that had begun has ended.
  void ended(const Operation& message);
  void tick(TimePoint now);
  /// Every message that has not begun ends by `end`.
  void endAll(const std::function<void(Operation&)>& end) noexcept;

  // ---- questions
  [[nodiscard]] TimePoint nextTick() const noexcept;
  /// Of those that have not begun; null if there is none, as for the next two.
  [[nodiscard]] const Operation* oldest() const noexcept;
  [[nodiscard]] const Operation* firstTo(int peer) const noexcept;
  /// `peer` may be PointToPoint::kAnyRank: a receive from any rank.
  [[nodiscard]] const Operation* firstFrom(int peer) const noexcept;
  /// A receive from that rank has no message yet.
  [[nodiscard]] bool waitsFor(int peer) const noexcept {
    return names_.waitingFor(peer) != 0;
  }
  [[nodiscard]] bool receives() const noexcept {
    return !unmatched_.empty();
  }
  [[nodiscard]] bool has(const Operation& operation) const noexcept;
  struct Usage {
    size_t queued_sends = 0; ///< messages that wait for room at their receiver
    size_t receives = 0; ///< without a message yet
    size_t asks = 0; ///< for messages
    size_t tags = 0; ///< under which something waits
  };
  [[nodiscard]] Usage usage() const noexcept;

 private:
  /// There is one entry for all receives from one rank, or from any, under one tag: the oldest of them asks.
  struct Ask {
    int from;
    uint32_t tag;
    uint64_t ticket; ///< of the oldest
    std::chrono::milliseconds pause;
  };
  using Asks = std::multimap<TimePoint, Ask>;

  void postSend(const std::shared_ptr<Operation>& message);
  void postReceive(const std::shared_ptr<Operation>& message);
  void begin(const std::shared_ptr<Operation>& message, bool announced);
  void beginMatched();
  [[nodiscard]] bool goesEagerly(const Operation& message) const noexcept;
  [[nodiscard]] bool hasPlace(int peer, const Operation& message) const;
  /// How many messages a question may bring now.
  [[nodiscard]] size_t mostAnnounced(const SendQueue& queue) const noexcept;
  void askSoon(int from, uint32_t tag);
  void ask(int peer, uint32_t tag);
  void askWhatIsDue(TimePoint now);
  void checkDeadlines(TimePoint now);
  [[nodiscard]] ErrorRecord noMessage(const Operation& operation, uint64_t ticket) const;

  Tables& tables_;
  const GroupIdentity& identity_; ///< the tables'
  Loop& lane_;
  Owner& owner_;
  PointToPoint names_;
  std::map<uint64_t, std::shared_ptr<Operation>> unmatched_; ///< receives without a message yet, by ticket
  uint64_t next_ticket_ = 1;
  std::map<int, SendQueue> sends_; ///< by receiver
  Asks asks_; ///< by when each is due
  std::map<std::pair<int, uint32_t>, Asks::iterator> asks_of_; ///< all of them, by rank and tag
  TimePoint asks_from_{}; ///< none asks before
  std::map<int, std::string> not_entered_; ///< by rank that was asked and had nothing: what it did last
  TimePoint next_deadline_ = TimePoint::max(); ///< no message's is earlier
};

} // namespace pycomm
