#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "base/error.h"
#include "engine/data/messages.h"
#include "engine/data/operation_ends.h"
#include "engine/data/outgoing.h"
#include "engine/data/peer_departures.h"
#include "engine/data/plane_end.h"
#include "engine/data/reporter.h"
#include "engine/data/tables.h"
#include "engine/data/transfers.h"
#include "engine/data/usage.h"
#include "engine/data/watched_operations.h"
#include "engine/links/peer_links.h"
#include "engine/loop/loop.h"
#include "engine/loop/staging_pool.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// Runs the operations of one group on its lane, and moves their frames. It takes each event to the parts that it concerns, and does what
/// they ask for, in order. Example: a frame arrives, and its operation's row is looked up. Messages starts a waiting receive.
/// matching::arrived() compares the descriptor. Transfers names the step and where the payload goes. When the payload is complete,
/// credit.cc lists a grant as an action, and PeerLinks sends it.
///
/// Each part owns one state:
///   Tables             which operations the ranks have entered, how far they have come, and how much may be sent
///   Transfers          the work of operations under way
///   Messages           messages that have not begun
///   WatchedOperations  operations that run elsewhere, or not yet
///   OperationEnds      operations that cannot begin; how operations end together
///   PeerLinks          bulk links, and the frames on them
///   Outgoing           frames to this rank itself, and questions for control links
///   PeerDepartures     ranks that left, links that broke
/// Thread: the lane's.
class Exchange final : private PeerLinks::Owner, private Messages::Owner {
 public:
  using Usage = pycomm::Usage;

  /// All of these but `limits` outlive this.
  Exchange(
      const GroupIdentity& identity,
      const Limits& limits,
      const PeerLinks::Options& links,
      Loop& lane,
      PlaneEnd& end,
      const Reporter& reporter);

  /// Every entry from the loop goes through here: an exception becomes the group's failure (`peer` to blame, -1 for nobody), and frames
  /// that were queued leave.
  template <typename Body>
  void guarded(int peer, const Body& body) noexcept {
    try {
      body();
      flush();
      outgoing_.sendQuestions();
    } catch (...) {
      ends_.thrown(peer, std::current_exception());
    }
  }

  // ---- events, in guarded()
  void post(const std::shared_ptr<Operation>& operation);
  /// More of the operation's input is here.
  void inputArrived(uint64_t op_id);
  /// See WatchedOperations, as for the next two.
  void hold(const std::shared_ptr<Operation>& operation);
  void stuck(const std::shared_ptr<Operation>& operation, uint64_t lacking);
  void hostEnded(const OperationId& id, const Descriptor& descriptor);
  void follow(const std::shared_ptr<Operation>& operation);
  /// Another library has ended it. Null if the group had ended it before.
  [[nodiscard]] std::shared_ptr<Operation> unfollow(uint64_t op_id) noexcept;
  /// A question or an answer has arrived on a control link.
  void heardQuestion(int peer, const FrameHeader& question) {
    static_cast<void>(onHeader(peer, question));
  }
  void tick(TimePoint now);

  // ---- questions
  [[nodiscard]] Usage usage() const;
  [[nodiscard]] TimePoint nextTick() const noexcept;
  /// Adds the peers from which frames or messages are due. False if it is cheaper to ask the kernel.
  [[nodiscard]] bool addDuePeers(std::vector<int>& peers) const;

  // ---- parts
  [[nodiscard]] PeerLinks& links() noexcept {
    return links_;
  }
  [[nodiscard]] const PeerLinks& links() const noexcept {
    return links_;
  }
  [[nodiscard]] WatchedOperations& watched() noexcept {
    return watched_;
  }
  [[nodiscard]] PeerDepartures& departures() noexcept {
    return departures_;
  }
  [[nodiscard]] OperationEnds& ends() noexcept {
    return ends_;
  }

 private:
  /// What this rank copies and computes between two looks at the sockets: in this event or those before it, and as much again in the tick
  /// that ends the loop's turn. With the last slice of each that is 1 MiB, some 100 us; asking the kernel again costs 1 us.
  static constexpr int64_t kTurnNbytes = 448 << 10;

  // PeerLinks::Owner
  [[nodiscard]] Sink onHeader(int peer, const FrameHeader& header) override;
  void onFrame(int peer, const FrameHeader& header, Sink sink) override;
  void onSent(const std::vector<OutFrame>& frames) override;
  void onReadingEnded(int peer, const Error& error) override {
    departures_.readingEnded(peer, error);
  }
  void onWritingBroke(int peer, const Error& error) override {
    departures_.writingBroke(peer, error);
  }
  void onGoodbyesSaid() override {
    end_.goodbyesSaid(Clock::now());
  }
  void onThrown(int peer, const std::exception_ptr& exception) noexcept override {
    ends_.thrown(peer, exception);
  }
  void run(int peer, void (*body)(const void* context), const void* context) noexcept override {
    guarded(peer, [&] { body(context); });
  }

  // Messages::Owner
  void begin(const std::shared_ptr<Operation>& message) override {
    orRefuse(message, [&] { start(message); });
  }
  void cannotBegin(const std::shared_ptr<Operation>& operation) noexcept override {
    ends_.cannotBegin(operation);
  }
  void ask(int peer, const FrameHeader& question) override {
    outgoing_.send(peer, question, false);
  }
  [[nodiscard]] bool hasOpenedLink(int peer) const noexcept override {
    return links_.isOpened(peer);
  }
  [[nodiscard]] bool isAway(int peer) const noexcept override {
    return departures_.isAway(peer);
  }
  void notice(ErrorRecord record) override {
    reporter_.notice(std::move(record));
  }

  /// For a body that takes an operation up. If no part has the operation after an exception, ends_ has.
  template <typename Body>
  void orRefuse(const std::shared_ptr<Operation>& operation, const Body& body) {
    try {
      body();
    } catch (...) {
      ends_.cannotBegin(operation);
      throw;
    }
  }
  void start(const std::shared_ptr<Operation>& operation);
  void finishIfComplete(OperationRow& row);
  void act();
  void overdue(uint64_t op_id);
  void flush();
  [[nodiscard]] bool hasWork() const noexcept {
    return outgoing_.hasOwn() || transfers_.hasWork();
  }
  /// Some of it, if this turn has room for it. Whether there was any.
  bool work();
  void deliverToSelf();
  /// The frame has left.
  void sent(const OutFrame& frame);

  const GroupIdentity& identity_;
  PlaneEnd& end_;
  const Reporter& reporter_;
  StagingPool staging_; ///< before everything that holds its buffers
  Tables tables_;
  Transfers transfers_;
  PeerLinks links_;
  Outgoing outgoing_;
  Messages messages_;
  PeerDepartures departures_;
  WatchedOperations watched_;
  OperationEnds ends_;
  int64_t turn_left_ = kTurnNbytes; ///< bytes that work() may read and write until the next tick
};

} // namespace pycomm
