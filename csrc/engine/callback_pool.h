#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/deadline.h"

namespace pycomm {

/// Runs what users hang on futures. Never on a lane: a callback may take a lock (Python's), run for seconds, or wait for
/// another operation, which only a lane can complete.
///
/// Grows by a thread whenever a task comes and every thread is busy: a callback may wait for a future whose own callback is
/// still in this queue (torch's PowerSGD hook does), so a bounded pool would hang. Threads stay for the process's life.
class CallbackPool {
 public:
  using Task = std::function<void()>;

  CallbackPool() = default;
  ~CallbackPool();
  CallbackPool(const CallbackPool&) = delete;
  CallbackPool& operator=(const CallbackPool&) = delete;

  /// Any thread, also a lane. Never blocks. What a task throws is dropped: its owner catches what matters.
  void submit(Task task);

  /// Runs what is queued, takes nothing new, joins all threads that end by the deadline. False if one did not; it is then left
  /// to the process's end (a callback of the user's that never returns cannot be joined).
  bool stop(Deadline deadline);

 private:
  void threadMain() noexcept;

  std::mutex mutex_; ///< guards all below
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  size_t running_ = 0; ///< threads that have not left threadMain
  bool stopping_ = false;
};

} // namespace pycomm
