#pragma once

#include <chrono>
#include <cstdint>

#include "engine/host/host_layout.h"

namespace pycomm {

/// How a rank that waits for others sleeps, and how they wake it: each rank has a futex in the shared memory, its bell.
///
///   const uint32_t rung = bell.expect(blocked);   // these ranks ring from now on
///   if (nothing has moved since) bell.sleep(rung, pause);
///   bell.ignore();
///
/// No wake-up is lost: this rank stores for whom it waits (1, in expect), reads the bell, then looks once more whether it can go on (2). A
/// peer stores its counter (3), then looks who waits (4, in ringOthers), and rings if it is this one. All four are sequentially consistent,
/// so they have one order: if (4) came before (1), then (3) came before (2), and the look finds it. If (4) came after (1), the peer rings:
/// either before the bell was read, then (3) came before (2) as well; or after it, then the kernel finds another value than was read and
/// does not let this thread sleep. Release and acquire alone would let a processor do (4) before (3) is seen.
///
/// Thread: any for the ring functions; expect(), sleep() and ignore() are for the thread that runs the plane.
class HostBell {
 public:
  explicit HostBell(const HostView& view) : view_(view) {}

  /// Wakes the ranks that sleep until this rank goes on.
  void ringOthers() const noexcept;
  /// Wakes the thread of this process that sleeps, if one does.
  void ringSelf() const noexcept;

  /// Asks these ranks (bits), and this process's threads, to ring. Returns what sleep() needs.
  [[nodiscard]] uint32_t expect(uint64_t ranks) const noexcept;
  /// Sleeps until the bell is rung, or was since expect() returned `rung`, or the time is up.
  void sleep(uint32_t rung, std::chrono::microseconds pause) const noexcept;
  /// Nobody needs to ring any more.
  void ignore() const noexcept;

 private:
  const HostView view_;
};

} // namespace pycomm
