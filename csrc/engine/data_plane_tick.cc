// What the data plane does as time goes by: deadlines, also of operations that have not begun, and what was put off.
#include <algorithm>
#include <utility>

#include "engine/data_plane.h"
#include "engine/failure_text.h"

namespace pycomm {
namespace {

/// Bytes of a link of several connections are read and written in order: the one whose turn it is holds up the others.
void nameInterface(ErrorRecord& record, const std::string& interface) {
  if (record.phase == "transfer" && !interface.empty() && !record.summary.empty()) {
    record.summary.back() = ','; // of the sentence's end
    record.summary += " and the next bytes are those on interface " + interface + ".";
    record.hint = "check interface " + interface + " on both hosts; if the network is only slow, raise the timeout";
  }
}

} // namespace

void DataPlane::hold(const std::shared_ptr<Operation>& operation) {
  if (failure_ || closing_) {
    post(operation); // which says so
    return;
  }
  takeUp(operation, [&] {
    next_deadline_ = std::min(next_deadline_, operation->request().deadline.instant());
    without_input_.insert(operation);
  });
}

void DataPlane::release(const std::shared_ptr<Operation>& operation) {
  if (without_input_.erase(operation) != 0) {
    post(operation);
    return;
  }
  guarded(-1, [&] {
    const uint64_t op_id = operation->request().id.id;
    const auto found = transfers_.find(op_id);
    if (found != transfers_.end()) {
      found->second->inputArrived();
      act();
      settle(op_id);
    }
  });
}

void DataPlane::checkHeldDeadlines(TimePoint now) {
  for (const auto& operation : without_input_) {
    const Deadline deadline = operation->request().deadline;
    if (deadline.expired(now)) {
      notice(inputLate(*operation, 0, identity_));
    } else {
      next_deadline_ = std::min(next_deadline_, deadline.instant());
    }
  }
}

TimePoint DataPlane::nextTick() const noexcept {
  TimePoint next = std::min({protocol_.nextTick(), next_deadline_, close_at_});
  for (const auto& entry : suspicions_) {
    next = std::min(next, entry.second.due);
  }
  if (!asks_.empty()) {
    next = std::min(next, std::max(asks_.begin()->first, asks_from_));
  }
  return next;
}

void DataPlane::checkDeadlines(TimePoint now) {
  if (now < next_deadline_) {
    return;
  }
  next_deadline_ = TimePoint::max();
  for (const auto& entry : transfers_) {
    const Deadline deadline = entry.second->operation().request().deadline;
    if (deadline.expired(now) && !entry.second->inputComplete()) {
      notice(inputLate(entry.second->operation(), entry.second->bytesExpected(), identity_));
    } else if (deadline.expired(now)) {
      ErrorRecord record = timedOut(*entry.second, protocol_.missing(entry.first), identity_);
      if (record.peer >= 0) {
        const auto peer = static_cast<size_t>(record.peer);
        if (entry.second->needsFrom(record.peer)) {
          nameInterface(record, in_[peer] == nullptr ? "" : in_[peer]->link->readsFrom());
        } else if (out_[peer] != nullptr) {
          nameInterface(record, out_[peer]->link->writesTo());
        }
      }
      notice(std::move(record));
    } else {
      next_deadline_ = std::min(next_deadline_, deadline.instant());
    }
  }
  for (const auto& entry : sends_) {
    entry.second.forEach([&](const Operation& message) {
      const Deadline deadline = message.request().deadline;
      if (deadline.expired(now)) {
        notice(timedOut(message, 0, 0, entry.first, std::nullopt, identity_));
      } else {
        next_deadline_ = std::min(next_deadline_, deadline.instant());
      }
    });
  }
  for (const auto& entry : unmatched_) {
    const Deadline deadline = entry.second->request().deadline;
    if (deadline.expired(now)) {
      notice(noMessage(*entry.second, entry.first));
    } else {
      next_deadline_ = std::min(next_deadline_, deadline.instant());
    }
  }
  checkHostDeadlines(now);
  checkFollowedDeadlines(now);
  checkHeldDeadlines(now);
  checkRefusedDeadlines(now);
}

// Only if what was to become the group's failure was lost, for want of memory on its way.
void DataPlane::checkRefusedDeadlines(TimePoint now) {
  const auto late = std::stable_partition(refused_.begin(), refused_.end(), [&](const auto& operation) {
    return !operation->request().deadline.expired(now);
  });
  for (auto at = late; at != refused_.end(); ++at) {
    endUnfit(**at, std::make_exception_ptr(std::bad_alloc()));
  }
  refused_.erase(late, refused_.end());
  for (const auto& operation : refused_) {
    next_deadline_ = std::min(next_deadline_, operation->request().deadline.instant());
  }
}

void DataPlane::tick(TimePoint now) {
  if (close_at_ <= now) {
    close_at_ = TimePoint::max();
    if (!failure_) {
      failure_ = std::move(*closing_);
    }
    stopPorts();
    std::exchange(closed_, nullptr)();
    return; // the owner may be gone
  }
  guarded(-1, [&] {
    protocol_.tick(now);
    act();
    askForMessages(now);
    checkDeadlines(now);
    std::vector<std::pair<int, Suspicion>> due;
    for (auto at = suspicions_.begin(); at != suspicions_.end();) {
      if (at->second.due <= now) {
        due.emplace_back(at->first, std::move(at->second));
        at = suspicions_.erase(at);
      } else {
        ++at;
      }
    }
    for (auto& entry : due) {
      suspect(entry.first, std::move(entry.second));
    }
  });
}

} // namespace pycomm
