#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "base/deadline.h"

namespace pycomm {

/// Whose turn it is to work on a reducer. The turn lasts over everything that a pass waits for (other ranks, a hook, a store), and so keeps
/// the order in which buckets are launched, also if gradients come on several threads.
///
/// Meanwhile Python code may run that calls the reducer again: a signal handler, on the thread that has the turn, or a hook, for which that
/// thread waits. lock() refuses both, as neither would ever get the turn. A caller that only reads asks try_lock().
///
/// When the process ends, a thread with the turn goes on until it has given it back: see StayWithin. Only one that is in Python code of a comm
/// hook, or about to return to it, keeps the turn for good.
class PassLock {
 public:
  /// Waits for the turn; gives the interpreter's lock back meanwhile. Throws a RuntimeError if the calling thread has the turn, or if
  /// another thread has it and the caller is a callback or a hook; or, in a handler of atexit, if a daemon thread keeps the turn.
  void lock();
  /// Whether lock() would throw now, if the turn is taken.
  [[nodiscard]] bool refuses() const noexcept;
  /// False as well if the calling thread has the turn.
  [[nodiscard]] bool try_lock() noexcept;
  void unlock() noexcept;

  /// Gives the turn of the calling thread back for its scope, and waits for it at the end without the refusals of lock(). Without a bound of
  /// its own: the caller cannot go on without the turn. Others have it for a bounded time only. A pass has failed, so they find that and
  /// throw; or they end the failure first, and their own pass then waits for no longer than the group's timeout.
  class Interval {
   public:
    explicit Interval(PassLock& lock) noexcept : lock_(lock) {
      lock_.giveBack();
    }
    ~Interval() {
      (void)lock_.take(Deadline::never());
    }
    Interval(const Interval&) = delete;
    Interval& operator=(const Interval&) = delete;

   private:
    PassLock& lock_;
  };

 private:
  /// False if the deadline has passed.
  [[nodiscard]] bool take(Deadline deadline) noexcept;
  void giveBack() noexcept;

  std::mutex mutex_;
  std::atomic<std::thread::id> owner_; ///< written with mutex_ held; a thread compares it with itself only
};

} // namespace pycomm
