// How operations of the data plane end together: with the group's failure, or when it is closed.
#include <algorithm>
#include <utility>

#include "engine/data/data_plane.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// Closing: how long to wait after a goodbye for the peer to read it.
constexpr int kGoodbyeMs = 20;
// Closing: how long to wait for room for it, if the peer has yet to read what came before.
constexpr int kLastWordsMs = 1500;
// After a failure, how long bulk links stay open at the least.
constexpr int kNewsMs = 50;

} // namespace

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

// Everything that holds a view of an operation's memory lets go of it: frames on their way out, to other ranks and to this one, and the
// places that arriving payloads go to. Links stay open, so that goodbyes are still sent and read.
void DataPlane::stopTouchingMemory() noexcept {
  to_self_.clear();
  links_.stopTouchingMemory();
}

void DataPlane::endAll(const Why& why) noexcept {
  stopTouchingMemory();
  const auto transfers = std::exchange(transfers_, {});
  watched_.endAll([&](Operation& operation) {
    endInProtocol(operation.request().id.id);
    end(operation, nullptr, why);
  });
  lane_.addBusy(-static_cast<int>(transfers.size()));
  for (const auto& entry : transfers) {
    endInProtocol(entry.first);
    end(entry.second->operation(), entry.second.get(), why);
  }
  messages_.endAll([&](Operation& operation) { end(operation, nullptr, why); });
  for (const auto& operation : std::exchange(refused_, {})) {
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
  if (end_.failure) {
    return;
  }
  end_.failure = recordInAnyCase(identity_, [&] { return cause; });
  end_.failed_at = Clock::now();
  links_.stop();
  const auto oldest = std::min_element(transfers_.begin(), transfers_.end(), [](const auto& a, const auto& b) {
    return a.second->operation().issuedAt() < b.second->operation().issuedAt();
  });
  const Operation* const message = messages_.oldest();
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

void DataPlane::close(const ErrorRecord& reason, std::function<void()> closed) noexcept {
  if (!end_.failure) {
    const Operation* const message = messages_.oldest();
    try {
      if (!transfers_.empty()) {
        notice(leftInTheMiddle(transfers_.begin()->second->operation(), identity_));
      } else if (message != nullptr && message->request().peer != PointToPoint::kAnyRank) {
        notice(leftInTheMiddle(*message, identity_));
      }
    } catch (...) { // no memory to say so: the others find that this rank has left
    }
  }
  end_.closing = recordInAnyCase(identity_, [&] { return reason; });
  end_.closed = std::move(closed);
  end_.close_at = Clock::now();
  if (end_.failure) {
    // News travels over other ranks' control links; a link that ends before it has arrived looks like a death.
    end_.close_at = std::max(end_.close_at, end_.failed_at + std::chrono::milliseconds(kNewsMs));
    return;
  }
  endAll([&](const Operation& operation, const Transfer*) { return errorOf(operation, reason, identity_); });
  if (links_.sayGoodbyes()) {
    end_.close_at = Clock::now() + std::chrono::milliseconds(links_.isClosing() ? kLastWordsMs : kGoodbyeMs);
  }
}

void DataPlane::onGoodbyesSaid() {
  end_.close_at = Clock::now() + std::chrono::milliseconds(kGoodbyeMs);
}

} // namespace pycomm
