#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/loop/task.h"

namespace pycomm {

/// Many threads put tasks in, one takes them out, in order. The lock is held for a few instructions, never while a task runs; memory
/// is kept, so that a steady state allocates nothing.
class TaskQueue {
 public:
  /// A task that another thread waits for. It lies in that thread's stack, so the queue needs no memory for it.
  class Awaited {
   public:
    explicit Awaited(const std::function<void()>& task) noexcept : task_(task) {}
    Awaited(const Awaited&) = delete;
    Awaited& operator=(const Awaited&) = delete;

    /// Once it has run. Throws what the task has thrown.
    void wait() {
      std::unique_lock<std::mutex> lock(mutex_);
      has_run_.wait(lock, [this] { return ran_; });
      if (thrown_) {
        std::rethrow_exception(thrown_);
      }
    }

   private:
    friend class TaskQueue;
    void run() noexcept {
      try {
        task_();
      } catch (...) {
        thrown_ = std::current_exception();
      }
      const std::lock_guard<std::mutex> lock(mutex_); // until it is let go, the thread that waits does not end this
      ran_ = true;
      has_run_.notify_one();
    }

    const std::function<void()>& task_;
    Awaited* next_ = nullptr; ///< the queue's
    std::exception_ptr thrown_;
    std::mutex mutex_; ///< guards ran_
    std::condition_variable has_run_;
    bool ran_ = false;
  };

  /// After wait() has returned, the task may go.
  void push(Awaited& task) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    (last_awaited_ == nullptr ? awaited_ : last_awaited_->next_) = &task;
    last_awaited_ = &task;
    any_.store(true, std::memory_order_seq_cst);
  }
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

  /// Runs everything that was in the queue when called, those that are awaited last; true if there was something. A task may call it
  /// again. A task that throws is logged, and the next one runs.
  bool runAll() {
    if (empty()) {
      return false;
    }
    std::vector<Task> batch = std::exchange(spare_, {});
    Awaited* awaited = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      batch.swap(waiting_);
      awaited = std::exchange(awaited_, nullptr);
      last_awaited_ = nullptr;
      any_.store(false, std::memory_order_seq_cst);
    }
    const bool any = !batch.empty() || awaited != nullptr;
    for (Task& task : batch) {
      Task now(std::move(task)); // what it holds is let go as soon as it has run
      try {
        now();
      } catch (...) {
        logThrown(std::current_exception());
      }
    }
    while (awaited != nullptr) {
      std::exchange(awaited, awaited->next_)->run();
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

  std::mutex mutex_; ///< guards the next three
  std::vector<Task> waiting_;
  Awaited* awaited_ = nullptr; ///< the first; each has the next
  Awaited* last_awaited_ = nullptr;
  std::vector<Task> spare_; ///< the taker's, empty
  std::atomic<bool> any_{false};
};

} // namespace pycomm
