#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "engine/loop/callback_pool.h"
#include "engine/loop/epoll_set.h"
#include "engine/loop/loop.h"
#include "engine/loop/loop_ownership.h"
#include "engine/loop/task_queue.h"
#include "engine/loop/tickers.h"

namespace pycomm {

/// An event loop with a thread of its own. A process has two: the data loop moves bulk bytes, the control loop carries heartbeats and error
/// reports.
///
/// A thread that waits for something which the loop will do can do the loop's work itself meanwhile (`drive`): no thread switch
/// stands between the bytes and the waiter. One thread at a time owns the loop (LoopOwnership): only that thread runs tasks, handlers
/// and tickers. While callers drive, the loop's own thread is parked. If there is work that nobody drives, it is woken at once.
///
/// Only the owner may call watch, unwatch, addTicker and removeTicker; any thread may call the other public functions. An exception from a
/// handler, a ticker or an owned task goes to its owner; one from a task without an owner is logged.
class EventLoop final : public TaskLoop {
 public:
  /// Throws Error(TooManyFiles | SystemError).
  explicit EventLoop(const std::string& thread_name);
  ~EventLoop() override;
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  /// A system call only if the loop sleeps.
  void post(Task task) override;

  /// Runs the posted tasks, then joins the thread. A task that is posted later runs at once on the thread that posts it. Idempotent.
  /// Not on the loop's thread.
  void stop() noexcept;
  /// Nothing ticks any more.
  [[nodiscard]] bool ended() const noexcept {
    return ended_.load(std::memory_order_seq_cst);
  }

  /// Has the loop run `task`, after those that this thread has posted, and waits until it has. Not on the loop's thread. Exceptions travel to
  /// the caller. Takes no memory of its own.
  void run(const std::function<void()>& task);

  /// Like post, but wakes nobody: the caller will drive(), or nudge(). Otherwise the task runs up to 1 ms later.
  void postQuietly(Task task) {
    tasks_.push(std::move(task));
  }

  /// Like post, for a caller that will most likely drive() next. If no other thread owns the loop, the task runs here and now:
  /// waking the loop's thread, which would then compete for the loop, costs more than a small operation. If the task leaves work behind,
  /// the thread is woken to finish it. With `patient` (a task that can only wait for other ranks) it is not woken, and looks within 1 ms.
  void postHere(Task task, bool patient);

  /// Does the loop's work on the calling thread until `done()` or the deadline. False if another thread drives already: then
  /// something else must be waited for. Not with a lock held that a task or handler takes.
  template <typename Done>
  bool drive(const Done& done, Deadline deadline) {
    if (ended() || !ownership_.take()) {
      return false;
    }
    while (!done() && !deadline.expired()) {
      turn(deadline);
    }
    leave();
    return true;
  }
  /// Does what the loop has to do now on the calling thread, without waiting, if no other thread owns the loop; else makes sure that the owner
  /// sees what was posted quietly. Wakes the loop's thread only if more than one operation is under way (addBusy). For the caller of one, who will
  /// come back, or drive().
  void poll() noexcept;
  /// Makes sure that what was posted quietly is seen.
  void nudge() noexcept;

  /// How long a driver polls before it sleeps.
  void setSpin(std::chrono::microseconds spin) noexcept {
    spin_us_.store(static_cast<int>(spin.count()), std::memory_order_relaxed);
  }
  /// Counts the groups that have more ranks on this host than this process may use cores: +1 when one begins, -1 when it ends. While
  /// there are some, a driver polls only for what a ticker looks for, which is small and soon there, and leaves its core to the other
  /// ranks for all else.
  void addCrowded(int change) noexcept {
    crowded_.fetch_add(change, std::memory_order_relaxed);
  }
  [[nodiscard]] bool crowded() const noexcept {
    return crowded_.load(std::memory_order_relaxed) > 0;
  }
  void addBusy(int change) noexcept override {
    busy_.fetch_add(change, std::memory_order_relaxed);
  }
  /// Before the loop has anything to do: what it discards is released there. The pool outlives all that the loop runs.
  void discardOn(CallbackPool& pool) noexcept {
    discards_on_ = &pool;
  }
  void discard(std::shared_ptr<const void> memory) noexcept override;

  void watch(int fd, uint32_t events, Handler& handler) override {
    epoll_.watch(fd, events, handler);
  }
  void unwatch(int fd) noexcept override {
    epoll_.unwatch(fd);
  }

  void addTicker(Ticker& ticker) override {
    tickers_.add(ticker);
  }
  void removeTicker(Ticker& ticker) noexcept override {
    tickers_.remove(ticker);
  }

 private:
  /// The thread that goes on when a caller leaves the loop.
  enum class After {
    Thread, ///< the loop's own, at once
    ThreadSoon, ///< the same within 1 ms
    Caller, ///< it comes back for the one operation it has; the loop's own at once if there are more
  };
  void leave(After after = After::Thread) noexcept;
  /// One round of a driver: waits for something to do, and does it.
  void turn(Deadline deadline) noexcept;
  /// Polls for a while; whether there was something.
  bool spin(std::chrono::microseconds longest) noexcept;
  /// Waits for events, at most so long, and handles them, what was posted, and what is due. Whether there was any of it: a driver looks
  /// then whether what it waits for is done, before it sleeps.
  bool dispatch(int timeout_ms) noexcept;
  void threadMain() noexcept;
  [[nodiscard]] int sleepMs() const noexcept;

  EpollSet epoll_;
  TaskQueue tasks_;
  LoopOwnership ownership_{epoll_};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> ended_{false}; ///< the thread is joined
  std::recursive_mutex ended_mutex_; ///< held while tasks run after that: a task may post another
  std::atomic<int> busy_{0};
  std::atomic<int> spin_us_{0};
  std::atomic<int> crowded_{0};
  std::atomic<TimePoint> rests_until_{TimePoint::max()}; ///< the timer, or the bound, that ends the thread's sleep
  CallbackPool* discards_on_ = nullptr;

  // The owner's:
  Tickers tickers_;
  int looks_ = 0; ///< since the kernel was asked about all descriptors
  int slow_turns_ = 0; ///< sleeps in a row that outlasted a spin
  std::thread thread_;
};

} // namespace pycomm
