#include "engine/loop/event_loop.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <future>
#include <utility>

#include "base/error.h"
#include "base/native_thread.h"
#include "transport/socket_error.h"

namespace pycomm {
namespace {

constexpr uint64_t kWakeup = ~uint64_t{0};
// A bound on one sleep, so that a lost wake-up (a bug) shows as a delay and not as a hang.
constexpr int kLongestPollMs = 1000;
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
    : epoll_(UniqueFd::from([] { return ::epoll_create1(EPOLL_CLOEXEC); })),
      wakeup_(UniqueFd::from([] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })) {
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
  thread_ = startNativeThread(thread_name, [this] { threadMain(); });
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
  if (!loop_mutex_.try_lock()) { // the thread is in the middle of a round, and may have looked for tasks already
    driven_.store(false, std::memory_order_seq_cst);
    nudge();
    return;
  }
  const bool idle = busy_.load(std::memory_order_relaxed) == 0; // else others would wait for the thread's grace
  tasks_.runAll();
  runDue();
  endDrive(patient && idle);
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

bool EventLoop::beginDrive() {
  if (ended_.load(std::memory_order_seq_cst) || driven_.exchange(true, std::memory_order_seq_cst)) {
    return false;
  }
  drives_.fetch_add(1, std::memory_order_relaxed);
  loop_mutex_.lock(); // the loop's thread unlocks it after each round
  return true;
}

void EventLoop::endDrive(bool patient) noexcept {
  // A driver that polled a shared ring has left it marked "the reader is awake", so writers do not wake anybody. If the loop's thread
  // sleeps in poll(), nobody would wake it: signal it. After its grace it marks the rings again, and reads the deadlines, of which one
  // may be new.
  const bool unrest = thread_rests_.load(std::memory_order_seq_cst) &&
      (patient || std::any_of(tickers_.begin(), tickers_.end(), [](const Ticker* ticker) {
                        return ticker != nullptr && ticker->sharesMemory();
                      }));
  loop_mutex_.unlock();
  last_driven_ns_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  driven_.store(false, std::memory_order_seq_cst);
  // After a long drive only: it would cost each small operation a system call.
  if (tell_.load(std::memory_order_seq_cst)) {
    const std::lock_guard<std::mutex> lock(park_mutex_);
    park_.notify_one();
  }
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
    Ticker::Look one = Ticker::Look::Nothing;
    if (tickers_[i] != nullptr) {
      guarded(*tickers_[i], [&] { one = tickers_[i]->look(); });
    }
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
    if (tickers_[i] != nullptr) {
      guarded(*tickers_[i], [&] { moved = tickers_[i]->pollShared() || moved; });
    }
  }
  return moved;
}

bool EventLoop::restAll() noexcept {
  return std::all_of(
      tickers_.begin(), tickers_.end(), [](Ticker* ticker) { return ticker == nullptr || ticker->restShared(); });
}

bool EventLoop::spin(std::chrono::microseconds longest) noexcept {
  const bool slow = slow_turns_ >= kSlowTurns;
  const bool crowded = this->crowded();
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
  watches_[fd] = Watch{&handler, serial}; // first: the kernel must not report a descriptor that nobody can be told of
  if (::epoll_ctl(epoll_.get(), op, fd, &event) != 0) {
    const int error_number = errno;
    watches_.erase(fd);
    throwErrno("epoll_ctl", error_number);
  }
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
  return Deadline::at(next).remainingMs(kLongestPollMs);
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
      Handler& handler = *found->second.handler;
      guarded(handler, [&] { handler.onReady(event.events); });
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
      Ticker& ticker = *tickers_[i];
      guarded(ticker, [&] { ticker.tick(now); });
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
  uint64_t drive = 0; // the one that went on when this thread last looked
  while (!unpark_ && !stopping_.load() && (driven_.load() || recentlyDriven())) {
    const uint64_t now = drives_.load(std::memory_order_relaxed);
    const bool long_drive = std::exchange(drive, now) == now;
    // Pairs with endDrive(): either this thread sees that the driver has left, or the driver sees that it is to say so.
    tell_.store(long_drive, std::memory_order_seq_cst);
    if (!long_drive || !driven_.load(std::memory_order_seq_cst)) {
      park_.wait_for(lock, kGrace);
    } else {
      park_.wait_for(lock, std::chrono::milliseconds(kLongestPollMs));
    }
  }
  tell_.store(false, std::memory_order_relaxed);
  unpark_ = false;
}

void EventLoop::threadMain() noexcept {
  while (!stopping_.load() || !tasks_.empty()) {
    thread_sleeps_.store(true, std::memory_order_seq_cst);
    park();
    int timeout_ms = 0;
    {
      const std::lock_guard<std::mutex> lock(loop_mutex_);
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
      // Without the lock, so that a caller can drive; only looks, so that the driver finds the events.
      pollfd ready{epoll_.get(), POLLIN, 0};
      ::poll(&ready, 1, timeout_ms);
    }
    thread_rests_.store(false, std::memory_order_seq_cst);
    thread_sleeps_.store(false, std::memory_order_seq_cst);
  }
}

} // namespace pycomm
