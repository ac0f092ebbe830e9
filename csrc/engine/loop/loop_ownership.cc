#include "engine/loop/loop_ownership.h"

#include <chrono>
#include <utility>

#include "base/deadline.h"

namespace pycomm {
namespace {

constexpr std::chrono::milliseconds kGrace{1};

} // namespace

bool LoopOwnership::take() {
  if (driven_.exchange(true, std::memory_order_seq_cst)) {
    return false;
  }
  drives_.fetch_add(1, std::memory_order_relaxed);
  mutex_.lock(); // the own thread unlocks it after each round
  return true;
}

bool LoopOwnership::takeIfFree() noexcept {
  if (driven_.exchange(true, std::memory_order_seq_cst)) {
    return false;
  }
  if (!mutex_.try_lock()) {
    driven_.store(false, std::memory_order_seq_cst);
    return false;
  }
  return true;
}

void LoopOwnership::release() noexcept {
  mutex_.unlock();
  last_driven_ns_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  driven_.store(false, std::memory_order_seq_cst);
  // After a long drive only: it would cost each small operation a system call.
  if (notify_.load(std::memory_order_seq_cst)) {
    const std::lock_guard<std::mutex> lock(park_mutex_);
    park_.notify_one();
  }
}

void LoopOwnership::wakeOwner() noexcept {
  if (driven_.load(std::memory_order_seq_cst)) {
    if (driver_sleeps_.load(std::memory_order_seq_cst)) {
      epoll_.signal();
    }
  } else if (threadSleeps()) {
    wakeThread();
  }
}

void LoopOwnership::wakeThread() noexcept {
  {
    const std::lock_guard<std::mutex> lock(park_mutex_);
    unpark_ = true;
  }
  park_.notify_one();
  epoll_.signal();
}

void LoopOwnership::park(const std::atomic<bool>& stopping) noexcept {
  const auto recentlyDriven = [&] {
    const auto last = std::chrono::nanoseconds(last_driven_ns_.load(std::memory_order_relaxed));
    return Clock::now().time_since_epoch() - last < kGrace;
  };
  std::unique_lock<std::mutex> lock(park_mutex_);
  uint64_t drive = 0; // the one that went on when this thread last looked
  while (!unpark_ && !stopping.load() && (driven_.load() || recentlyDriven())) {
    const uint64_t now = drives_.load(std::memory_order_relaxed);
    const bool long_drive = std::exchange(drive, now) == now;
    // Pairs with release(): either this thread sees that the driver has left, or the driver sees that it is to notify.
    notify_.store(long_drive, std::memory_order_seq_cst);
    if (!long_drive || !driven_.load(std::memory_order_seq_cst)) {
      park_.wait_for(lock, kGrace);
    } else {
      park_.wait_for(lock, std::chrono::milliseconds(kLongestSleepMs));
    }
  }
  notify_.store(false, std::memory_order_relaxed);
  unpark_ = false;
}

} // namespace pycomm
