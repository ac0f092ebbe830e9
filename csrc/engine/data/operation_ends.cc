#include "engine/data/operation_ends.h"

#include <utility>

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
  if (!transfers_.has(*operation) && !messages_.has(*operation) && !watched_.has(*operation) &&
      !refused_.has(*operation)) {
    refused_.add(operation, std::current_exception());
  }
}

// What the protocol keeps of an operation must not keep the operation from ending.
void OperationEnds::endInProtocol(uint64_t op_id) noexcept {
  try {
    protocol_.ended(op_id);
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

void OperationEnds::endAll(const Why& why) noexcept {
  const auto end = [&](Operation& operation, const Transfer* transfer) {
    operation.finish(recordInAnyCase(identity_, [&] { return why(operation, transfer); }));
  };
  stopTouchingMemory();
  watched_.endAll([&](Operation& operation) {
    endInProtocol(operation.request().id.id);
    end(operation, nullptr);
  });
  transfers_.endAll([&](const Transfer& transfer) {
    endInProtocol(transfer.operation().request().id.id);
    end(transfer.operation(), &transfer);
  });
  messages_.endAll([&](Operation& operation) { end(operation, nullptr); });
  refused_.endAll([&](Operation& operation) { end(operation, nullptr); });
}

ErrorRecord OperationEnds::errorIn(const Operation& operation, const Transfer* transfer, const ErrorRecord& cause)
    const {
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
  const Transfer* const transfer = transfers_.oldest();
  const Operation* const message = messages_.oldest();
  if (transfer != nullptr && (message == nullptr || transfer->operation().issuedAt() <= message->issuedAt())) {
    return errorIn(transfer->operation(), transfer, cause);
  }
  return message == nullptr ? std::nullopt : std::optional(errorIn(*message, nullptr, cause));
}

const Operation* OperationEnds::unfinished() const noexcept {
  const Operation* const operation = transfers_.first();
  if (operation != nullptr) {
    return operation;
  }
  const Operation* const message = messages_.oldest();
  return message != nullptr && message->request().peer != PointToPoint::kAnyRank ? message : nullptr;
}

} // namespace pycomm
