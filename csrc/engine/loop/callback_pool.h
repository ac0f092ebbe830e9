#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"

namespace pycomm {

/// Runs what users hang on futures. Never on a data loop: a callback may take a lock (Python's), run for seconds, or wait for
/// another operation, which only a data loop can complete.
///
/// A callback may wait for a future whose own callback is still in this queue (torch's PowerSGD hook does), so a bounded pool would
/// hang. And completions come in bursts, so a thread for each task would be thousands. Therefore one thread is always idle: the last
/// idle one takes a task only if the pool has few threads, or if none of the others has taken a task for some milliseconds. Before it
/// does, it starts the next one. Threads stay until stop().
///
/// While all callbacks block, the pool has at most kAtOnce + 1 threads and those that patience() allows: 5 ms for the first, 10 ms for
/// the second, and so on up to 50 ms for each. That is 70 threads after 3 s.
class CallbackPool {
 public:
  using Task = std::function<void()>;
  /// A task with its place in the queue: to submit it takes no memory. So what has to run when an operation ends is made when that begins.
  class Placed {
   public:
    explicit Placed(Task task) {
      task_.push_back(std::move(task));
    }

   private:
    friend class CallbackPool;
    std::list<Task> task_; ///< one, or none once the pool has it
  };

  /// Starts the first thread. Throws Error(SystemError).
  CallbackPool();
  ~CallbackPool();
  CallbackPool(const CallbackPool&) = delete;
  CallbackPool& operator=(const CallbackPool&) = delete;

  /// Any thread, also a data loop. Waits for nothing and starts no thread. What a task throws is dropped: its owner catches what matters.
  /// False, and `task` is left as it was, if the pool takes no more: the engine has been shut down. Then no operation is under way, so
  /// who has promised somebody that the task runs can run it at once.
  bool submit(Placed& task) noexcept;
  /// The same of one that has no place yet. Throws std::bad_alloc.
  bool submit(Task task) {
    Placed placed(std::move(task));
    return submit(placed);
  }

  /// As submit(); if the pool takes no more, runs the task on the calling thread, which counts as one of the pool's meanwhile, until close().
  /// What the task throws leaves this then.
  void submitOrRun(Placed& task);

  /// Runs what is queued, and what that submits, such as a line of the log; takes nothing from other threads. Joins all threads, and waits
  /// for those in submitOrRun(). False if one of them, which runs a callback, has not ended by the deadline: call it again then, since a
  /// callback is not left behind.
  [[nodiscard]] bool stop(Deadline deadline);
  /// After stop(), when no event loop runs any more: waits for the last threads in submitOrRun(). From now on the pool waits for none. False
  /// if one has not returned by the deadline.
  [[nodiscard]] bool close(Deadline deadline);

  /// Whether some pool waits for what the calling thread does now: the thread is one of its own, or in submitOrRun().
  [[nodiscard]] static bool ownsThisThread() noexcept;

 private:
  /// So many callbacks block each other, or compute, without any delay.
  static constexpr size_t kAtOnce = 4;

  class Guest;

  [[nodiscard]] bool waitUntilNone(const size_t& threads, std::unique_lock<std::mutex>& lock, Deadline deadline);
  void threadMain() noexcept;
  void waitForTask(std::unique_lock<std::mutex>& lock);
  /// How long the last idle thread leaves the tasks to the others.
  [[nodiscard]] Clock::duration patience() const noexcept;
  /// Lets go of the lock meanwhile.
  void startThread(std::unique_lock<std::mutex>& lock) noexcept;

  std::mutex mutex_; ///< guards all below
  std::condition_variable changed_;
  std::list<Task> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 1; ///< threads without a task, and the one that is being started
  size_t running_ = 1; ///< threads that have not left threadMain, the one that is being started among them
  size_t guests_ = 0; ///< threads that are not the pool's, and in submitOrRun()
  TimePoint last_taken_{}; ///< when a thread last took a task
  bool stopping_ = false;
  bool closed_ = false;
  std::atomic<bool> told_{false}; ///< the user, that a thread could not be started
};

} // namespace pycomm
