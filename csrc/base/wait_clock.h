#pragma once

#include <cstdint>

namespace pycomm {

/// How long each thread has waited in operations for other ranks, so that a time that is measured around them can leave it out.
class WaitClock {
 public:
  /// An instant of one thread.
  struct Instant {
    int64_t ns = 0; ///< 0: none
    int64_t waited_ns = 0; ///< until then, by this thread
    const void* thread = nullptr;
  };
  [[nodiscard]] static Instant now() noexcept;
  /// From `begin` to `end`, without the waits in between if both are of one thread.
  [[nodiscard]] static int64_t busyNs(const Instant& begin, const Instant& end) noexcept;

  /// The calling thread waits as long as this lives; waits within waits count once.
  class Waiting {
   public:
    Waiting() noexcept;
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    int64_t began_ns_; ///< 0: it is within another one
  };
};

} // namespace pycomm
