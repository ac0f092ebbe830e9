#include "engine/operation.h"

#include <utility>

namespace pycomm {

std::string Operation::label() const {
  const std::string name = collectiveName(request_.descriptor.kind);
  return request_.id.sequence >= 0 ? name + " #" + std::to_string(request_.id.sequence)
                                   : name + " issued in a callback";
}

bool Operation::wait(Deadline deadline) const {
  std::unique_lock<std::mutex> lock(mutex_);
  if (deadline.isNever()) {
    ended_.wait(lock, [&] { return done(); });
    return true;
  }
  return ended_.wait_until(lock, deadline.instant(), [&] { return done(); });
}

std::optional<ErrorRecord> Operation::error() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Operation::onDone(std::function<void()> listener) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done()) {
      listeners_.push_back(std::move(listener));
      return;
    }
  }
  listener();
}

void Operation::finish(std::optional<ErrorRecord> error) {
  std::vector<std::function<void()>> listeners;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (done()) {
      return;
    }
    mark_.ended(error);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    listeners.swap(listeners_);
    // Under the lock: a waiter that returns may destroy the operation, and with it the condition.
    ended_.notify_all();
  }
  for (const auto& listener : listeners) {
    listener();
  }
}

} // namespace pycomm
