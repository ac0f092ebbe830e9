#include "c10d/future_wait.h"
#include "c10d/interruptible.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "base/wait_point.h"
#include "c10d/python_errors.h"

namespace pycomm {
namespace {

struct Completed {
  std::mutex mutex; ///< guards the next
  bool yes = false;
  std::condition_variable changed;

  void note() {
    const std::lock_guard lock(mutex);
    yes = true;
    changed.notify_all();
  }
  [[nodiscard]] bool within(int64_t ms) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::milliseconds(ms), [this] { return yes; });
  }
};

} // namespace

bool awaitCompletion(c10::ivalue::Future& future, Deadline deadline) {
  if (future.completed()) {
    return true;
  }
  const auto completed = std::make_shared<Completed>();
  future.addCallback([completed](c10::ivalue::Future& /*future*/) { completed->note(); });
  while (true) {
    beforeWait();
    // Other callbacks of the future, which may take their time, run before ours: so the future itself is looked at, too.
    if (completed->within(deadline.remainingMs(Interruptible::kEveryMs)) || future.completed()) {
      return true;
    }
    if (deadline.expired()) {
      return false;
    }
    checkSignals();
  }
}

} // namespace pycomm
