#include "engine/operation/operation.h"

#include <array>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace pycomm {
namespace {

/// Where threads wait for operations to end. Operations at addresses that fall together share one; a waiter looks at its own again.
struct WaitingRoom {
  std::mutex mutex; ///< guards what Operation says of its members
  std::condition_variable ended;
};

WaitingRoom& roomOf(const Operation* operation) noexcept {
  static auto& rooms = *new std::array<WaitingRoom, 64>; // never destroyed: native threads may outlive static objects
  return rooms[mix64(reinterpret_cast<uintptr_t>(operation)) % rooms.size()];
}

} // namespace

const Operation::Request::Extras& Operation::Request::extras() const noexcept {
  static const Extras none;
  return extras_ ? *extras_ : none;
}

Operation::Shared& Operation::shared() const noexcept {
  static Shared none; // ticket 0; nobody writes to it
  return request_.extras_ ? request_.extras_->shared : none;
}

void Operation::identify(OperationId id, std::shared_ptr<const PreparedSchedule> schedule, int sender, uint32_t index) {
  request_.id = id;
  request_.schedule = std::move(schedule);
  request_.descriptor.root = sender;
  request_.descriptor.digest = index;
  if (request_.receives) {
    mark_.from(sender);
  }
  identified_.store(true, std::memory_order_release);
}

const char* Operation::name() const noexcept {
  return collectiveName(request_.receives ? Collective::Recv : request_.descriptor.kind);
}

std::string Operation::label(const JobRanks& job) const {
  if (request_.descriptor.kind == Collective::Send) {
    const std::string peer = request_.peer < 0 ? "any rank" : job.text(request_.peer);
    return std::string(name()) + (request_.receives ? " from " : " to ") + peer + " (tag " +
        std::to_string(request_.descriptor.tag) + ")";
  }
  return request_.id.sequence >= 0 ? std::string(name()) + " #" + std::to_string(request_.id.sequence)
                                   : std::string(name()) + " " + CallbackOrigin::unpacked(request_.id.origin).text();
}

bool Operation::wait(Deadline deadline) const {
  if (done()) {
    return true;
  }
  WaitingRoom& room = roomOf(this);
  std::unique_lock<std::mutex> lock(room.mutex);
  if (deadline.isNever()) {
    room.ended.wait(lock, [&] { return done(); });
    return true;
  }
  return room.ended.wait_until(lock, deadline.instant(), [&] { return done(); });
}

std::optional<ErrorRecord> Operation::error() const {
  if (!done()) {
    return std::nullopt;
  }
  if (failed_without_record_) {
    return noMemoryLeft();
  }
  return ending_ && ending_->error ? std::optional<ErrorRecord>(*ending_->error) : std::nullopt;
}

void Operation::onDone(std::function<void()> listener) {
  if (!done()) {
    const std::lock_guard<std::mutex> lock(roomOf(this).mutex);
    if (!done()) {
      ending().listeners.push_back(std::move(listener));
      return;
    }
  }
  listener();
}

void Operation::finish(std::optional<ErrorRecord> error) noexcept {
  std::vector<std::function<void()>> listeners;
  WaitingRoom& room = roomOf(this);
  {
    const std::lock_guard<std::mutex> lock(room.mutex);
    if (done()) {
      return;
    }
    mark_.ended(error);
    if (ending_ != nullptr) {
      listeners.swap(ending_->listeners);
    }
    try {
      if (error) {
        ending().error = std::make_unique<const ErrorRecord>(*std::move(error));
      }
    } catch (...) { // no memory
      failed_without_record_ = true;
    }
    done_.store(true, std::memory_order_release); // last: who sees it may destroy the operation
  }
  room.ended.notify_all();
  for (const auto& listener : listeners) {
    try {
      listener();
    } catch (...) { // see onDone()
    }
  }
}

} // namespace pycomm
