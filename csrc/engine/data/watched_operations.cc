#include "engine/data/watched_operations.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/data/matching.h"
#include "engine/data/waiting.h"
#include "engine/host/host_plane.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

/// Of one in shared memory: its input, or a part of it, is not there yet.
bool lacksInput(const Operation& operation) {
  const PieceFlow* const pieces = operation.request().extras().pieces.get();
  return operation.shared().held.load(std::memory_order_relaxed) || (pieces != nullptr && !pieces->allArrived());
}

} // namespace

// A rank that was faster may have asked before the plane was there, and recall() is over for that.
void WatchedOperations::accompany(HostPlane* host) noexcept {
  host_ = host;
  const auto first_derived = tables_.unexpected.lower_bound(kDerivedIdBit);
  if (first_derived != tables_.unexpected.begin()) {
    host_->tellEndsUpTo(static_cast<int64_t>(std::prev(first_derived)->first));
  }
}

void WatchedOperations::hold(const std::shared_ptr<Operation>& operation) {
  tables_.held.push_back(operation);
  next_deadline_ = std::min(next_deadline_, operation->request().deadline.instant());
}

bool WatchedOperations::release(const std::shared_ptr<Operation>& operation) noexcept {
  std::vector<std::shared_ptr<Operation>>& held = tables_.held;
  const auto found = std::find(held.begin(), held.end(), operation);
  if (found == held.end()) {
    return false;
  }
  held.erase(found);
  return true;
}

OperationRow& WatchedOperations::watch(const std::shared_ptr<Operation>& operation) {
  host_->tellEnd(*operation); // first: if it ends meanwhile, the data loop runs hostEnded() after this
  OperationRow& row = matching::entered(tables_, operation, OperationRow::Runs::InSharedMemory, Clock::now());
  try {
    waiting::asksOnly(tables_, row, {}, Clock::now());
  } catch (...) {
    matching::forget(tables_, row);
    throw;
  }
  return row;
}

void WatchedOperations::stuck(const std::shared_ptr<Operation>& operation, uint64_t lacking) {
  if (operation->done()) {
    return;
  }
  OperationRow* row = tables_.find(operation->request().id.id);
  if (row == nullptr) {
    row = &watch(operation);
  }
  waiting::asksOnly(tables_, *row, host_->inGroup(lacking), Clock::now());
}

void WatchedOperations::hostEnded(const OperationId& id, const Descriptor& descriptor) {
  const auto found = tables_.entered.find(id.id);
  if (found != tables_.entered.end()) {
    const auto node = tables_.entered.extract(found);
    matching::ended(tables_, node.mapped());
  } else {
    matching::passed(tables_, id, descriptor);
  }
}

// A question is kept until its operation is entered here. If that will be in shared memory, its end tells.
void WatchedOperations::recall(const FrameHeader& header) {
  const uint64_t op_id = header.op_id;
  if (host_ == nullptr || op_id == 0 || (op_id & kDerivedIdBit) != 0) {
    return;
  }
  if (header.type == FrameType::Waiting) {
    host_->tellEndsUpTo(static_cast<int64_t>(op_id));
  }
  for (const std::shared_ptr<Operation>& operation : host_->recent()) {
    const OperationId id = operation->request().id;
    if (id.sequence <= recalled_ || tables_.find(id.id) != nullptr) {
      continue;
    }
    if (operation->done()) {
      matching::passed(tables_, id, operation->request().descriptor);
      recalled_ = id.sequence;
    } else {
      watch(operation);
    }
  }
}

void WatchedOperations::follow(const std::shared_ptr<Operation>& operation) {
  matching::entered(tables_, operation, OperationRow::Runs::Elsewhere, Clock::now());
}

void WatchedOperations::endHeld(const std::function<void(Operation&)>& end) noexcept {
  for (const auto& operation : std::exchange(tables_.held, {})) {
    end(*operation);
  }
}

bool WatchedOperations::holds(const Operation& operation) const noexcept {
  return std::any_of(
      tables_.held.begin(), tables_.held.end(), [&](const auto& entry) { return entry.get() == &operation; });
}

std::optional<ErrorRecord> WatchedOperations::overdue(OperationRow& row) {
  if (row.runs == OperationRow::Runs::Elsewhere) {
    return timedOut(*row.operation, 0, 0, -1, waiting::missing(row), tables_.identity);
  }
  const std::shared_ptr<Operation> operation = row.operation;
  if (!operation->done()) {
    return overdueOnHost(row);
  }
  hostEnded(operation->request().id, operation->request().descriptor); // there may have been no memory to tell it
  return std::nullopt;
}

ErrorRecord WatchedOperations::overdueOnHost(const OperationRow& row) const {
  const Operation& operation = *row.operation;
  if (lacksInput(operation)) {
    return inputLate(operation, operation.shared().bytes_total, tables_.identity);
  }
  const HostPlane::WaitsFor found = host_->waitsFor(operation);
  const std::vector<int> lack = host_->inGroup(found.not_entered);
  if (lack.empty() && found.behind < 0) { // it may wait behind one whose input is late
    for (const std::shared_ptr<Operation>& earlier : host_->recent()) {
      if (earlier->shared().ticket < operation.shared().ticket && !earlier->done() && lacksInput(*earlier)) {
        return inputLate(*earlier, earlier->shared().bytes_total, tables_.identity);
      }
    }
  }
  int waits_for = found.behind;
  std::optional<NotEntered> missing;
  for (const int rank : lack) {
    if (row.came.count(rank) == 0) {
      missing = waiting::missing(row, rank).value_or(NotEntered{rank, "not known"});
      break;
    }
    waits_for = waits_for < 0 ? rank : waits_for; // it has issued it, but its input has not come, or it was stopped
  }
  return timedOut(
      operation,
      operation.shared().bytes_done.load(std::memory_order_relaxed),
      operation.shared().bytes_total,
      waits_for,
      missing,
      tables_.identity);
}

std::vector<ErrorRecord> WatchedOperations::overdueHeld(TimePoint now) {
  std::vector<ErrorRecord> late;
  if (now < next_deadline_) {
    return late;
  }
  TimePoint next = TimePoint::max();
  for (const auto& operation : tables_.held) {
    const Deadline deadline = operation->request().deadline;
    if (deadline.expired(now)) {
      late.push_back(inputLate(*operation, 0, tables_.identity));
      next = std::min(next, now + kSayAgain);
    } else {
      next = std::min(next, deadline.instant());
    }
  }
  next_deadline_ = next; // last: if there was no memory for a record, the next tick looks again
  return late;
}

} // namespace pycomm
