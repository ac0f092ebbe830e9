#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "engine/host/host_bell.h"
#include "engine/host/host_inbox.h"
#include "engine/host/host_memory.h"
#include "engine/host/host_queue.h"
#include "engine/host/host_worker.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"
#include "transport/memory/shared_arena.h"

namespace pycomm {

/// The collectives of a group whose ranks all share one host, in memory that they share; beside the DataPlane, which has everything
/// else.
///
/// Operations get tickets, 1, 2, 3, …, in the order of the group's counter, which is the same on all ranks; they are entered and run in
/// that order. So there is never a question whose turn a stage is, and a slow rank holds up only what comes after. Operations that
/// callbacks and chains issue have no such order, and go over links.
///
/// An operation whose input is not there yet (Operation::Shared::held: it is on its way from a device) has its ticket from the time when
/// it was issued all the same, since that order alone is the ranks' common one, and is not entered before it is released. To the others
/// this rank is one that comes late, so they need not know whose tensors lie on devices.
///
/// A caller that waits runs them (`drive`), with no other thread in between. Operations that no caller waits for are run by a thread of
/// the plane's own, which is started when it is first needed. One thread at a time runs operations: the one that holds `run_mutex_`.
///
/// Like the DataPlane it never decides that the group has failed: it reports to `notice`, and `fail` brings the cause back. The lane has
/// the deadlines: the plane reports an operation that has waited for a while to it (`stuck`), and from then on the ranks ask each other
/// over links which of them has not entered it, as they do for every other operation.
class HostPlane {
 public:
  using Events = HostQueue::Events;
  struct Config {
    int spin_us = 0; ///< how long a driver looks before it sleeps
    bool crowded = false; ///< more ranks than cores: who looks leaves its core to another rank after each look
    int tell_after_ms = 50;
  };

  /// `arena` begins with HostView::totalNbytes(size) for this; the first HostView::commonNbytes(size) of them exist.
  /// `heaps`: of all ranks, its own among them, or none.
  HostPlane(
      GroupIdentity identity,
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

  /// Puts what `make` returns behind all others. `make` takes the operation's id: here, so that ids and tickets have one order.
  /// False if the plane is over: then the operation is not taken. If it throws, the group fails. Events come before close() returns, and
  /// never after it: the caller may come here while another thread closes the group.
  bool post(const std::function<std::shared_ptr<Operation>()>& make, bool waits, std::shared_ptr<Operation>& made);

  /// Lets an operation that was posted held be entered.
  void release(Operation& operation) noexcept;

  /// Runs operations on the calling thread until this one has ended, or the deadline. False if another thread does already, or the
  /// plane has ended: then something else must be waited for.
  bool drive(const Operation& operation, Deadline deadline);

  /// The group has failed: every operation ends; nothing is read or written any more. Returns at once: the plane's own thread does it,
  /// because it waits until no peer writes into a tensor, and the lane has other groups to serve. It calls `told` before that with
  /// the error that the oldest operation will end with, and `ended` when all have ended. Both may be null, and are called before close()
  /// returns. Not with run_mutex_ held.
  void fail(
      const ErrorRecord& cause,
      const std::function<void(const ErrorRecord&)>& told,
      const std::function<void()>& ended) noexcept;
  /// Leaves: operations under way end with `reason`; if there were some, the other ranks are notified. Joins the thread. Idempotent.
  void close(const ErrorRecord& reason);

  /// For the lane, which is asked over links about operations that it never saw: the last ones that were posted here, oldest first.
  [[nodiscard]] std::vector<std::shared_ptr<Operation>> recent() const {
    return inbox_.recent();
  }
  /// The lane keeps something of this operation: Events::ended is called when it has ended; at once if it has.
  void tellEnd(Operation& operation) const;
  /// The same of each operation up to this number that is posted from now on. One that was posted before is among recent(), unless 64
  /// others came after it.
  void tellEndsUpTo(int64_t sequence) noexcept {
    const int64_t before = tell_up_to_.load(std::memory_order_relaxed); // the lane alone stores it
    tell_up_to_.store(
        std::max(before, sequence), std::memory_order_relaxed); // the inbox's mutex is between this and recent()
  }
  /// Operations that were posted and have not ended.
  [[nodiscard]] uint64_t pending() const noexcept {
    return inbox_.pending();
  }
  /// Whom an operation waits for.
  struct WaitsFor {
    int not_entered = -1; ///< a rank that has not entered it
    int behind = -1; ///< one that has, and has not ended it
  };
  [[nodiscard]] WaitsFor waitsFor(const Operation& operation) const noexcept;

 private:
  template <typename Done>
  void run(const Done& done, Deadline deadline, int spin_us);
  void sleep(Deadline deadline) noexcept;
  /// The ranks (bits) that have left in good order.
  [[nodiscard]] uint64_t haveLeft() const noexcept;
  void wakeWorker();
  /// On the plane's own thread. Whether there is more to do.
  [[nodiscard]] bool work() noexcept;

  const GroupIdentity identity_;
  const Config config_;
  const Events events_;
  HostMemory memory_; ///< run_mutex_ guards what is not const of it
  const HostBell bell_;
  HostInbox inbox_;
  HostWorker worker_;
  std::atomic<int64_t> tell_up_to_{0}; ///< see tellEndsUpTo()
  std::atomic<bool> ending_{false}; ///< the thread that holds run_mutex_ must leave, for good

  std::mutex run_mutex_; ///< guards queue_
  HostQueue queue_;
};

} // namespace pycomm
