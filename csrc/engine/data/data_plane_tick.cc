// What the data plane does as time goes by, and for operations that it only watches.
#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "engine/data/data_plane.h"
#include "engine/report/failure_text.h"

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
  if (!end_.running()) {
    endAtOnce(*operation);
    return;
  }
  takeUp(operation, [&] { watched_.hold(operation); });
}

void DataPlane::release(const std::shared_ptr<Operation>& operation) {
  if (watched_.release(operation)) {
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

void DataPlane::hostStuck(std::shared_ptr<Operation> operation) {
  if (end_.running()) {
    guarded(-1, [&] {
      watched_.stuck(std::move(operation));
      act();
    });
  }
}

void DataPlane::hostUnstuck(uint64_t op_id) {
  if (watched_.unstuck(op_id)) {
    endInProtocol(op_id);
  }
}

void DataPlane::follow(const std::shared_ptr<Operation>& operation) {
  if (!end_.running()) {
    endAtOnce(*operation);
    return;
  }
  takeUp(operation, [&] {
    watched_.follow(operation);
    act();
  });
}

void DataPlane::followedEnded(uint64_t op_id, std::optional<ErrorRecord> error) {
  const std::shared_ptr<Operation> operation = watched_.unfollow(op_id);
  if (operation == nullptr) {
    return; // the group has failed meanwhile
  }
  endInProtocol(op_id);
  if (error) {
    end(*operation, nullptr, [&](const Operation& ended, const Transfer*) {
      return errorOf(ended, *error, identity_);
    });
  } else {
    operation->finish(std::nullopt);
  }
}

// The deadline of an operation in the roll call has passed.
void DataPlane::overdue(uint64_t op_id) {
  const auto found = transfers_.find(op_id);
  if (found == transfers_.end()) {
    if (std::optional<ErrorRecord> late = watched_.overdue(op_id)) {
      notice(std::move(*late));
    }
    return;
  }
  const Transfer& transfer = *found->second;
  if (!transfer.inputComplete()) {
    notice(inputLate(transfer.operation(), transfer.bytesExpected(), identity_));
    return;
  }
  ErrorRecord record = timedOut(
      transfer.operation(),
      transfer.bytesArrived(),
      transfer.bytesExpected(),
      transfer.waitsFor(),
      protocol_.missing(op_id),
      identity_);
  if (const int peer = record.peer; peer >= 0) {
    nameInterface(record, transfer.needsFrom(peer) ? links_.readsFrom(peer) : links_.writesTo(peer));
  }
  notice(std::move(record));
}

TimePoint DataPlane::nextTick() const noexcept {
  TimePoint next = std::min(
      {protocol_.nextTick(), messages_.nextTick(), watched_.nextDeadline(), departures_.nextTick(), end_.close_at});
  for (const auto& operation : refused_) {
    next = std::min(next, operation->request().deadline.instant());
  }
  return next;
}

void DataPlane::tick(TimePoint now) {
  if (end_.close_at <= now) {
    end_.close_at = TimePoint::max();
    if (!end_.failure) {
      end_.failure = std::move(*end_.closing);
    }
    links_.stop();
    std::exchange(end_.closed, nullptr)();
    return; // the owner may be gone
  }
  guarded(-1, [&] {
    protocol_.tick(now);
    act();
    messages_.tick(now);
    for (ErrorRecord& late : watched_.overdueHeld(now)) {
      notice(std::move(late));
    }
    departures_.tick(now);
    actOnDepartures();
  });
  // Only if the failure that they were to end with was lost, for want of memory on its way.
  const auto late = std::stable_partition(refused_.begin(), refused_.end(), [&](const auto& operation) {
    return !operation->request().deadline.expired(now);
  });
  for (auto at = late; at != refused_.end(); ++at) {
    end(**at, nullptr, [&](const Operation& ended, const Transfer*) {
      return errorOf(ended, ownTrouble(std::make_exception_ptr(std::bad_alloc()), identity_), identity_);
    });
  }
  refused_.erase(late, refused_.end());
}

} // namespace pycomm
