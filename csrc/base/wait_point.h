#pragma once

#include <mutex>

namespace pycomm {

// A thread of the program that waits inside the library must hold nothing that a Python signal handler, a hook or another thread may want
// meanwhile: not the interpreter's lock, and no LeafMutex. (A reducer's turn it may hold: see PassLock.) All waits of c10d and ddp pass
// beforeWait(), at which a test build can look, and run a handler.

/// Guards a few fields for as long as they are read or written. Never held over a wait.
class LeafMutex {
 public:
  void lock() {
    mutex_.lock();
    ++t_held;
  }
  [[nodiscard]] bool try_lock() {
    const bool locked = mutex_.try_lock();
    t_held += locked ? 1 : 0;
    return locked;
  }
  void unlock() noexcept {
    --t_held;
    mutex_.unlock();
  }
  /// Whether the calling thread holds one.
  [[nodiscard]] static bool heldHere() noexcept {
    return t_held != 0;
  }

 private:
  friend class LeafGuard;

  static inline thread_local int t_held = 0;

  std::mutex mutex_;
};

/// Holds a mutex of another library's, as if it was a LeafMutex.
class LeafGuard {
 public:
  explicit LeafGuard(std::mutex& mutex) : lock_(mutex) {
    ++LeafMutex::t_held;
  }
  ~LeafGuard() {
    --LeafMutex::t_held;
  }
  LeafGuard(const LeafGuard&) = delete;
  LeafGuard& operator=(const LeafGuard&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
};

/// Before a wait for another thread, rank or device. Does nothing unless the build has fault points (base/fault_point.h).
void beforeWait() noexcept;

/// Called by beforeWait() from now on, on the thread that waits; null: nothing is. Without fault points this does nothing.
void observeWaits(void (*observer)() noexcept) noexcept;

} // namespace pycomm
