#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/loop/task.h"

namespace pycomm {

/// Many threads put tasks in, one takes them out, in order. The lock is held for a few instructions, never while a task runs; memory
/// is kept, so that a steady state allocates nothing.
class TaskQueue {
 public:
  void push(Task task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(task));
    // Sequentially consistent, as empty(): see there.
    any_.store(true, std::memory_order_seq_cst);
  }

  /// Sequentially consistent, so that it can be paired with a sleep flag (see LoopOwnership).
  [[nodiscard]] bool empty() const noexcept {
    return !any_.load(std::memory_order_seq_cst);
  }

  /// Runs everything that was in the queue when called; true if there was something. A task may call it again. A task that throws is
  /// logged, and the next one runs.
  bool runAll() {
    if (empty()) {
      return false;
    }
    std::vector<Task> batch = std::exchange(spare_, {});
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      batch.swap(waiting_);
      any_.store(false, std::memory_order_seq_cst);
    }
    const bool any = !batch.empty();
    for (Task& task : batch) {
      Task now(std::move(task)); // what it holds is let go as soon as it has run
      try {
        now();
      } catch (...) {
        logThrown(std::current_exception());
      }
    }
    batch.clear();
    if (batch.capacity() <= kKept) {
      spare_ = std::move(batch);
    }
    return any;
  }

 private:
  static void logThrown(const std::exception_ptr& exception) noexcept;

  static constexpr size_t kKept = 1024; // tasks; a burst of more gives its memory back

  std::mutex mutex_; ///< guards waiting_
  std::vector<Task> waiting_;
  std::vector<Task> spare_; ///< the taker's, empty
  std::atomic<bool> any_{false};
};

} // namespace pycomm
