#include "engine/callback_pool.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace pycomm {

CallbackPool::~CallbackPool() {
  stop(Deadline::never());
}

void CallbackPool::submit(Task task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) {
    return;
  }
  tasks_.push_back(std::move(task));
  if (idle_ >= tasks_.size()) {
    changed_.notify_one();
    return;
  }
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  ++running_;
  threads_.emplace_back([this] { threadMain(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool CallbackPool::stop(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  const auto all_left = [&] { return running_ == 0; };
  if (deadline.isNever()) {
    changed_.wait(lock, all_left);
  } else if (!changed_.wait_until(lock, deadline.instant(), all_left)) {
    for (std::thread& thread : threads_) {
      thread.detach();
    }
    threads_.clear();
    return false;
  }
  for (std::thread& thread : threads_) {
    thread.join(); // it has left threadMain's last lock, so this does not wait
  }
  threads_.clear();
  return true;
}

void CallbackPool::threadMain() noexcept {
  pthread_setname_np(pthread_self(), "pycomm-callback");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
    --idle_;
    if (tasks_.empty()) {
      break;
    }
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task();
    } catch (...) { // see submit()
    }
    task = nullptr; // what it holds is released before the lock is taken again
    lock.lock();
  }
  --running_;
  changed_.notify_all();
}

} // namespace pycomm
