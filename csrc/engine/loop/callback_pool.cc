#include "engine/loop/callback_pool.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/native_thread.h"

namespace pycomm {
namespace {

const std::string kThreadName = "pycomm-callback";
constexpr std::chrono::milliseconds kPatience{5};
constexpr size_t kMostPatient = 10; // times that

thread_local const CallbackPool* t_pool = nullptr; ///< whose thread this is
thread_local size_t t_guest = 0; ///< submitOrRun()'s around this place for which a pool waits

} // namespace

CallbackPool::CallbackPool() {
  threads_.push_back(startNativeThread(kThreadName, [this] { threadMain(); }, SignalMask::AsCaller));
}

CallbackPool::~CallbackPool() {
  static_cast<void>(stop(Deadline::never()));
}

bool CallbackPool::ownsThisThread() noexcept {
  return t_pool != nullptr || t_guest != 0;
}

/// The calling thread runs a task in the pool's place.
class CallbackPool::Guest {
 public:
  explicit Guest(CallbackPool& pool) : pool_(pool) {
    const std::lock_guard<std::mutex> lock(pool_.mutex_);
    awaited_ = !pool_.closed_;
    count(awaited_ ? 1 : 0);
  }
  ~Guest() {
    const std::lock_guard<std::mutex> lock(pool_.mutex_);
    count(awaited_ ? -1 : 0);
    pool_.changed_.notify_all();
  }
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;

 private:
  void count(int more) noexcept {
    pool_.guests_ += static_cast<size_t>(more);
    t_guest += static_cast<size_t>(more);
  }

  CallbackPool& pool_;
  bool awaited_ = false;
};

bool CallbackPool::submit(Placed& task) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_ && t_pool != this) {
    return false;
  }
  tasks_.splice(tasks_.end(), task.task_);
  changed_.notify_one();
  return true;
}

void CallbackPool::submitOrRun(Placed& task) {
  if (!submit(task)) {
    const Guest guest(*this);
    task.task_.front()();
  }
}

bool CallbackPool::waitUntilNone(const size_t& threads, std::unique_lock<std::mutex>& lock, Deadline deadline) {
  const auto none = [&] { return threads == 0; };
  if (deadline.isNever()) {
    changed_.wait(lock, none);
    return true;
  }
  return changed_.wait_until(lock, deadline.instant(), none);
}

bool CallbackPool::close(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = waitUntilNone(guests_, lock, deadline) || closed_;
  return closed_;
}

bool CallbackPool::stop(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  if (!waitUntilNone(running_, lock, deadline) || !waitUntilNone(guests_, lock, deadline)) {
    return false;
  }
  for (std::thread& thread : threads_) {
    thread.join(); // it has left threadMain's last lock, so this does not wait
  }
  threads_.clear();
  return true;
}

Clock::duration CallbackPool::patience() const noexcept {
  return kPatience * std::clamp<size_t>(running_ - std::min(running_, kAtOnce), 1, kMostPatient);
}

void CallbackPool::waitForTask(std::unique_lock<std::mutex>& lock) {
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
    const TimePoint due = last_taken_ + patience();
    if (tasks_.empty() || idle_ > 1 || running_ <= kAtOnce || Clock::now() >= due) {
      return;
    }
    changed_.wait_until(lock, due);
  }
}

void CallbackPool::startThread(std::unique_lock<std::mutex>& lock) noexcept {
  ++running_;
  ++idle_; // from now on, so that nobody else starts one, too
  std::thread thread;
  try {
    threads_.reserve(threads_.size() + 1); // then the new thread has its place for certain
    lock.unlock(); // to start a thread takes longer than submit() may wait on a data loop
    thread = startNativeThread(kThreadName, [this] { threadMain(); }, SignalMask::AsCaller);
    lock.lock();
    threads_.push_back(std::move(thread));
    return;
  } catch (const std::exception& error) {
    if (lock.owns_lock()) {
      lock.unlock();
    }
    try {
      if (!told_.exchange(true)) { // not with the lock: the line may come back as a task
        log(LogLevel::Warn, std::string("callbacks that wait for other callbacks may hang: ") + error.what());
      }
    } catch (const std::bad_alloc&) { // of the line
    }
  }
  lock.lock();
  --running_;
  --idle_;
}

void CallbackPool::threadMain() noexcept {
  t_pool = this;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;; ++idle_) { // it begins as an idle one
    waitForTask(lock);
    --idle_;
    if (tasks_.empty()) {
      break;
    }
    std::list<Task> task;
    task.splice(task.begin(), tasks_, tasks_.begin());
    last_taken_ = Clock::now();
    if (idle_ == 0) {
      startThread(lock);
    }
    lock.unlock();
    try {
      task.front()();
    } catch (...) { // see submit()
    }
    task.clear(); // what it holds is released before the lock is taken again
    lock.lock();
  }
  --running_;
  changed_.notify_all();
}

} // namespace pycomm
