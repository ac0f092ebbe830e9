#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace pycomm {

/// A thread that is started when it is first needed. It does the HostPlane's work that no caller does.
///
/// Thread: any, unless a function names one.
class HostWorker {
 public:
  /// `work` runs on the thread after wake(), and after tasks; it never throws. If it returns true, it runs again.
  explicit HostWorker(std::function<bool()> work) : work_(std::move(work)) {}
  HostWorker(const HostWorker&) = delete;
  HostWorker& operator=(const HostWorker&) = delete;

  /// Has `work` run soon. Nothing after stop(). If the thread cannot be started, `failed` handles the exception, before stop() returns, and
  /// `work` runs when another wake() starts the thread. `failed` must not throw, and must not come back here.
  void wake(const std::function<void()>& failed);
  /// Has the thread run a task soon, also if stop() comes first. False if there is no thread to do so.
  [[nodiscard]] bool run(std::function<void()> task);
  /// Ends the thread and joins it. Not on that thread. Idempotent.
  void stop();

 private:
  [[nodiscard]] bool start();
  void threadMain() noexcept;

  const std::function<bool()> work_;
  std::mutex mutex_; ///< guards the rest
  std::condition_variable wakes_;
  bool wanted_ = false;
  std::vector<std::function<void()>> tasks_;
  bool stop_ = false;
  std::thread thread_;
};

} // namespace pycomm
