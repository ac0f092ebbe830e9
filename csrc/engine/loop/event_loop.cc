#include "engine/loop/event_loop.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/native_thread.h"

namespace pycomm {
namespace {

constexpr int kLooksBeforeAll = 8;
// After so many sleeps in a row that outlasted a spin, what a driver waits for comes at the pace of a link. To poll for that
// would only burn a core that somebody may compute on.
constexpr int kSlowTurns = 4;

} // namespace

EventLoop::EventLoop(const std::string& thread_name) {
  thread_ = startNativeThread(thread_name, [this] { threadMain(); });
}

EventLoop::~EventLoop() {
  stop();
}

void EventLoop::stop() noexcept {
  if (stopping_.exchange(true)) {
    return;
  }
  ownership_.wakeThread();
  thread_.join();
  ended_.store(true, std::memory_order_seq_cst);
  const std::lock_guard<std::recursive_mutex> lock(ended_mutex_);
  tasks_.runAll();
}

void EventLoop::post(Task task) {
  tasks_.push(std::move(task));
  nudge();
}

void EventLoop::postHere(Task task, bool patient) {
  tasks_.push(std::move(task));
  if (ended() || !ownership_.takeIfFree()) { // the owner may have looked for tasks already
    nudge();
    return;
  }
  const bool idle = busy_.load(std::memory_order_relaxed) == 0; // else others would wait for the thread's grace
  tasks_.runAll();
  tickers_.tick(Clock::now());
  leave(patient && idle ? After::ThreadSoon : After::Thread);
}

void EventLoop::poll() noexcept {
  if (ended() || !ownership_.takeIfFree()) {
    nudge();
    return;
  }
  dispatch(0);
  leave(After::Caller);
}

void EventLoop::nudge() noexcept {
  ownership_.wakeOwner();
  if (ended()) {
    const std::lock_guard<std::recursive_mutex> lock(ended_mutex_);
    tasks_.runAll();
  }
}

void EventLoop::run(const std::function<void()>& task) {
  TaskQueue::Awaited awaited(task);
  tasks_.push(awaited);
  nudge();
  awaited.wait();
}

void EventLoop::discard(std::shared_ptr<const void> memory) noexcept {
  try {
    if (discards_on_ != nullptr) {
      static_cast<void>(discards_on_->submit([memory = std::move(memory)] {}));
    }
  } catch (const std::bad_alloc&) { // then here
  }
}

void EventLoop::leave(After after) noexcept {
  // A driver that polled a shared ring has left it marked "the reader is awake", so writers do not wake anybody. If the loop's thread
  // sleeps in poll(), nobody would wake it: signal it. After its grace it marks the rings again, and reads the deadlines. So it is if one of
  // them is new, and earlier than the end of its sleep.
  const bool unrest = ownership_.threadRests() &&
      (after == After::ThreadSoon || tickers_.sharesMemory() ||
       tickers_.nextTick() < rests_until_.load(std::memory_order_seq_cst));
  ownership_.release();
  if (unrest) {
    epoll_.signal();
  }
  // Who posted before release() may have counted on us; who posts after it wakes the thread.
  const int of_callers = after == After::Caller ? 1 : 0; // what it polls for; others have nobody who comes back
  const bool works = after != After::ThreadSoon && busy_.load(std::memory_order_relaxed) > of_callers;
  if ((!tasks_.empty() || works || stopping_.load()) && ownership_.threadSleeps()) {
    ownership_.wakeThread();
  }
}

bool EventLoop::spin(std::chrono::microseconds longest) noexcept {
  const bool slow = slow_turns_ >= kSlowTurns;
  const bool crowded = this->crowded();
  const TimePoint until = Clock::now() + longest;
  for (;;) {
    // What nobody looks for must be seen, too: room to write, connections, frames of other peers.
    const bool all = ++looks_ % kLooksBeforeAll == 0;
    const Ticker::Look looked = all ? Ticker::Look::NotYet : tickers_.look();
    if (looked == Ticker::Look::Moved || tickers_.pollShared()) {
      tickers_.tick(Clock::now());
      return true;
    }
    if (slow && looked == Ticker::Look::Nothing) {
      return false; // the sleep asks the kernel, too
    }
    if (((all || looked == Ticker::Look::Nothing) && dispatch(0)) || !tasks_.empty()) {
      return true;
    }
    if ((crowded && looked == Ticker::Look::Nothing) || Clock::now() >= until) {
      return false;
    }
    // The scheduler likes to put two processes that talk on one core: then the peer needs it to answer.
    std::this_thread::yield();
  }
}

void EventLoop::turn(Deadline deadline) noexcept {
  if (!tasks_.empty()) {
    tasks_.runAll(); // what they send may be answered before the kernel need be asked
    tickers_.tick(Clock::now());
    return;
  }
  if (tickers_.haveWork()) {
    dispatch(0);
    return;
  }
  const int spin_us = spin_us_.load(std::memory_order_relaxed);
  if (spin_us > 0 && spin(std::chrono::microseconds(spin_us))) {
    return;
  }
  const bool rests = tickers_.restShared();
  ownership_.setDriverSleeps(true);
  const TimePoint slept = Clock::now();
  dispatch(rests && tasks_.empty() ? deadline.remainingMs(sleepMs()) : 0);
  const bool outlasted = Clock::now() - slept > std::chrono::microseconds(spin_us);
  slow_turns_ = outlasted ? std::min(slow_turns_ + 1, kSlowTurns) : 0;
}

int EventLoop::sleepMs() const noexcept {
  if (!tasks_.empty() || stopping_.load()) {
    return 0;
  }
  return Deadline::at(tickers_.nextTick()).remainingMs(kLongestSleepMs);
}

bool EventLoop::dispatch(int timeout_ms) noexcept {
  EpollSet::Ready ready;
  epoll_.wait(ready, timeout_ms);
  ownership_.setDriverSleeps(false);
  epoll_.handle(ready);
  const bool polled = tickers_.pollShared();
  const bool ran = tasks_.runAll();
  const bool ticked = tickers_.tick(Clock::now());
  return ready.count > 0 || polled || ran || ticked;
}

void EventLoop::threadMain() noexcept {
  while (!stopping_.load() || !tasks_.empty()) {
    ownership_.setThreadSleeps(true);
    ownership_.park(stopping_);
    int timeout_ms = 0;
    ownership_.runRound([&] {
      dispatch(0);
      const TimePoint longest = Clock::now() + std::chrono::milliseconds(kLongestSleepMs);
      rests_until_.store(std::min(longest, tickers_.nextTick()), std::memory_order_seq_cst);
      timeout_ms = sleepMs();
      if (timeout_ms > 0 && !tickers_.restShared()) {
        timeout_ms = 0;
      }
      ownership_.setThreadRests(timeout_ms > 0);
    });
    if (timeout_ms > 0 && tasks_.empty() && !stopping_.load()) {
      // Not as the owner, so that a caller can drive; only looks, so that the driver finds the events.
      epoll_.sleep(timeout_ms);
    }
    ownership_.setThreadRests(false);
    ownership_.setThreadSleeps(false);
  }
}

} // namespace pycomm
