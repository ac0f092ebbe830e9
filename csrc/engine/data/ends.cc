// How operations end without success, and how the plane ends. The memory rule stands here: when operations end together, nothing touches
// their memory any more.
#include <algorithm>
#include <chrono>
#include <map>
#include <new>
#include <utility>

#include "engine/data/data_plane.h"
#include "engine/data/matching.h"
#include "engine/report/failure_text.h"
#include "transport/link.h"

namespace pycomm {
namespace {

// How long to wait for room for it, if the peer has yet to read what came before.
constexpr std::chrono::milliseconds kLastWords(1500);
// After a failure, how long bulk links stay open at the least.
constexpr std::chrono::milliseconds kNews(50);

} // namespace

// ---- what this rank notices

void DataPlane::notice(ErrorRecord record) const {
  if (running()) {
    events_.noticed(std::move(record));
  }
}

void DataPlane::thrown(int peer, const std::exception_ptr& exception) noexcept {
  if (peer >= 0) {
    noteReading(peer); // the link may have brought bytes that cannot be taken
  }
  try {
    ErrorRecord record = recordOfThrown(exception, identity_);
    tables_.failed = tables_.failed || isOwnTrouble(record.code); // of a peer's, its goodbye may tell more
    if (peer >= 0 && record.peer < 0) { // else it names another rank: a frame may open the link to that
      identity_.blame(record, peer);
      if (record.summary.empty()) { // of a shared link, which knows of no ranks
        record.summary = identity_.rankTitle(peer) + " has broken the memory through which it talks with " +
            identity_.job.text(identity_.rank) + ".";
      }
    }
    notice(std::move(record));
  } catch (...) { // no memory even to report it: a later tick does
    tables_.failed = true;
    unreported_.keep(peer, exception);
    for (const auto& operation : std::exchange(refused_, {})) {
      endRefused(*operation, exception);
    }
  }
}

// ---- operations that cannot begin, because of an exception on this rank

void DataPlane::cannotBegin(const std::shared_ptr<Operation>& operation) noexcept {
  const bool is_entered = std::any_of(tables_.entered.begin(), tables_.entered.end(), [&](const auto& entry) {
    return entry.second.operation == operation;
  });
  const bool is_refused = std::find(refused_.begin(), refused_.end(), operation) != refused_.end();
  if (is_entered || is_refused || messages_.has(*operation) || watched_.holds(*operation)) {
    return;
  }
  const std::exception_ptr cause = std::current_exception(); // the handler below has one of its own
  try {
    refused_.push_back(operation);
  } catch (...) { // no memory to remember it
    endRefused(*operation, cause);
  }
}

void DataPlane::endRefused(Operation& operation, const std::exception_ptr& exception) const noexcept {
  operation.finish(
      recordInAnyCase(identity_, [&] { return errorOf(operation, recordOfThrown(exception, identity_), identity_); }));
}

void DataPlane::endRefusedLate(TimePoint now) noexcept {
  // One at a time: there may be no memory for a list of them.
  for (;;) {
    const auto at = std::find_if(refused_.begin(), refused_.end(), [&](const auto& operation) {
      return operation->request().deadline.expired(now);
    });
    if (at == refused_.end()) {
      return;
    }
    const std::shared_ptr<Operation> late = std::move(*at);
    refused_.erase(at);
    endRefused(*late, std::make_exception_ptr(std::bad_alloc()));
  }
}

TimePoint DataPlane::nextRefusedDeadline() const noexcept {
  TimePoint next = TimePoint::max();
  for (const auto& operation : refused_) {
    next = std::min(next, operation->request().deadline.instant());
  }
  return next;
}

// ---- all operations end

// Want of memory for the history must not keep an operation from ending.
void DataPlane::endRow(OperationRow& row) noexcept {
  try {
    matching::ended(tables_, row);
  } catch (...) {
    thrown(-1, std::current_exception());
  }
}

// Everything that holds a view of an operation's memory lets go of it: frames on their way out, to other ranks and to this one, and the
// places that arriving payloads go to. Sockets stay open: peers would take their end for this rank's.
void DataPlane::stopTouchingMemory() noexcept {
  to_self_.clear();
  links_.stopTouchingMemory();
}

// Operations in shared memory are forgotten: the HostPlane ends them itself, as another thread still touches their memory.
void DataPlane::endAll(const Why& why) noexcept {
  const auto end = [&](Operation& operation, const OperationRow* row) {
    operation.finish(recordInAnyCase(identity_, [&] { return why(operation, row); }));
  };
  const auto end_begun = [&](std::map<uint64_t, OperationRow>& rows, OperationRow::Runs runs) {
    for (auto& entry : rows) {
      OperationRow& row = entry.second;
      if (row.runs == runs) {
        endRow(row);
        end(*row.operation, &row);
        if (runs == OperationRow::Runs::Here) {
          letGo(row);
        }
      }
    }
  };
  stopTouchingMemory();
  transfers_.dropWork();
  auto rows = std::exchange(tables_.entered, {});
  for (auto& entry : tables_.unexpected) {
    entry.second.frames.clear();
  }
  for (const auto& entry : rows) {
    if (entry.second.runsHere()) {
      transfers_.ended();
    }
  }
  end_begun(rows, OperationRow::Runs::Elsewhere);
  watched_.endHeld([&](Operation& operation) { end(operation, nullptr); });
  end_begun(rows, OperationRow::Runs::Here);
  messages_.endAll([&](Operation& operation) { end(operation, nullptr); });
  for (const auto& operation : std::exchange(refused_, {})) {
    end(*operation, nullptr);
  }
}

ErrorRecord DataPlane::errorIn(const Operation& operation, const OperationRow* row, const ErrorRecord& cause) const {
  const Transfer* const transfer = row == nullptr ? nullptr : row->transfer.get();
  ErrorRecord record = errorOf(operation, cause, identity_);
  if (transfer != nullptr) {
    record.bytes_done = transfer->bytesArrived();
    record.bytes_total = transfer->bytesExpected();
  } else if (operation.request().receives && operation.request().schedule != nullptr) {
    record.bytes_total = static_cast<int64_t>(operation.request().output.nbytes);
  }
  if (!record.phase.known()) {
    record.phase = transfer != nullptr ? ErrorPhase::Transfer : ErrorPhase::Matching;
  }
  return record;
}

void DataPlane::tellOldest(const ErrorRecord& cause, const OldestEnds& told) const {
  const OperationRow* oldest = nullptr;
  for (const auto& entry : tables_.entered) {
    const OperationRow& row = entry.second;
    if (row.runsHere() && (oldest == nullptr || row.operation->issuedAt() < oldest->operation->issuedAt())) {
      oldest = &row;
    }
  }
  const Operation* const message = messages_.oldest();
  if (oldest != nullptr && (message == nullptr || oldest->operation->issuedAt() <= message->issuedAt())) {
    told(errorIn(*oldest->operation, oldest, cause), oldest->operation->issuedAt());
  } else if (message != nullptr) {
    told(errorIn(*message, nullptr, cause), message->issuedAt());
  }
}

const Operation* DataPlane::unfinished() const noexcept {
  for (const auto& entry : tables_.entered) {
    if (entry.second.runsHere()) {
      return entry.second.operation.get();
    }
  }
  const Operation* const message = messages_.oldest();
  return message != nullptr && message->request().peer != PointToPoint::kAnyRank ? message : nullptr;
}

void DataPlane::endAtOnce(Operation& operation) const noexcept {
  operation.finish(recordInAnyCase(identity_, [&] {
    ErrorRecord closed;
    closed.code = ErrorCode::ShutDown;
    closed.summary = "The process group is closed.";
    const ErrorRecord& cause = failure_ ? *failure_ : (closing_ ? *closing_ : closed);
    ErrorRecord record = errorOf(operation, cause, identity_);
    record.bytes_done = 0;
    record.bytes_total = 0;
    if (const PreparedSchedule* schedule = operation.request().schedule.get()) { // null: from any rank
      for (const Edge& edge : schedule->incoming) {
        record.bytes_total += edge.nbytes;
      }
    }
    record.phase = record.phase.known() ? record.phase : ErrorPhase::NotStarted;
    return record;
  }));
}

// ---- the plane ends

void DataPlane::fail(const ErrorRecord& cause, const OldestEnds& told) noexcept {
  if (failure_) {
    return; // the first cause stays
  }
  failure_ = recordInAnyCase(identity_, [&] { return cause; });
  failed_at_ = Clock::now();
  links_.stop();
  try {
    if (told) {
      tellOldest(cause, told);
    }
  } catch (...) { // no memory to say it: the group's cause itself is known
  }
  endAll([&](const Operation& operation, const OperationRow* row) { return errorIn(operation, row, cause); });
}

void DataPlane::close(const ErrorRecord& reason, std::function<void()> closed) noexcept {
  const Operation* const expected = failure_ ? nullptr : unfinished();
  if (expected != nullptr) {
    try {
      notice(leftInTheMiddle(*expected, identity_));
    } catch (...) { // no memory to say so: the others find that this rank has left
    }
  }
  closing_ = recordInAnyCase(identity_, [&] { return reason; });
  closed_ = std::move(closed);
  ends_at_ = Clock::now();
  if (failure_) { // every operation has ended with that
    // News travels over other ranks' control links; a link that ends before it has arrived looks like a death.
    ends_at_ = std::max(ends_at_, failed_at_ + kNews);
    return;
  }
  endAll([&](const Operation& operation, const OperationRow*) { return errorOf(operation, reason, identity_); });
  if (links_.sayGoodbyes()) {
    ends_at_ = Clock::now() + (links_.isClosing() ? kLastWords : kGoodbye);
  }
}

void DataPlane::onGoodbyesSaid() {
  ends_at_ = Clock::now() + kGoodbye;
}

} // namespace pycomm
