#pragma once

#include <exception>

#include "base/deadline.h"

namespace pycomm {

/// While it lives, the calling thread may be interrupted where it waits below an interface that no exception passes, as the CUDA
/// library's is: what waits calls look() now and then, and gives up when it returns true; rethrow() then raises what Python's signal
/// handler has raised. Threads without one are never interrupted.
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  /// Runs Python's signal handlers, ten times a second at most. Whether the calling thread was interrupted.
  [[nodiscard]] static bool look();
  void rethrow() const; ///< nothing unless it was

 private:
  Interruptible* const outer_;
  TimePoint next_;
  std::exception_ptr raised_;
};

} // namespace pycomm
