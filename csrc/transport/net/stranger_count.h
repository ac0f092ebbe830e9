#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/fork_guard.h"

namespace pycomm {

/// How many connections wait in all acceptors of this process without having said who they are. They must not take the descriptors that
/// the program needs, whatever number of groups and interfaces it has.
class StrangerCount {
 public:
  /// A child of fork() inherits the number, but not the strangers: the parent's acceptors do nothing there. Each acceptor calls this first.
  void beginAfterFork() noexcept {
    const uint64_t mine = uint64_t{forkCount()} << 32;
    uint64_t seen = state_.load();
    while ((seen & kProcess) != mine && !state_.compare_exchange_weak(seen, mine)) {
    }
  }
  void add() noexcept {
    state_.fetch_add(1, std::memory_order_relaxed);
  }
  void remove(size_t strangers) noexcept {
    state_.fetch_sub(strangers, std::memory_order_relaxed);
  }
  [[nodiscard]] size_t value() const noexcept {
    return state_.load(std::memory_order_relaxed) & ~kProcess;
  }

 private:
  static constexpr uint64_t kProcess = ~uint64_t{0} << 32;
  std::atomic<uint64_t> state_{0}; ///< the forkCount() of the process that counts, and in the lower half the number
};

} // namespace pycomm
