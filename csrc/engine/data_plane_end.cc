// How operations of the data plane end together: with the group's failure, or when it is closed.
#include <algorithm>
#include <utility>

#include "engine/data_plane.h"
#include "engine/failure_text.h"

namespace pycomm {

// What the protocol keeps of an operation must not keep the operation from ending.
void DataPlane::endInProtocol(uint64_t op_id) noexcept {
  try {
    protocol_.ended(op_id);
  } catch (...) {
    report(-1, std::current_exception());
  }
}

void DataPlane::end(Operation& operation, const Transfer* transfer, const Why& why) const noexcept {
  operation.finish(recordInAnyCase(identity_, [&] { return why(operation, transfer); }));
}

void DataPlane::endAll(const Why& why) noexcept {
  const auto transfers = std::exchange(transfers_, {});
  const auto unmatched = std::exchange(unmatched_, {});
  auto sends = std::exchange(sends_, {});
  const auto without_input = std::exchange(without_input_, {});
  const auto refused = std::exchange(refused_, {});
  asks_of_.clear();
  asks_.clear();
  host_stuck_.clear();
  endFollowed(why);
  lane_.addBusy(-static_cast<int>(transfers.size() + unmatched.size()));
  for (const auto& entry : transfers) {
    endInProtocol(entry.first);
    end(entry.second->operation(), entry.second.get(), why);
  }
  for (const auto& entry : unmatched) {
    end(*entry.second, nullptr, why);
  }
  for (auto& entry : sends) {
    while (!entry.second.empty()) {
      lane_.addBusy(-1);
      end(*entry.second.takeFirst(), nullptr, why);
    }
  }
  for (const auto& operation : without_input) {
    end(*operation, nullptr, why);
  }
  for (const auto& operation : refused) {
    end(*operation, nullptr, why);
  }
  held_.clear();
}

ErrorRecord DataPlane::errorIn(const Operation& operation, const Transfer* transfer, const ErrorRecord& cause) const {
  ErrorRecord record = errorOf(operation, cause, identity_);
  if (transfer != nullptr) {
    record.bytes_done = transfer->bytesArrived();
    record.bytes_total = transfer->bytesExpected();
  } else if (operation.request().receives && operation.request().schedule != nullptr) {
    record.bytes_total = static_cast<int64_t>(operation.request().output.nbytes);
  }
  if (record.phase.empty()) {
    record.phase = transfer != nullptr ? "transfer" : "matching";
  }
  return record;
}

void DataPlane::fail(const ErrorRecord& cause, const std::function<void(const ErrorRecord&)>& told) noexcept {
  if (failure_) {
    return;
  }
  failure_ = recordInAnyCase(identity_, [&] { return cause; });
  failed_at_ = Clock::now();
  stopTouchingMemory();
  stopPorts();
  const auto oldest = std::min_element(transfers_.begin(), transfers_.end(), [](const auto& a, const auto& b) {
    return a.second->operation().issuedAt() < b.second->operation().issuedAt();
  });
  const Operation* const message = oldestMessage();
  const bool begun = oldest != transfers_.end();
  try {
    if (told == nullptr) {
      // nobody asks
    } else if (begun && (message == nullptr || oldest->second->operation().issuedAt() <= message->issuedAt())) {
      told(errorIn(oldest->second->operation(), oldest->second.get(), cause));
    } else if (message != nullptr) {
      told(errorIn(*message, nullptr, cause));
    }
  } catch (...) { // no memory to say it: the group's cause itself is known
  }
  endAll([&](const Operation& operation, const Transfer* transfer) { return errorIn(operation, transfer, cause); });
}

} // namespace pycomm
