// What the data plane does for operations whose bytes never come here, those in shared memory (HostPlane) and of NCCL: it watches over
// their deadlines, and lets the ranks ask each other about them.
#include <algorithm>
#include <utility>

#include "engine/data_plane.h"
#include "engine/failure_text.h"
#include "engine/host_plane.h"

namespace pycomm {
namespace {

// Without bytes, between this rank and all others: so that the protocol asks all of them.
PreparedSchedule withEveryone(int rank, int size) {
  PreparedSchedule schedule;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      Edge edge;
      edge.peer = peer;
      schedule.incoming.push_back(edge);
    }
  }
  return schedule;
}

} // namespace

void DataPlane::hostStuck(std::shared_ptr<Operation> operation) {
  const OperationId id = operation->request().id;
  if (failure_ || closing_ || operation->done() || host_stuck_.count(id.id) != 0) {
    return;
  }
  guarded(-1, [&] {
    next_deadline_ = std::min(next_deadline_, operation->request().deadline.instant());
    const Descriptor& descriptor = operation->request().descriptor;
    host_stuck_.emplace(id.id, std::move(operation));
    protocol_.posted(id, descriptor, withEveryone(identity_.rank, identity_.size), Clock::now());
    act();
  });
}

void DataPlane::hostUnstuck(uint64_t op_id) {
  if (host_stuck_.erase(op_id) != 0) {
    endInProtocol(op_id);
  }
}

// A peer speaks of an operation that the protocol has not seen: it may be one of those in shared memory, under way or over.
void DataPlane::recallHost(uint64_t op_id) {
  if (host_ == nullptr || op_id == 0 || (op_id & kDerivedIdBit) != 0 || transfers_.count(op_id) != 0 ||
      host_stuck_.count(op_id) != 0) {
    return;
  }
  for (std::shared_ptr<Operation>& operation : host_->recent()) {
    const OperationId id = operation->request().id;
    if (id.sequence <= host_recalled_) {
      continue;
    }
    if (operation->done()) {
      protocol_.passed(id, operation->request().descriptor);
      host_recalled_ = id.sequence;
    } else {
      hostStuck(std::move(operation));
    }
  }
}

void DataPlane::checkHostDeadlines(TimePoint now) {
  for (const auto& entry : host_stuck_) {
    const Operation& operation = *entry.second;
    const Deadline deadline = operation.request().deadline;
    if (operation.done()) {
      continue; // hostUnstuck is on its way
    }
    if (!deadline.expired(now)) {
      next_deadline_ = std::min(next_deadline_, deadline.instant());
      continue;
    }
    const PieceFlow* const pieces = operation.request().extras().pieces.get();
    if (operation.shared().held.load(std::memory_order_relaxed) || (pieces != nullptr && !pieces->allArrived())) {
      notice(inputLate(operation, operation.shared().bytes_total, identity_));
      continue;
    }
    const HostPlane::Standing standing = host_->standing(operation);
    std::optional<Protocol::Missing> missing;
    if (standing.not_entered >= 0) {
      missing = protocol_.missing(entry.first, standing.not_entered);
      if (!missing) {
        missing = Protocol::Missing{standing.not_entered, "not known"};
      }
    }
    notice(timedOut(
        operation,
        operation.shared().bytes_done.load(std::memory_order_relaxed),
        operation.shared().bytes_total,
        standing.behind,
        missing,
        identity_));
  }
}

void DataPlane::follow(const std::shared_ptr<Operation>& operation) {
  if (failure_ || closing_) {
    post(operation); // which says so
    return;
  }
  takeUp(operation, [&] {
    const Operation::Request& request = operation->request();
    next_deadline_ = std::min(next_deadline_, request.deadline.instant());
    followed_.emplace(request.id.id, operation);
    protocol_.posted(request.id, request.descriptor, PreparedSchedule(), Clock::now());
    act();
  });
}

void DataPlane::followedEnded(uint64_t op_id, std::optional<ErrorRecord> error) {
  const auto found = followed_.find(op_id);
  if (found == followed_.end()) {
    return; // the group has failed meanwhile
  }
  const std::shared_ptr<Operation> operation = std::move(found->second);
  followed_.erase(found);
  endInProtocol(op_id);
  if (error) {
    end(*operation, nullptr, [&](const Operation& ended, const Transfer*) {
      return errorOf(ended, *error, identity_);
    });
  } else {
    operation->finish(std::nullopt);
  }
}

void DataPlane::endFollowed(const Why& why) noexcept {
  for (const auto& entry : std::exchange(followed_, {})) {
    endInProtocol(entry.first);
    end(*entry.second, nullptr, why);
  }
}

void DataPlane::checkFollowedDeadlines(TimePoint now) {
  for (const auto& entry : followed_) {
    const Deadline deadline = entry.second->request().deadline;
    if (deadline.expired(now)) {
      notice(timedOut(*entry.second, 0, 0, -1, protocol_.missing(entry.first), identity_));
    } else {
      next_deadline_ = std::min(next_deadline_, deadline.instant());
    }
  }
}

} // namespace pycomm
