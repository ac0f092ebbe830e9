#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "engine/task_queue.h"

namespace pycomm {

/// A thread that sleeps in epoll and owns what it watches. Both kinds of native thread are one of these: a lane moves bulk
/// bytes, the control loop carries heartbeats and error reports.
///
/// Everything but `post`, `run`, `inLoop` and the constructor belongs to the loop's thread. Tasks and handlers must not throw.
class EventLoop {
 public:
  /// Told when its descriptor is ready.
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void onReady(uint32_t events) noexcept = 0;
  };

  /// Told when time has passed.
  class Ticker {
   public:
    virtual ~Ticker() = default;
    /// When `tick` wants to be called next; TimePoint::max() for never.
    [[nodiscard]] virtual TimePoint nextTick() const noexcept = 0;
    virtual void tick(TimePoint now) noexcept = 0;
  };

  /// Throws Error(TooManyFiles | SystemError).
  explicit EventLoop(const std::string& thread_name);
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// Runs `task` on the loop's thread, soon. Any thread; no lock; a system call only if the loop sleeps.
  void post(TaskQueue::Task task);

  /// Runs what was posted, then joins the thread. What is posted later runs at once on the thread that posts it. Idempotent; not on
  /// the loop's thread.
  void stop() noexcept;

  /// Posts `task` and waits until it has run. Not on the loop's thread. Exceptions travel to the caller.
  void run(const std::function<void()>& task);

  [[nodiscard]] bool inLoop() const noexcept {
    return std::this_thread::get_id() == thread_.get_id();
  }

  /// The handler outlives its watch. A second call for the same descriptor changes the events.
  void watch(int fd, uint32_t events, Handler& handler);
  void unwatch(int fd) noexcept;

  void addTicker(Ticker& ticker);
  void removeTicker(Ticker& ticker) noexcept;

 private:
  struct Watch {
    Handler* handler; ///< alive until unwatch(fd), by the contract of watch()
    uint32_t serial; ///< tells a descriptor from an earlier one of the same number
  };

  void wake() noexcept;
  void threadMain(const std::string& name) noexcept;
  [[nodiscard]] int sleepMs() const noexcept;

  UniqueFd epoll_;
  UniqueFd wakeup_;
  TaskQueue tasks_;
  std::atomic<bool> sleeping_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> ended_{false}; ///< the thread is joined
  std::recursive_mutex ended_mutex_; ///< held while tasks run after that: a task may post another
  std::unordered_map<int, Watch> watches_; ///< loop thread only
  uint32_t next_serial_ = 1;
  std::vector<Ticker*> tickers_; ///< loop thread only; each alive until removeTicker
  std::thread thread_;
};

} // namespace pycomm
