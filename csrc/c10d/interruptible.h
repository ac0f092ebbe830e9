#pragma once

#include <chrono>
#include <exception>

#include "base/deadline.h"

namespace pycomm {

/// While it lives, the calling thread may be interrupted where it waits below an interface that no exception passes, as the CUDA
/// library's is: what waits calls look() now and then, and gives up when it returns true; rethrow() then raises what Python's signal
/// handler has raised. Threads without one are never interrupted.
///
/// The handlers run inside look(): the caller must not hold a lock that a handler may want, such as a handler that destroys the group. `about`
/// is what the thread is busy with, which a handler must not begin again: see within().
class Interruptible {
 public:
  static constexpr std::chrono::milliseconds kEvery{100}; ///< how often Python's signal handlers are run

  explicit Interruptible(const void* about);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  /// Runs Python's signal handlers, once every kEvery at most. Whether the calling thread was interrupted.
  [[nodiscard]] static bool look();
  void rethrow() const; ///< nothing unless it was
  /// Whether the calling thread is busy with this: then it is a signal handler that asks.
  [[nodiscard]] static bool within(const void* about) noexcept;

 private:
  Interruptible* const outer_;
  const void* const about_;
  TimePoint next_;
  std::exception_ptr raised_;
};

} // namespace pycomm
