#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/point_to_point.h"
#include "engine/data/send_queue.h"
#include "engine/data/tables.h"
#include "engine/loop/loop.h"
#include "engine/operation/operation.h"

namespace pycomm {

class DataPlane;

/// The point-to-point messages of one group on one rank that have not begun: sends that wait for room at their receiver, and receives
/// that have no message yet. A message that begins is an operation like any other: the plane runs it. A message whose tensor is still on a
/// device is held, and keeps its place: MPI's rule, that messages do not overtake each other, is about the order of the calls.
///
/// A receive that waits asks its sender for a message under its tag, since that message may wait for room which others of its sender
/// take: after 2 ms, and then each time after eight times as long, up to a second. The sender begins a message under that tag although
/// there is no room for it: it announces the message, and the receiver grants credit.
/// Thread: the data loop's.
class Messages {
 public:
  /// All of these outlive this; the plane holds it.
  Messages(Tables& tables, Loop& data_loop, DataPlane& plane)
      : tables_(tables), identity_(tables.identity), data_loop_(data_loop), plane_(plane), names_(tables) {}

  // ---- events
  /// Begins the message, or keeps it.
  void post(const std::shared_ptr<Operation>& message);
  /// Gives the message its place among those of its peer and tag. It begins after release(); later ones to that peer under that tag begin
  /// after it, and later receives get later messages.
  void hold(const std::shared_ptr<Operation>& message);
  /// The message may begin. Nothing happens if it has ended.
  void release(const std::shared_ptr<Operation>& message);
  /// The peer asks for messages under a tag (Waiting of PointToPoint::kAskId), or answers such a question (NotEntered).
  void asked(int peer, const FrameHeader& header);
  /// The header of a frame of a message. If a receive waits for it, that has begun by the time this returns. `running`: that operation is
  /// under way. False if nothing is to be done about the frame: its message has ended here, or the peer broke the protocol.
  [[nodiscard]] bool arrived(int peer, const FrameHeader& header, bool running);
  /// There may be room at that peer.
  void beginQueued(int peer);
  /// A message that had begun has ended. Of a receive this need not be said.
  void ended(const Operation& message);
  void tick(TimePoint now);
  /// Every message that has not begun ends by `end`.
  void endAll(const std::function<void(Operation&)>& end) noexcept;

  // ---- questions
  [[nodiscard]] TimePoint nextTick() const noexcept;
  /// Of those that have not begun; null if there is none.
  [[nodiscard]] const Operation* oldest() const noexcept;
  /// A receive from that rank has no message yet.
  [[nodiscard]] bool waitsFor(int peer) const noexcept {
    return names_.waitingFor(peer) != 0;
  }
  [[nodiscard]] bool receives() const noexcept {
    return !tables_.receives.empty();
  }
  [[nodiscard]] bool has(const Operation& operation) const noexcept;
  struct Usage {
    size_t queued_sends = 0; ///< messages that wait for room at their receiver
    size_t receives = 0; ///< that have not begun
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

  /// Messages to that rank.
  [[nodiscard]] SendQueue& queueOf(int peer);
  void name(const std::shared_ptr<Operation>& send);
  void postSend(const std::shared_ptr<Operation>& message);
  void postReceive(const std::shared_ptr<Operation>& message);
  void begin(const std::shared_ptr<Operation>& message, bool maybe_announced);
  void beginMatched();
  void beginReceive(const PointToPoint::Match& match);
  void forgetQuestions(PeerRow& peer) const noexcept;
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
  Loop& data_loop_;
  DataPlane& plane_;
  PointToPoint names_;
  uint64_t next_ticket_ = 1;
  /// Receives that are held: the message of each, once that has come. Nothing refers to the operation: the tables have it.
  std::unordered_map<const Operation*, std::optional<PointToPoint::Match>> held_;
  Asks asks_; ///< by when each is due
  std::map<std::pair<int, uint32_t>, Asks::iterator> asks_of_; ///< all of them, by rank and tag
  TimePoint asks_from_{}; ///< none asks before
  TimePoint next_deadline_ = TimePoint::max(); ///< no message's is earlier
};

} // namespace pycomm
