#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/messages.h"
#include "engine/data/tables.h"
#include "engine/data/transfers.h"
#include "engine/data/usage.h"
#include "engine/data/watched_operations.h"
#include "engine/links/host_rings.h"
#include "engine/links/peer_links.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/monitor/question.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"
#include "engine/operation/unreported.h"
#include "engine/report/group_failure.h"

namespace pycomm {

/// A group's half on its event loop: it takes events in order, and moves frames. What an event means for operations and ranks, the
/// functions over the tables say (matching.h, credit.h, waiting.h, leaving.h); this class does what they list.
///
/// Example: a frame arrives. Its operation's row is looked up. If it is a message's, Messages starts a receive that waits for it.
/// matching::headerArrived() compares the descriptor. Transfers names the step and where the payload goes. When the payload is complete, the
/// row is looked up again, the step runs, and credit.cc lists a grant, which leaves by PeerLinks.
///
/// How it ends: ends.cc. It never decides that the group has failed. It reports what it notices to `noticed`, the control plane agrees
/// with the other ranks on one cause, and `fail` brings that cause back.
///   Running -> Failed, by fail(): the group has failed.
///   Running -> Closing, by close(): links stay open for goodbyes.
///   Closing -> Failed and closing, by fail(), or Failed -> Failed and closing, by close(): links stay open for a while.
///   From either of the last two -> ended, when that time is over.
/// Thread: the event loop's, for everything.
class DataPlane final : public Loop::Ticker, private LinkOwner {
 public:
  using Usage = pycomm::Usage;
  /// Any thread may be behind these; they must not block. Once the plane ends it reports no failure and no doubt, and asks nothing.
  struct Events {
    /// A report: the group has failed, unless a goodbye explains it.
    std::function<void(ErrorRecord)> noticed;
    /// A peer said goodbye on its bulk link. The goodbye on its control link may get lost.
    std::function<void(int peer)> left;
    /// A link broke, no operation needs it, and no goodbye came in time. This is a failure if the peer is still in the group.
    std::function<void(ErrorRecord)> doubted;
    /// For other ranks, over control links.
    std::function<void(std::vector<Question>)> ask;
  };

  /// Parts that the simulator replaces.
  struct Options : PeerLinks::Options {
    Limits limits;
  };

  DataPlane(GroupIdentity identity, Loop& data_loop, Events events, Options options);
  DataPlane(GroupIdentity identity, Loop& data_loop, Events events)
      : DataPlane(std::move(identity), data_loop, std::move(events), Options()) {}
  ~DataPlane() override;

  // ---- operations
  void post(const std::shared_ptr<Operation>& operation) {
    takeUp(operation, Was::New);
  }
  /// Watches over the deadline of an operation whose input is not there yet, until release(). A message gets its place among those of its
  /// peer and tag here.
  void hold(const std::shared_ptr<Operation>& operation);
  /// Posts an operation that is held. Later calls say that more of its input has come (PieceFlow::arrive). Nothing happens if it has ended.
  void release(const std::shared_ptr<Operation>& operation);
  /// See WatchedOperations, as for the next two.
  void accompany(HostPlane* host) noexcept {
    watched_.accompany(host);
  }
  void hostStuck(const std::shared_ptr<Operation>& operation, uint64_t lacking);
  void hostEnded(const OperationId& id, const Descriptor& descriptor);
  /// Of an operation that another library runs: it is compared and watched over, and ends when it is said to have, or with the group.
  void follow(const std::shared_ptr<Operation>& operation);
  void followedEnded(uint64_t op_id, std::optional<ErrorRecord> error);

  // ---- links
  /// A peer has connected to us. `shared`: its bytes go through shared memory, and `link` is the bell of that.
  void adopt(int peer, std::unique_ptr<Link> link, bool shared = false);
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
  void fail(const ErrorRecord& cause, const OldestEnds& told = nullptr) noexcept;
  /// Says goodbye to all peers, and calls `closed` when the links are down: 20 ms after the last goodbye has left, or in 1.5 s if a peer does
  /// not read. After a failure it says none, and they stay for at least 50 ms after that. Operations that are under way, and later ones, end
  /// with `reason`; if there were some, the other ranks are notified.
  void close(const ErrorRecord& reason, std::function<void()> closed) noexcept;

  [[nodiscard]] Usage usage() const;

  // Loop::Ticker
  void onThrown(const std::exception_ptr& exception) noexcept override {
    thrown(-1, exception);
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

  // ---- for Messages
  /// Runs a message from now on. If it throws, the plane has the message nevertheless, and ends it.
  void begin(const std::shared_ptr<Operation>& message);
  /// The operation ends with the group's failure, which the exception that is being handled becomes. If it ended before, its waiter might
  /// begin an operation that the other ranks do not expect, and they would blame that.
  void cannotBegin(const std::shared_ptr<Operation>& operation) noexcept;
  /// Sends a frame without payload. If an operation needs it, it fails the group if it cannot be sent; else that is logged.
  void send(int peer, const FrameHeader& header, Action::Way way);
  /// The group has failed, as far as this rank knows.
  void notice(ErrorRecord record) const;

 private:
  /// What this rank copies and computes between two looks at the sockets: in this event or those before it, and as much again in the tick
  /// that ends the loop's turn. With the last slice of each that is 1 MiB, some 100 us; asking the kernel again costs 1 us.
  static constexpr int64_t kWorkNbytes = 448 << 10;
  static constexpr size_t kLargeNbytes = 1 << 20; ///< of a schedule: to release it takes 60 us
  /// The error of an operation that ends with others. The row is null if it is not entered.
  using Why = std::function<ErrorRecord(const Operation&, const OperationRow*)>;

  // LinkOwner
  [[nodiscard]] Sink onHeader(int peer, const FrameHeader& header) override;
  void onFrame(int peer, const FrameHeader& header, Sink sink) override;
  void onSent(const std::vector<OutFrame>& frames) override;
  void onReadingEnded(int peer, const Error& error) override;
  void onWritingBroke(int peer, const Error& error) override;
  void onGoodbyesSaid() override;
  void onThrown(int peer, const std::exception_ptr& exception) noexcept override {
    thrown(peer, exception);
  }
  void run(int peer, void (*body)(const void* context), const void* context) noexcept override;

  /// Every entry from the loop that may queue a frame goes through here: an exception becomes the group's failure (`peer` to blame, -1 for
  /// nobody), and frames that were queued leave. peerLeft(), followedEnded() and shareRings() queue none; an exception of theirs goes to the
  /// loop's owner, which makes the same of it.
  template <typename Body>
  void guarded(int peer, const Body& body) noexcept;
  /// For a body that takes an operation up. If no part has the operation after an exception, it is refused.
  template <typename Body>
  void orRefuse(const std::shared_ptr<Operation>& operation, const Body& body);

  // ---- operations
  /// A message that was held has its place already.
  enum class Was : bool { New, Held };
  void takeUp(const std::shared_ptr<Operation>& operation, Was was);
  void start(const std::shared_ptr<Operation>& operation);
  void finishIfComplete(OperationRow& row);
  /// Of an operation that has ended: this may be the last reference to it, and to its schedule, which may be large.
  void letGo(OperationRow& row) noexcept;
  /// The deadline of an operation that is entered has passed.
  void overdue(uint64_t op_id);
  /// Some of the work of operations, if this turn has room for it. Whether there was any.
  bool work();
  [[nodiscard]] bool hasWork() const noexcept {
    return !to_self_.empty() || transfers_.hasWork();
  }

  // ---- frames leave
  /// Does what the functions over the tables have listed, until there is nothing more.
  void act();
  void take(Action& action);
  /// A frame of an operation.
  void push(int peer, OutFrame&& frame);
  void flush();
  /// The frame has left.
  void sent(const OutFrame& frame);
  void deliverToSelf();

  // ---- peers come and go
  /// The link that the peer opened has changed its state.
  void noteReading(int peer) noexcept;
  [[nodiscard]] ErrorRecord brokenLink(int peer, const Error& error) const;

  // ---- the end: ends.cc
  /// Operations begin, frames leave, and reports count.
  [[nodiscard]] bool running() const noexcept {
    return !failure_ && !closing_;
  }
  void thrown(int peer, const std::exception_ptr& exception) noexcept;
  void endRefused(Operation& operation, const std::exception_ptr& exception) const noexcept;
  /// Ends operations that cannot begin if their deadline has passed: the failure was lost, for want of memory on its way.
  void endRefusedLate(TimePoint now) noexcept;
  /// Ends an operation that comes too late to begin, with the cause of the end.
  void endAtOnce(Operation& operation) const noexcept;
  /// Of an operation that ends, and whose row is out of the table.
  void endRow(OperationRow& row) noexcept;
  void stopTouchingMemory() noexcept;
  /// The one way in which operations end together.
  void endAll(const Why& why) noexcept;
  /// The group's cause as the error of one operation, with how far it has come.
  [[nodiscard]] ErrorRecord errorIn(const Operation& operation, const OperationRow* row, const ErrorRecord& cause)
      const;
  /// The same of the operation or message that was issued first, if there is one.
  void tellOldest(const ErrorRecord& cause, const OldestEnds& told) const;
  /// An operation in which other ranks expect this one; null if there is none.
  [[nodiscard]] const Operation* unfinished() const noexcept;
  [[nodiscard]] TimePoint nextRefusedDeadline() const noexcept;

  const GroupIdentity identity_;
  const Options options_;
  Loop& data_loop_;
  const Events events_;
  StagingPool staging_; ///< before everything that holds its buffers
  Tables tables_;
  Transfers transfers_;
  PeerLinks links_;
  Messages messages_;
  WatchedOperations watched_;
  std::deque<OutFrame> to_self_; ///< between a send to this rank and its receive
  std::vector<Question> questions_; ///< for control links, that have not left yet
  int64_t turn_left_ = kWorkNbytes; ///< bytes that work() may read and write until the next tick
  std::vector<int> looked_; ///< scratch of look()

  // The end.
  Unreported unreported_; ///< by thrown()
  std::vector<std::shared_ptr<Operation>> refused_; ///< operations that cannot begin, oldest first: see cannotBegin()
  std::optional<ErrorRecord> failure_;
  TimePoint failed_at_{};
  std::optional<ErrorRecord> closing_; ///< why, once close() was called
  TimePoint ends_at_ = TimePoint::max(); ///< when the links end; max(): close() was not called, or they have ended
  std::function<void()> closed_; ///< what close() got
};

} // namespace pycomm
