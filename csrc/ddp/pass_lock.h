#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace pycomm {

/// Whose turn it is to work on a reducer. The turn lasts over everything that a pass waits for (other ranks, a hook, a store), and so keeps
/// the order in which buckets are launched, also if gradients come on several threads.
///
/// Meanwhile Python code may run that calls the reducer again: a signal handler, on the thread that has the turn, or a hook, for which that
/// thread waits. lock() refuses both, as neither would ever get the turn. A caller that only reads asks try_lock().
class PassLock {
 public:
  /// Waits for the turn; gives the interpreter's lock back meanwhile. Throws a RuntimeError if the calling thread has the turn, or if
  /// another thread has it and the caller is a callback or a hook.
  void lock();
  /// Whether lock() would throw now, if the turn is taken.
  [[nodiscard]] bool refuses() const noexcept;
  /// False as well if the calling thread has the turn.
  [[nodiscard]] bool try_lock() noexcept;
  void unlock() noexcept;

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_; ///< written with mutex_ held; a thread compares it with itself only
};

} // namespace pycomm
