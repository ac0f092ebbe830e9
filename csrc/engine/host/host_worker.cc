#include "engine/host/host_worker.h"

#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/native_thread.h"

namespace pycomm {

// Wakes the thread, or starts it. With mutex_ held. False after stop().
bool HostWorker::start() {
  if (stop_) {
    return false;
  }
  if (thread_.joinable()) {
    wakes_.notify_one();
  } else {
    thread_ = startNativeThread("pycomm-host", [this] { threadMain(); });
  }
  return true;
}

void HostWorker::wake(const std::function<void()>& failed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wanted_ = true;
  try {
    (void)start();
  } catch (...) {
    failed();
  }
}

bool HostWorker::run(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (!start()) {
      return false;
    }
  } catch (const Error&) {
    return false;
  }
  tasks_.push_back(std::move(task));
  return true;
}

void HostWorker::stop() {
  std::thread thread;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    thread.swap(thread_);
  }
  wakes_.notify_all();
  if (thread.joinable()) {
    thread.join();
  }
}

void HostWorker::threadMain() noexcept {
  std::vector<std::function<void()>> tasks;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wakes_.wait(lock, [&] { return wanted_ || stop_ || !tasks_.empty(); });
      tasks.swap(tasks_);
      if (stop_ && tasks.empty()) {
        return;
      }
      wanted_ = false;
    }
    static_cast<void>(PYCOMM_FAULT("host.task"));
    for (const std::function<void()>& task : tasks) {
      task();
    }
    tasks.clear();
    if (work_()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = true;
    }
  }
}

} // namespace pycomm
