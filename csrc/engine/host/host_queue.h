#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/host/host_bell.h"
#include "engine/host/host_inbox.h"
#include "engine/host/host_memory.h"
#include "engine/host/host_transfer.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// The operations of a HostPlane, in the order of their tickets. Each is taken from the inbox, entered, run and ended, in that order:
///
///   [ended] head_ → [entered: the first runs, the rest wait for it] entered_ → [taken: the slots are not free yet]
///
/// Thread: the one that holds the plane's run_mutex_.
class HostQueue {
 public:
  struct Events {
    /// Any thread, with run_mutex_ held: must not block.
    std::function<void(ErrorRecord)> notice;
    /// Again each second while it waits. `lacking`: the ranks (bits) whose slots do not show that they have entered it.
    std::function<void(std::shared_ptr<Operation>, uint64_t lacking)> stuck;
    /// An operation has ended that HostPlane::tellEnd() was called for.
    std::function<void(const OperationId& id, const Descriptor& descriptor)> ended;

    /// The exception that is being handled, to `notice`. Without run_mutex_ as well.
    void noticeException(const GroupIdentity& identity) const noexcept;
  };
  /// The plane's, which outlives this.
  struct Parts {
    const GroupIdentity& identity;
    HostMemory& memory;
    const HostBell& bell;
    HostInbox& inbox;
    const Events& events;
    const std::atomic<bool>& ending; ///< nothing is entered any more
  };

  /// An operation that runs and has not moved for so long is reported as stuck.
  HostQueue(const Parts& parts, int tell_after_ms) : parts_(parts), tell_after_ms_(tell_after_ms) {}

  /// Takes posted operations, enters those whose slots are free, and runs the oldest by one step. True if something moved; else `blocked`
  /// gets the ranks that must go on first. An exception is reported to `notice`, and stops the queue.
  bool step(uint64_t& blocked) noexcept;
  /// Reports to the lane the oldest operation if it runs and does not move, and each whose deadline comes near. Returns when it wants to be
  /// called again.
  [[nodiscard]] TimePoint reportStuck(TimePoint now) noexcept;
  /// Reports that the oldest operation waits for these ranks (bits), which have left.
  void reportLeft(uint64_t ranks) noexcept;
  /// The oldest operation that has not ended; null if there is none, or this has stopped.
  [[nodiscard]] const Operation* running() const noexcept;

  // ---- the end: finishAll() first; running() only before stop(), after which it has nothing; then `left` is set in this rank's
  // progress; endAll() last
  /// Ends well what all ranks have done their part for, although this one comes late to it: with a barrier that is over elsewhere, a peer
  /// may have gone on and left long ago.
  void finishAll() noexcept;
  /// Nothing goes on any more.
  void stop() noexcept {
    stopped_ = true;
  }
  /// Other ranks find that this rank has not entered what it has not ended.
  void withdrawAll() const noexcept;
  /// No peer writes into a tensor of this rank any more when this returns: waits for those that do, for 20 ms at the most, and not for
  /// `dead` ones (bits). Takes what one that was stopped may still write away from it. Takes no time if nobody writes.
  void takeAwayAll(uint64_t dead) const noexcept;
  /// Ends every operation, also those in the inbox, which takes no more. Takes no memory until all have ended. `told`, if not null, is
  /// called before with what the oldest ends with.
  void endAll(
      const std::function<ErrorRecord(const Operation&)>& why,
      const std::function<void(const ErrorRecord&)>& told) noexcept;

 private:
  struct Entry {
    /// Takes the operation only once there is memory for the entry: else endAll() finds it where it was.
    Entry(HostMemory& memory, std::shared_ptr<Operation> operation, uint64_t ticket, TimePoint when)
        : transfer(memory.view(), memory.heap(), std::move(operation), ticket), tell_at(when) {}

    HostTransfer transfer;
    TimePoint tell_at; ///< when it is reported whether or not it moves: once its deadline comes near, or again
  };

  void takeInbox();
  void run(uint64_t& blocked, bool& moved);
  void enter(uint64_t& blocked, bool& moved);
  void dropEnded();
  [[nodiscard]] TimePoint stuckAt(TimePoint now) const noexcept;
  [[noreturn]] void throwDiffers(const HostTransfer& transfer) const;
  void finish(const Entry& entry);
  [[nodiscard]] BufferView writtenBy(int peer) const noexcept;
  void takeAway(int peer, BufferView part) const noexcept;

  const Parts parts_;
  const int tell_after_ms_;
  std::vector<Entry> queue_;
  std::vector<std::shared_ptr<Operation>> taken_; ///< keeps its memory between rounds
  size_t head_ = 0;
  size_t entered_ = 0;
  uint64_t rounds_ = 0; ///< of all large operations that were matched
  uint64_t moves_ = 0; ///< steps of the oldest operation, of all that were the oldest
  uint64_t looked_ = 0; ///< moves_ when reportStuck() was last called
  TimePoint stuck_at_ = TimePoint::max(); ///< when the oldest is reported if it has not moved until then
  bool stopped_ = false; ///< for good, or something was noticed: then until the group's failure is known
};

} // namespace pycomm
