#include "engine/data/operation_ends.h"

#include <algorithm>
#include <map>
#include <utility>

#include "engine/data/matching.h"
#include "engine/report/failure_text.h"

namespace pycomm {

void OperationEnds::thrown(int peer, const std::exception_ptr& exception) noexcept {
  try {
    reporter_.noticeThrown(peer, exception);
  } catch (...) { // no memory even to report it: a deadline ends the others
    refused_.endWith(exception);
  }
}

void OperationEnds::cannotBegin(const std::shared_ptr<Operation>& operation) noexcept {
  const auto row = std::find_if(tables_.entered.begin(), tables_.entered.end(), [&](const auto& entry) {
    return entry.second.operation == operation;
  });
  if (row == tables_.entered.end() && !messages_.has(*operation) && !watched_.holds(*operation) &&
      !refused_.has(*operation)) {
    refused_.add(operation, std::current_exception());
  }
}

// Want of memory for the history must not keep an operation from ending.
void OperationEnds::endInTables(OperationRow& row) noexcept {
  try {
    matching::ended(tables_, row);
  } catch (...) {
    thrown(-1, std::current_exception());
  }
}

// Everything that holds a view of an operation's memory lets go of it: frames on their way out, to other ranks and to this one, and the
// places that arriving payloads go to. Links stay open, so that goodbyes are still sent and read.
void OperationEnds::stopTouchingMemory() noexcept {
  outgoing_.dropOwn();
  links_.stopTouchingMemory();
}

// Operations in shared memory are forgotten: the HostPlane ends them itself, as another thread still touches their memory.
void OperationEnds::endAll(const Why& why) noexcept {
  const auto end = [&](Operation& operation, const OperationRow* row) {
    operation.finish(recordInAnyCase(identity_, [&] { return why(operation, row); }));
  };
  const auto end_begun = [&](std::map<uint64_t, OperationRow>& rows, OperationRow::Runs runs) {
    for (auto& entry : rows) {
      OperationRow& row = entry.second;
      if (row.runs == runs) {
        endInTables(row);
        end(*row.operation, &row);
      }
    }
  };
  stopTouchingMemory();
  transfers_.dropWork();
  auto rows = std::exchange(tables_.entered, {});
  for (auto& entry : tables_.others) {
    if (entry.second.unexpected != nullptr) {
      entry.second.unexpected->frames.clear();
    }
  }
  for (const auto& entry : rows) {
    if (entry.second.runs == OperationRow::Runs::Here) {
      transfers_.ended();
    }
  }
  end_begun(rows, OperationRow::Runs::Elsewhere);
  watched_.endHeld([&](Operation& operation) { end(operation, nullptr); });
  end_begun(rows, OperationRow::Runs::Here);
  messages_.endAll([&](Operation& operation) { end(operation, nullptr); });
  refused_.endAll([&](Operation& operation) { end(operation, nullptr); });
}

ErrorRecord OperationEnds::errorIn(const Operation& operation, const OperationRow* row, const ErrorRecord& cause)
    const {
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

std::optional<ErrorRecord> OperationEnds::errorOfOldest(const ErrorRecord& cause) const {
  const OperationRow* oldest = nullptr;
  for (const auto& entry : tables_.entered) {
    const OperationRow& row = entry.second;
    if (row.runs == OperationRow::Runs::Here &&
        (oldest == nullptr || row.operation->issuedAt() < oldest->operation->issuedAt())) {
      oldest = &row;
    }
  }
  const Operation* const message = messages_.oldest();
  if (oldest != nullptr && (message == nullptr || oldest->operation->issuedAt() <= message->issuedAt())) {
    return errorIn(*oldest->operation, oldest, cause);
  }
  return message == nullptr ? std::nullopt : std::optional(errorIn(*message, nullptr, cause));
}

const Operation* OperationEnds::unfinished() const noexcept {
  for (const auto& entry : tables_.entered) {
    if (entry.second.runs == OperationRow::Runs::Here) {
      return entry.second.operation.get();
    }
  }
  const Operation* const message = messages_.oldest();
  return message != nullptr && message->request().peer != PointToPoint::kAnyRank ? message : nullptr;
}

} // namespace pycomm
