#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/buffer_view.h"
#include "base/deadline.h"
#include "base/error.h"
#include "engine/host/host_memory.h"
#include "engine/host/host_transfer.h"
#include "engine/host/host_worker.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"
#include "engine/report/group_failure.h"
#include "transport/memory/shared_arena.h"

namespace pycomm {

/// The collectives of the ranks of a group that share a host, in memory that they share; beside the DataPlane, which has everything else.
///
/// Operations get tickets, 1, 2, 3, …, in the order of the group's counter, which is the same on all ranks; they are entered and run in
/// that order. So there is never a question whose turn a stage is, and a slow rank holds up only what comes after. Operations that
/// callbacks and chains issue have no such order, and go over links.
///
/// An operation whose input is not there yet (Operation::Shared::held: it is on its way from a device) has its ticket from the time when
/// it was issued all the same, since that order alone is the ranks' common one, and is not entered before it is released. To the others
/// this rank is one that comes late, so they need not know whose tensors lie on devices.
///
/// A caller that waits runs them (`drive`), with no other thread in between. If one is posted that nobody waits for yet, as DDP's are, a thread
/// of the plane's own, which is started when it is first needed, runs all until nothing is pending; callers that wait meanwhile sleep. One
/// thread at a time runs operations: the one that holds `run_mutex_`.
///
/// Like the DataPlane it never decides that the group has failed: it reports to `noticed`, and `fail` brings the cause back. The data loop has
/// the deadlines: the plane reports an operation that has waited for a while to it (`stuck`), and from then on the ranks ask each other
/// over links which of them has not entered it, as they do for every other operation.
class HostPlane {
 public:
  struct Events {
    /// Any thread, and any of the plane's and its worker's mutexes but inbox_mutex_ may be held: must not block.
    std::function<void(ErrorRecord)> noticed;
    /// Again each second while it waits. `lacking`: the ranks (bits, see inGroup()) whose slots do not show that they have entered it.
    std::function<void(std::shared_ptr<Operation>, uint64_t lacking)> stuck;
    /// An operation has ended that tellEnd() was called for.
    std::function<void(const OperationId& id, const Descriptor& descriptor)> ended;
  };
  struct Config {
    std::vector<int> ranks; ///< of the group on this host, ascending, this one among them; empty: all
    int spin_us = 0; ///< how long a driver polls before it sleeps
    bool crowded = false; ///< more ranks than cores: who polls leaves its core to another rank after each look
    int stuck_after_ms = 50; ///< an operation that runs and has not moved for so long is stuck
  };

  /// `arena` begins with HostView::totalNbytes() of the ranks on this host; the first HostView::commonNbytes() of them exist.
  /// `heaps`: of all these ranks, or none. The identity outlives this.
  HostPlane(
      const GroupIdentity& identity,
      std::shared_ptr<const SharedArena> arena,
      HostHeaps heaps,
      Config config,
      Events events);
  /// After close().
  ~HostPlane();
  HostPlane(const HostPlane&) = delete;
  HostPlane& operator=(const HostPlane&) = delete;

  /// Whether this is how such a request runs in a group of so many ranks, asked for by the calling thread. The same on all ranks.
  [[nodiscard]] static bool serves(const ScheduleRequest& request, int size) noexcept;

  [[nodiscard]] bool reachesTensors() const noexcept {
    return memory_.heap() != nullptr;
  }

  /// Takes the operation that `make` returns, after all others, and puts it into `made`. `make` takes the operation's id: here, so that ids
  /// and tickets have one order. Returns false if the plane is over: then the operation is not taken. If `make` or something later throws,
  /// no ticket is taken, and the group fails. Events come before close() returns, and never after it: the caller may come here while another
  /// thread closes the group.
  bool post(const std::function<std::shared_ptr<Operation>()>& make, bool waits, std::shared_ptr<Operation>& made);

  /// Lets an operation that was posted held be entered. Of one in pieces, later calls say that more has come: PieceFlow::arrive().
  void release(Operation& operation) noexcept;

  /// Runs operations on the calling thread until this one has ended, or the deadline. False if another thread does already, or the
  /// plane has ended: then something else must be waited for.
  bool drive(const Operation& operation, Deadline deadline);

  /// Runs what can be run now on the calling thread, one step. For a caller that will come back, or drive(): wakes no thread for the rest. If
  /// another thread runs operations now, the plane's own takes its place.
  void poll() noexcept;

  /// The group has failed. First all is done that waits for no other rank: what all have done their part for ends well. Then every other
  /// operation ends, and nothing is read or written any more. Returns at once: the plane's own thread does it, because it waits until no
  /// peer writes into a tensor, and the control loop has other groups to serve. If that thread cannot be started, or close() has ended it,
  /// the caller does it, which takes some 20 ms if a peer was stopped in such a write. It calls `told` before operations fail, with the error that
  /// the oldest will end with, and `ended` when all have ended. Both may be null, and are called before close() returns. Not with
  /// run_mutex_ held.
  void fail(const ErrorRecord& cause, const OldestEnds& told, const std::function<void()>& ended) noexcept;
  /// The kernel has ended the process of this rank of the group, so it writes nothing any more. A PEER_DEAD alone does not prove that: a
  /// connection may end while its peer lives. Any thread.
  void died(int peer) noexcept;
  /// Leaves: operations under way end with `reason`; if there were some, the other ranks are notified. Joins the thread. Idempotent.
  void close(const ErrorRecord& reason);

  /// For the data loop, which is asked over links about operations that it never saw: the last 64 that were posted here, oldest first,
  /// whether or not they have ended.
  [[nodiscard]] std::vector<std::shared_ptr<Operation>> recent() const;
  /// The data loop keeps something of this operation: Events::ended is called when it has ended; at once if it has.
  void tellEnd(Operation& operation) const;
  /// The same of each operation up to this number that is posted from now on. One that was posted before is among recent(), unless 64
  /// others came after it.
  void tellEndsUpTo(int64_t sequence) noexcept {
    const int64_t before = tell_up_to_.load(std::memory_order_relaxed); // the data loop alone stores it
    tell_up_to_.store(
        std::max(before, sequence), std::memory_order_relaxed); // inbox_mutex_ is between this and recent()
  }
  /// Operations that were posted and have not ended.
  [[nodiscard]] uint64_t pending() const noexcept {
    return pending_.load(std::memory_order_seq_cst);
  }
  /// Whom an operation waits for.
  struct WaitsFor {
    uint64_t not_entered = 0; ///< ranks (bits, see inGroup()) that have not entered it, although they can
    int behind = -1; ///< the rank that has come least far, if it is another one that holds this one up; -1: none
  };
  [[nodiscard]] WaitsFor waitsFor(const Operation& operation) const noexcept;
  /// The ranks of the group that are these ranks (bits) of the host.
  [[nodiscard]] std::vector<int> inGroup(uint64_t ranks) const;

 private:
  friend class HostPlaneStepper; // tests/cpp/engine/host: one step at a time, at times of the test's own
  /// One operation.
  struct Entry {
    /// Takes the operation only once there is memory for the entry: else endAll() finds it where it was.
    Entry(const HostMemory& memory, std::shared_ptr<Operation> operation, uint64_t ticket, TimePoint when)
        : transfer(memory, std::move(operation), ticket), report_at(when) {}

    HostTransfer transfer;
    TimePoint report_at; ///< as stuck, whether or not it moves: once its deadline comes near, or again
  };

  // ---- any thread
  void put(const std::shared_ptr<Operation>& made);
  void wakeWorker();
  void noticeException() const noexcept;

  // ---- the thread that holds run_mutex_
  /// On the plane's own thread. Whether there is more to do.
  [[nodiscard]] bool work() noexcept;
  template <typename Done>
  void run(const Done& done, Deadline deadline, int spin_us);
  void sleep(Deadline deadline) noexcept;
  /// Takes posted operations, enters those whose slots are free, and runs the oldest by one step. True if something moved; else `blocked`
  /// gets the ranks that must go on first. An exception is reported to `noticed`, and stops the plane.
  bool step(uint64_t& blocked) noexcept;
  void takePosted();
  void enter(uint64_t& blocked, bool& moved);
  void advance(uint64_t& blocked, bool& moved);
  void dropEnded();
  void finish(const Entry& entry);
  /// Reports to the data loop the oldest operation if it runs and does not move, and each whose deadline comes near. Returns when it wants to be
  /// called again.
  [[nodiscard]] TimePoint reportStuck(TimePoint now) noexcept;
  [[nodiscard]] TimePoint stuckAt(TimePoint now) const noexcept;
  /// Reports what has stopped the plane, unless it has been.
  void reportTrouble() noexcept;
  /// The ranks (bits) that have left in good order.
  [[nodiscard]] uint64_t haveLeft() const noexcept;
  /// Reports that the oldest operation waits for these ranks (bits), which have left.
  void reportLeft(uint64_t ranks) noexcept;
  /// The oldest operation that has not ended; null if there is none, or nothing goes on any more.
  [[nodiscard]] const Operation* running() const noexcept;

  // ---- the end, on that thread: fail() and close() say in which order
  /// Ends well what all ranks have done their part for, although this one comes late to it: with a barrier that is over elsewhere, a peer
  /// may have gone on and left long ago.
  void finishAll() noexcept;
  /// Other ranks find that this rank has not entered what it has not ended.
  void withdrawAll() const noexcept;
  /// Ends every operation, also those that nobody took; no more is taken. First no peer writes into a tensor of this rank any more:
  /// takeAwayAll(). Takes no memory until all have ended. `told`, if not null, is called before with what the oldest ends with.
  void endAll(const ErrorRecord& cause, const OldestEnds& told) noexcept;
  /// Waits for peers that write into a tensor of this rank, for 20 ms at the most, and not for those that died(). Takes what one that was
  /// stopped may still write away from it. Takes no time if nobody writes.
  void takeAwayAll() const noexcept;
  void takeAway(int peer, BufferView part) const noexcept;
  /// Empty if the peer writes nothing, or has died.
  [[nodiscard]] BufferView writtenBy(int peer) const noexcept;

  const GroupIdentity& identity_;
  const Config config_;
  const Events events_;
  HostMemory memory_; ///< run_mutex_ guards what is not const of it
  const HostBell bell_;
  HostWorker worker_;
  /// The thread that holds run_mutex_ must leave, for good: fail() or close() waits for it, and ends all. Nothing is entered any more.
  std::atomic<bool> ending_{false};
  std::atomic<uint64_t> dead_{0}; ///< ranks (bits): see died()
  std::atomic<uint64_t> pending_{0}; ///< posted and not ended
  std::atomic<bool> any_posted_{false}; ///< posted_ is not empty. Sequentially consistent: see HostBell
  std::atomic<int64_t> tell_up_to_{0}; ///< see tellEndsUpTo()

  /// Guards the next four; the last that is locked. An operation that was posted is in posted_, then in queue_.
  mutable std::mutex inbox_mutex_;
  std::vector<std::shared_ptr<Operation>> posted_; ///< in the order of the tickets; null: in queue_ already
  uint64_t last_ticket_ = 0;
  std::array<std::shared_ptr<Operation>, 64> recent_; ///< by ticket
  bool closed_ = false; ///< all have ended: nothing is posted any more

  std::mutex run_mutex_; ///< guards the rest
  /// In the order of the tickets: [ended] head_ → [entered: the first runs, the rest wait for it] entered_ → [the slots are not free yet]
  std::vector<Entry> queue_;
  size_t head_ = 0;
  size_t entered_ = 0;
  uint64_t rounds_ = 0; ///< of all large operations that were matched
  uint64_t moves_ = 0; ///< steps of the oldest operation, of all that were the oldest
  uint64_t looked_ = 0; ///< moves_ when reportStuck() was last called
  TimePoint stuck_at_ = TimePoint::max(); ///< when the oldest is reported if it has not moved until then
  bool stopped_ =
      false; ///< nothing goes on: something was noticed, and the group's failure is to come, or all have ended
  std::exception_ptr trouble_; ///< what stopped it, until it is reported: there may be no memory for that
};

} // namespace pycomm
