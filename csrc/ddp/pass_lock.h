#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/deadline.h"

namespace pycomm {

/// Whose turn it is to work on a reducer. The turn lasts over everything that a pass waits for (other ranks, a hook, a store), and so keeps
/// the order in which buckets are launched, also if gradients come on several threads.
///
/// Meanwhile Python code may run that calls the reducer again: a signal handler, on the thread that has the turn, or a hook, for which that
/// thread waits. lock() refuses both, as neither would ever get the turn. A callback of a future is refused during a pass only: at other
/// times it waits for the turn like any thread.
///
/// When the process ends, a thread with the turn goes on until it has given it back: see StayWithin. Only one that is in Python code of a comm
/// hook, or about to return to it, keeps the turn for good.
class PassLock {
 public:
  /// Waits for the turn; gives the interpreter's lock back meanwhile, and runs Python's signal handlers on the main thread, whose exceptions
  /// leave this. Throws a RuntimeError if the calling thread has the turn, or if another thread has it for a pass and the caller is a callback
  /// or a hook; or, in a handler of atexit, if a daemon thread keeps the turn. `brief`: the caller waits for nothing while it has the turn, so
  /// that nobody is refused meanwhile.
  void lock(bool brief = false);
  /// Whether lock() would throw now, if the turn is taken.
  [[nodiscard]] bool refuses() const noexcept;
  /// False as well if the calling thread has the turn.
  [[nodiscard]] bool try_lock(bool brief = false) noexcept;
  void unlock() noexcept;

  /// With the turn: from now on it is taken for a pass that reduces, or no longer. A pass may wait for hooks.
  void setReducing(bool reducing) noexcept {
    reducing_.store(reducing);
  }
  [[nodiscard]] bool reducing() const noexcept {
    return reducing_.load();
  }

  /// Gives the turn of the calling thread back for its scope, and waits for it at the end without the refusals of lock(). Without a bound of
  /// its own: the caller cannot go on without the turn. Others have it for a bounded time only. A pass has failed, so they find that and
  /// throw; or they end the failure first, and their own pass then waits for no longer than the group's timeout.
  class Interval {
   public:
    explicit Interval(PassLock& lock) noexcept : lock_(lock) {
      lock_.giveBack();
    }
    ~Interval();
    Interval(const Interval&) = delete;
    Interval& operator=(const Interval&) = delete;

   private:
    PassLock& lock_;
  };

 private:
  /// Waits, but not for longer. False if another thread still has the turn.
  [[nodiscard]] bool takeWithin(int64_t ms, bool brief) noexcept;
  void giveBack() noexcept;
  void await(bool brief);
  [[nodiscard]] bool refusesCallbacks() const noexcept {
    return reducing_.load() && !brief_.load();
  }

  std::mutex mutex_; ///< guards the next; held while that is read or written
  bool taken_ = false;
  std::condition_variable given_back_;
  std::atomic<std::thread::id> owner_; ///< written by the owner; a thread compares it with itself only
  std::atomic<bool> brief_{false}; ///< likewise
  std::atomic<bool> reducing_{false};
};

} // namespace pycomm
