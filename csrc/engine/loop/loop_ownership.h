#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "engine/loop/epoll_set.h"

namespace pycomm {

/// Which thread runs an event loop: its own, or a caller that drives it; and which thread must be woken for new work.
///
/// One thread at a time owns the loop. A caller owns it from take() to release(); the loop's own thread, per round, in runRound(). While
/// a caller owns it, and for 1 ms after the last one has left, the own thread stays in park(): a caller that waits in a tight loop comes
/// back at once, and waking the thread each time would cost more than a small operation. If one caller drives for milliseconds, the thread
/// sleeps until that caller leaves.
///
/// No wake-up is lost: a thread says that it sleeps, then looks for work once more; other threads add work, then ask here who sleeps
/// (wakeOwner). All of these loads and stores are sequentially consistent, so one of the two sides sees the other.
class LoopOwnership final {
 public:
  /// `epoll` outlives this: its signal ends the sleep of the owner.
  explicit LoopOwnership(EpollSet& epoll) noexcept : epoll_(epoll) {}

  // ---- callers

  /// Makes the calling thread the owner; waits for the end of the own thread's round. False if another caller is the owner.
  [[nodiscard]] bool take();
  /// The same without waiting: false also if the own thread is in a round.
  [[nodiscard]] bool takeIfFree() noexcept;
  void release() noexcept;
  /// The owner, a caller, is about to sleep in the epoll set, or is awake again.
  void setDriverSleeps(bool sleeps) noexcept {
    driver_sleeps_.store(sleeps, std::memory_order_seq_cst);
  }

  // ---- any thread

  /// There is new work: wakes the owner if it sleeps; if no caller owns the loop, the own thread.
  void wakeOwner() noexcept;
  /// Wakes the own thread even out of park().
  void wakeThread() noexcept;
  /// The own thread sleeps or is parked: it will not look for work unless it is woken.
  [[nodiscard]] bool threadSleeps() const noexcept {
    return thread_sleeps_.load(std::memory_order_seq_cst);
  }
  /// It sleeps, and counts on the arrangements for a rest (Ticker::restShared) that it made before.
  [[nodiscard]] bool threadRests() const noexcept {
    return thread_rests_.load(std::memory_order_seq_cst);
  }

  // ---- the loop's own thread

  void setThreadSleeps(bool sleeps) noexcept {
    thread_sleeps_.store(sleeps, std::memory_order_seq_cst);
  }
  void setThreadRests(bool rests) noexcept {
    thread_rests_.store(rests, std::memory_order_seq_cst);
  }
  /// Waits while callers drive, and for 1 ms after that; or until wakeThread(), or until `stopping` is true.
  void park(const std::atomic<bool>& stopping) noexcept;
  /// Owns the loop while `round` runs; nothing if a caller has taken it, or is about to.
  template <typename Round>
  void runRound(const Round& round) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!driven_.load(std::memory_order_seq_cst)) {
      round();
    }
  }

 private:
  EpollSet& epoll_;
  std::mutex mutex_; ///< the thread that holds it is the owner
  std::atomic<bool> driven_{false}; ///< a caller holds mutex_, or is about to
  std::atomic<bool> driver_sleeps_{false};
  std::atomic<bool> thread_sleeps_{false};
  std::atomic<bool> thread_rests_{false};
  std::atomic<int64_t> last_driven_ns_{0};
  std::atomic<uint64_t> drives_{0}; ///< how often take() has succeeded
  std::atomic<bool> notify_{false}; ///< the own thread is parked until the driver notifies it that it leaves
  std::mutex park_mutex_; ///< guards unpark_
  std::condition_variable park_;
  bool unpark_ = false;
};

} // namespace pycomm
