#include "engine/event_loop.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <exception>
#include <future>
#include <system_error>

#include "base/error.h"
#include "base/fault_point.h"
#include "transport/socket_error.h"

namespace pycomm {
namespace {

constexpr uint64_t kWakeup = ~uint64_t{0};
// A bound on one sleep, so that a lost wake-up (a bug) shows as a delay and not as a hang.
constexpr int kLongestSleepMs = 1000;
constexpr std::chrono::milliseconds kGrace{1};
constexpr int kLooksBeforeAll = 8;
// After so many sleeps in a row that outlasted a spin, what a driver waits for comes at the pace of a link. To poll for that
// would only burn a core that somebody may compute on.
constexpr int kSlowTurns = 4;

[[noreturn]] void throwErrno(const char* call, int error_number) {
  const std::string summary = std::string("an event loop could not be set up: ") + call + " failed";
  throw Error(systemError(ErrorCode::SystemError, summary, error_number));
}

} // namespace

EventLoop::EventLoop(const std::string& thread_name)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), wakeup_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_) {
    throwErrno("epoll_create1", errno);
  }
  if (!wakeup_) {
    throwErrno("eventfd", errno);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeup;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wakeup_.get(), &event) != 0) {
    throwErrno("epoll_ctl", errno);
  }
  // Signals belong to the interpreter's threads: a handler that ran here would touch Python from a native thread.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    const Fault fault = PYCOMM_FAULT("thread.start");
    if (fault.error_number != 0) {
      throw std::system_error(fault.error_number, std::generic_category());
    }
    thread_ = std::thread([this, thread_name] { threadMain(thread_name); });
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ErrorRecord record;
    record.code = ErrorCode::SystemError;
    record.summary = "this process could not start a thread, " + thread_name;
    record.cause = errnoText(error.code().value());
    record.hint = "raise the limit on processes and threads (ulimit -u, or pids.max of the container)";
    throw Error(record);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

EventLoop::~EventLoop() {
  stop();
}

void EventLoop::stop() noexcept {
  if (stopping_.exchange(true)) {
    return;
  }
  wakeThread();
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
  if (ended_.load(std::memory_order_seq_cst) || driven_.exchange(true, std::memory_order_seq_cst)) {
    nudge();
    return;
  }
  if (!baton_.try_lock()) { // the thread is in the middle of a round, and may have looked for tasks already
    driven_.store(false, std::memory_order_seq_cst);
    nudge();
    return;
  }
  const bool idle = busy_.load(std::memory_order_relaxed) == 0; // else others would wait for the thread's grace
  tasks_.runAll();
  runDue();
  giveBaton(patient && idle);
}

void EventLoop::nudge() noexcept {
  // Pairs with every "say that I sleep, then look for tasks once more" below: the queue's push and look and the flags' stores and
  // loads are all sequentially consistent, so one of the two sides sees the other.
  if (driven_.load(std::memory_order_seq_cst)) {
    if (driver_sleeps_.load(std::memory_order_seq_cst)) {
      signalEventFd();
    }
  } else if (thread_sleeps_.load(std::memory_order_seq_cst)) {
    wakeThread();
  }
  if (ended_.load(std::memory_order_seq_cst)) {
    const std::lock_guard<std::recursive_mutex> lock(ended_mutex_);
    tasks_.runAll();
  }
}

void EventLoop::run(const std::function<void()>& task) {
  std::promise<void> done;
  post([&] {
    try {
      task();
      done.set_value();
    } catch (...) {
      done.set_exception(std::current_exception());
    }
  });
  done.get_future().get();
}

void EventLoop::signalEventFd() noexcept {
  const uint64_t one = 1;
  // Cannot fail in a way that matters: a full counter means that a wake-up is pending already.
  [[maybe_unused]] const ssize_t written = ::write(wakeup_.get(), &one, sizeof one);
}

void EventLoop::wakeThread() noexcept {
  {
    const std::lock_guard<std::mutex> lock(park_mutex_);
    unpark_ = true;
  }
  park_.notify_one();
  signalEventFd();
}

bool EventLoop::takeBaton() {
  if (ended_.load(std::memory_order_seq_cst) || driven_.exchange(true, std::memory_order_seq_cst)) {
    return false;
  }
  baton_.lock(); // the loop's thread gives it back after each round
  return true;
}

void EventLoop::giveBaton(bool patient) noexcept {
  // Whoever reads from shared memory counts as awake there, and this driver reads no more. The thread, where it sleeps and counts on
  // being woken, has to say so again: after its grace, not at once. And it knows of no deadline that is new.
  const bool unrest = thread_rests_.load(std::memory_order_seq_cst) &&
      (patient || std::any_of(tickers_.begin(), tickers_.end(), [](const Ticker* ticker) {
                        return ticker != nullptr && ticker->sharesMemory();
                      }));
  baton_.unlock();
  last_driven_ns_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  driven_.store(false, std::memory_order_seq_cst);
  if (unrest) {
    signalEventFd();
  }
  // Who posted before this store may have counted on us; who posts after it wakes the thread.
  const bool works = !patient && busy_.load(std::memory_order_relaxed) > 0;
  if ((!tasks_.empty() || works || stopping_.load()) && thread_sleeps_.load(std::memory_order_seq_cst)) {
    wakeThread();
  }
}

Loop::Ticker::Look EventLoop::lookOnce() noexcept {
  Ticker::Look all = Ticker::Look::Nothing;
  for (size_t i = 0; i < tickers_.size(); ++i) {
    const Ticker::Look one = tickers_[i] == nullptr ? Ticker::Look::Nothing : tickers_[i]->look();
    if (one == Ticker::Look::Moved) {
      return one;
    }
    all = one == Ticker::Look::NotYet ? one : all;
  }
  return all;
}

bool EventLoop::pollAll() noexcept {
  bool moved = false;
  for (size_t i = 0; i < tickers_.size(); ++i) {
    moved = (tickers_[i] != nullptr && tickers_[i]->pollShared()) || moved;
  }
  return moved;
}

bool EventLoop::restAll() noexcept {
  return std::all_of(
      tickers_.begin(), tickers_.end(), [](Ticker* ticker) { return ticker == nullptr || ticker->restShared(); });
}

bool EventLoop::spin(std::chrono::microseconds longest) noexcept {
  const bool slow = slow_turns_ >= kSlowTurns;
  const bool crowded = crowded_.load(std::memory_order_relaxed);
  const TimePoint until = Clock::now() + longest;
  for (;;) {
    // What nobody looks for must be seen, too: room to write, connections, frames of other peers.
    const bool all = ++looks_ % kLooksBeforeAll == 0;
    const Ticker::Look looked = all ? Ticker::Look::NotYet : lookOnce();
    if (looked == Ticker::Look::Moved || pollAll()) {
      runDue();
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
    runDue();
    return;
  }
  const int spin_us = spin_us_.load(std::memory_order_relaxed);
  if (spin_us > 0 && spin(std::chrono::microseconds(spin_us))) {
    return;
  }
  const bool rests = restAll();
  driver_sleeps_.store(true, std::memory_order_seq_cst);
  const TimePoint slept = Clock::now();
  dispatch(rests && tasks_.empty() ? deadline.remainingMs(sleepMs()) : 0);
  const bool outlasted = Clock::now() - slept > std::chrono::microseconds(spin_us);
  slow_turns_ = outlasted ? std::min(slow_turns_ + 1, kSlowTurns) : 0;
}

void EventLoop::watch(int fd, uint32_t events, Handler& handler) {
  const auto found = watches_.find(fd);
  const int op = found == watches_.end() ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  const uint32_t serial = found == watches_.end() ? next_serial_++ : found->second.serial;
  epoll_event event{};
  event.events = events;
  event.data.u64 = (uint64_t{serial} << 32) | static_cast<uint32_t>(fd);
  if (::epoll_ctl(epoll_.get(), op, fd, &event) != 0) {
    throwErrno("epoll_ctl", errno);
  }
  watches_[fd] = Watch{&handler, serial};
}

void EventLoop::unwatch(int fd) noexcept {
  if (watches_.erase(fd) != 0) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
}

void EventLoop::addTicker(Ticker& ticker) {
  tickers_.push_back(&ticker);
}

void EventLoop::removeTicker(Ticker& ticker) noexcept {
  // Not erased: tick() may be walking the list right now. threadMain sweeps the holes.
  std::replace(tickers_.begin(), tickers_.end(), &ticker, static_cast<Ticker*>(nullptr));
}

int EventLoop::sleepMs() const noexcept {
  if (!tasks_.empty() || stopping_.load()) {
    return 0;
  }
  TimePoint next = TimePoint::max();
  for (const Ticker* ticker : tickers_) {
    if (ticker != nullptr) {
      next = std::min(next, ticker->nextTick());
    }
  }
  return Deadline::at(next).remainingMs(kLongestSleepMs);
}

bool EventLoop::dispatch(int timeout_ms) noexcept {
  std::array<epoll_event, 64> events{};
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  driver_sleeps_.store(false, std::memory_order_seq_cst);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kWakeup) {
      uint64_t ignored = 0;
      [[maybe_unused]] const ssize_t got = ::read(wakeup_.get(), &ignored, sizeof ignored);
      continue;
    }
    // An earlier handler of this round may have unwatched this one, and another may have got its descriptor.
    const auto found = watches_.find(static_cast<int>(event.data.u64 & 0xffffffffU));
    if (found != watches_.end() && found->second.serial == static_cast<uint32_t>(event.data.u64 >> 32)) {
      found->second.handler->onReady(event.events);
    }
  }
  const bool polled = pollAll();
  tasks_.runAll();
  runDue();
  return count > 0 || polled;
}

void EventLoop::runDue() noexcept {
  const TimePoint now = Clock::now();
  for (size_t i = 0; i < tickers_.size(); ++i) {
    if (tickers_[i] != nullptr && tickers_[i]->nextTick() <= now) {
      tickers_[i]->tick(now);
    }
  }
  tickers_.erase(std::remove(tickers_.begin(), tickers_.end(), nullptr), tickers_.end());
}

void EventLoop::park() noexcept {
  const auto recentlyDriven = [&] {
    const auto last = std::chrono::nanoseconds(last_driven_ns_.load(std::memory_order_relaxed));
    return Clock::now().time_since_epoch() - last < kGrace;
  };
  std::unique_lock<std::mutex> lock(park_mutex_);
  while (!unpark_ && !stopping_.load() && (driven_.load() || recentlyDriven())) {
    park_.wait_for(lock, kGrace);
  }
  unpark_ = false;
}

void EventLoop::threadMain(const std::string& name) noexcept {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  while (!stopping_.load() || !tasks_.empty()) {
    thread_sleeps_.store(true, std::memory_order_seq_cst);
    park();
    int timeout_ms = 0;
    {
      const std::lock_guard<std::mutex> baton(baton_);
      if (!driven_.load(std::memory_order_seq_cst)) {
        dispatch(0);
        timeout_ms = sleepMs();
        if (timeout_ms > 0 && !restAll()) {
          timeout_ms = 0;
        }
        thread_rests_.store(timeout_ms > 0, std::memory_order_seq_cst);
      }
    }
    if (timeout_ms > 0 && tasks_.empty() && !stopping_.load()) {
      // Without the baton, so that a driver can take it; only looks, so that the driver finds the events.
      pollfd ready{epoll_.get(), POLLIN, 0};
      ::poll(&ready, 1, timeout_ms);
    }
    thread_rests_.store(false, std::memory_order_seq_cst);
    thread_sleeps_.store(false, std::memory_order_seq_cst);
  }
}

} // namespace pycomm
