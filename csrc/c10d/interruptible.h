#pragma once

#include <chrono>
#include <exception>

#include "base/deadline.h"

namespace pycomm {

/// Lets a signal interrupt a wait below an interface that no exception may cross, such as the CUDA library's. The waiting code calls
/// look() now and then, and gives up when it returns true. rethrow() then raises the exception of Python's signal handler. A thread
/// without this object is never interrupted.
///
/// The handlers run inside look(). So the caller must not hold a lock that a handler may want: a handler may destroy the group. `about`
/// identifies the thread's task, which a handler must not begin again: see within().
class Interruptible {
 public:
  static constexpr int kEveryMs = 100; ///< how often Python's signal handlers are run, here and in every other wait
  static constexpr std::chrono::milliseconds kEvery{kEveryMs};

  explicit Interruptible(const void* about);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  /// Runs Python's signal handlers, once every kEvery at most. Whether the calling thread was interrupted.
  [[nodiscard]] static bool look();
  void rethrow() const; ///< nothing unless it was
  /// Whether the calling thread is busy with this task: then the caller is a signal handler.
  [[nodiscard]] static bool within(const void* about) noexcept;

 private:
  Interruptible* const outer_;
  const void* const about_;
  TimePoint next_;
  std::exception_ptr raised_;
};

} // namespace pycomm
