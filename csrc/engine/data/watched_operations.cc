#include "engine/data/watched_operations.h"

#include <algorithm>
#include <utility>

#include "engine/host/host_plane.h"
#include "engine/report/failure_text.h"

namespace pycomm {
void WatchedOperations::hold(const std::shared_ptr<Operation>& operation) {
  held_.insert(operation);
  next_deadline_ = std::min(next_deadline_, operation->request().deadline.instant());
}

void WatchedOperations::watch(const std::shared_ptr<Operation>& operation) {
  const Operation::Request& request = operation->request();
  host_->tellEnd(*operation); // first: if it ends meanwhile, the lane runs hostEnded() after this
  watched_.emplace(request.id.id, operation);
  try {
    protocol_.posted(request.id, request.descriptor, PreparedSchedule(), Clock::now(), request.deadline);
    protocol_.asksOnly(request.id.id, {}, Clock::now());
  } catch (...) { // nobody would look at its deadline
    watched_.erase(request.id.id);
    throw;
  }
}

void WatchedOperations::stuck(const std::shared_ptr<Operation>& operation, uint64_t lacking) {
  if (operation->done()) {
    return;
  }
  const uint64_t op_id = operation->request().id.id;
  if (watched_.count(op_id) == 0) {
    watch(operation);
  }
  protocol_.asksOnly(op_id, host_->inGroup(lacking), Clock::now());
}

void WatchedOperations::hostEnded(const OperationId& id, const Descriptor& descriptor) {
  if (watched_.erase(id.id) != 0) {
    protocol_.ended(id.id);
  } else {
    protocol_.passed(id, descriptor);
  }
}

// A question is kept until its operation is entered here. If that will be in shared memory, its end tells.
void WatchedOperations::recall(const FrameHeader& header) {
  const uint64_t op_id = header.op_id;
  if (host_ == nullptr || op_id == 0 || (op_id & kDerivedIdBit) != 0 || watched_.count(op_id) != 0) {
    return;
  }
  if (header.type == FrameType::Waiting) {
    host_->tellEndsUpTo(static_cast<int64_t>(op_id));
  }
  for (const std::shared_ptr<Operation>& operation : host_->recent()) {
    const OperationId id = operation->request().id;
    if (id.sequence <= recalled_ || watched_.count(id.id) != 0) {
      continue;
    }
    if (operation->done()) {
      protocol_.passed(id, operation->request().descriptor);
      recalled_ = id.sequence;
    } else {
      watch(operation);
    }
  }
}

void WatchedOperations::follow(const std::shared_ptr<Operation>& operation) {
  const Operation::Request& request = operation->request();
  followed_.emplace(request.id.id, operation);
  try {
    protocol_.posted(request.id, request.descriptor, PreparedSchedule(), Clock::now(), request.deadline);
  } catch (...) { // nobody would look at its deadline
    followed_.erase(request.id.id);
    throw;
  }
}

std::shared_ptr<Operation> WatchedOperations::unfollow(uint64_t op_id) {
  const auto found = followed_.find(op_id);
  if (found == followed_.end()) {
    return nullptr;
  }
  std::shared_ptr<Operation> operation = std::move(found->second);
  followed_.erase(found);
  return operation;
}

void WatchedOperations::endAll(const std::function<void(Operation&)>& end) noexcept {
  watched_.clear();
  for (const auto& entry : std::exchange(followed_, {})) {
    end(*entry.second);
  }
  for (const auto& operation : std::exchange(held_, {})) {
    end(*operation);
  }
}

bool WatchedOperations::has(const Operation& operation) const noexcept {
  return std::any_of(
             followed_.begin(), followed_.end(), [&](const auto& entry) { return entry.second.get() == &operation; }) ||
      std::any_of(held_.begin(), held_.end(), [&](const auto& entry) { return entry.get() == &operation; });
}

std::optional<ErrorRecord> WatchedOperations::overdue(uint64_t op_id) {
  if (const auto found = watched_.find(op_id); found != watched_.end()) {
    const std::shared_ptr<Operation> operation = found->second;
    if (!operation->done()) {
      return overdueOnHost(*operation);
    }
    hostEnded(operation->request().id, operation->request().descriptor); // there may have been no memory to tell it
    return std::nullopt;
  }
  if (const auto found = followed_.find(op_id); found != followed_.end()) {
    return timedOut(*found->second, 0, 0, -1, protocol_.missing(op_id), identity_);
  }
  return std::nullopt;
}

std::optional<ErrorRecord> WatchedOperations::overdueOnHost(const Operation& operation) const {
  const PieceFlow* const pieces = operation.request().extras().pieces.get();
  if (operation.shared().held.load(std::memory_order_relaxed) || (pieces != nullptr && !pieces->allArrived())) {
    return inputLate(operation, operation.shared().bytes_total, identity_);
  }
  const HostPlane::WaitsFor found = host_->waitsFor(operation);
  std::optional<NotEntered> missing;
  if (found.not_entered >= 0) {
    missing = protocol_.missing(operation.request().id.id, found.not_entered);
    if (!missing) {
      missing = NotEntered{found.not_entered, "not known"};
    }
  }
  return timedOut(
      operation,
      operation.shared().bytes_done.load(std::memory_order_relaxed),
      operation.shared().bytes_total,
      found.behind,
      missing,
      identity_);
}

std::vector<ErrorRecord> WatchedOperations::overdueHeld(TimePoint now) {
  std::vector<ErrorRecord> late;
  if (now < next_deadline_) {
    return late;
  }
  TimePoint next = TimePoint::max();
  for (const auto& operation : held_) {
    const Deadline deadline = operation->request().deadline;
    if (deadline.expired(now)) {
      late.push_back(inputLate(*operation, 0, identity_));
      next = std::min(next, now + kReportAgain);
    } else {
      next = std::min(next, deadline.instant());
    }
  }
  next_deadline_ = next; // last: if there was no memory for a record, the next tick looks again
  return late;
}

} // namespace pycomm
