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
    const uint32_t forks = forkCount();
    if (process_.exchange(forks) != forks) {
      count_.store(0);
    }
  }
  void add() noexcept {
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  void remove(size_t strangers) noexcept {
    count_.fetch_sub(strangers, std::memory_order_relaxed);
  }
  [[nodiscard]] size_t value() const noexcept {
    return count_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<size_t> count_{0};
  std::atomic<uint32_t> process_{0}; ///< the forkCount() of the process that counts
};

} // namespace pycomm
