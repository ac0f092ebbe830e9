#include "engine/operation.h"

#include <utility>

namespace pycomm {

void Operation::settle(OperationId id, std::shared_ptr<const PreparedSchedule> schedule, int sender, uint32_t index) {
  request_.id = id;
  request_.schedule = std::move(schedule);
  request_.descriptor.root = sender;
  request_.descriptor.digest = index;
  if (request_.receives) {
    mark_.from(sender);
  }
  settled_.store(true, std::memory_order_release);
}

const char* Operation::name() const noexcept {
  return collectiveName(request_.receives ? Collective::Recv : request_.descriptor.kind);
}

std::string Operation::label() const {
  if (request_.descriptor.kind == Collective::Send) {
    const std::string peer = request_.peer < 0 ? "any rank" : "rank " + std::to_string(request_.peer);
    return std::string(name()) + (request_.receives ? " from " : " to ") + peer + " (tag " +
        std::to_string(request_.descriptor.tag) + ")";
  }
  return request_.id.sequence >= 0 ? std::string(name()) + " #" + std::to_string(request_.id.sequence)
                                   : std::string(name()) + " issued in a callback";
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
