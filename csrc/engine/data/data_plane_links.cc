// The data plane and its links: what leaves, what has left, how links end.
#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "engine/data/data_plane.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// Operations that expect more than this are not looked for.
constexpr int64_t kLookNbytes = 256 << 10;
// Nor is any if more than this are under way.
constexpr size_t kLookOperations = 64;

} // namespace

void DataPlane::push(int peer, OutFrame frame) {
  if (!end_.running()) {
    return;
  }
  if (peer == identity_.rank) {
    to_self_.push_back(std::move(frame));
  } else {
    links_.send(peer, std::move(frame));
  }
}

void DataPlane::flush() {
  while (!end_.failure) {
    if (!to_self_.empty()) {
      deliverToSelf();
    } else if (!links_.flush()) {
      return;
    }
  }
}

void DataPlane::onSent(const std::vector<OutFrame>& frames) {
  for (const OutFrame& frame : frames) {
    PYCOMM_FAULT_POINT("frame.written");
    const auto found = frame.step < 0 ? transfers_.end() : transfers_.find(frame.header.op_id);
    if (found != transfers_.end()) {
      found->second->sent(static_cast<uint32_t>(frame.step));
      settle(frame.header.op_id);
    }
  }
  act();
}

void DataPlane::shareRings(HostRings rings) {
  links_.shareRings(std::move(rings));
}

void DataPlane::useRings(bool all_have_them) {
  guarded(-1, [&] { links_.useRings(all_have_them); });
}

void DataPlane::adopt(int peer, std::unique_ptr<Link> link, int stream) {
  guarded(peer, [&] {
    if (end_.running()) {
      links_.adopt(peer, std::move(link), stream);
    }
  });
}

void DataPlane::adoptShared(int peer, std::unique_ptr<Link> link) {
  guarded(peer, [&] {
    if (end_.running()) {
      links_.adoptShared(peer, std::move(link));
    }
  });
}

// Only small operations: a large one's bytes are better read when many have come.
Loop::Ticker::Look DataPlane::look() {
  if (transfers_.size() > kLookOperations) {
    return Look::Nothing; // looking for so many costs more than asking the kernel
  }
  looked_.clear(); // reading may change transfers_
  for (const auto& entry : transfers_) {
    if (entry.second->bytesExpected() > kLookNbytes) {
      continue;
    }
    for (const Edge& edge : entry.second->incoming()) {
      if (entry.second->needsFrom(edge.peer)) {
        looked_.push_back(edge.peer);
      }
    }
  }
  for (int peer = 0; messages_.receives() && peer < identity_.size; ++peer) {
    if (messages_.waitsFor(peer)) {
      looked_.push_back(peer);
    }
  }
  return links_.look(looked_);
}

void DataPlane::onReadingEnded(int peer, const Error& error) {
  departures_.readingEnded(peer, brokenLink(peer, error), Clock::now());
  actOnDepartures();
}

void DataPlane::onWritingBroke(int peer, const Error& error) {
  if (isOwnTrouble(error.record().code)) { // no memory, no descriptors: the peer has nothing to do with it
    notice(ownTrouble(std::make_exception_ptr(error), identity_));
    return;
  }
  departures_.writingBroke(peer, brokenLink(peer, error), Clock::now());
  actOnDepartures();
}

ErrorRecord DataPlane::brokenLink(int peer, const Error& error) const {
  ErrorRecord record = peerGone(peer, error.record(), identity_);
  if (record.cause.empty()) {
    record.cause = error.record().summary;
  }
  return record;
}

void DataPlane::peerLeft(int peer) {
  departures_.saidGoodbye(peer, Clock::now());
  actOnDepartures();
}

void DataPlane::actOnDepartures() {
  for (Departures::Action& action : departures_.takeActions()) {
    switch (action.kind) {
      case Departures::Action::Kind::Notice:
        notice(std::move(action.record));
        break;
      case Departures::Action::Kind::Doubt:
        if (end_.running()) {
          events_.doubted(std::move(action.record));
        }
        break;
    }
  }
}

// ---- what departures ask

Departures::Reading DataPlane::reading(int peer) const noexcept {
  if (!links_.isOpened(peer)) {
    return Departures::Reading::NotOpened;
  }
  return links_.isReading(peer) ? Departures::Reading::Open : Departures::Reading::Ended;
}

const Operation* DataPlane::owing(int peer) const noexcept {
  for (const auto& entry : transfers_) {
    if (entry.second->owes(peer)) {
      return &entry.second->operation();
    }
  }
  return messages_.firstTo(peer);
}

const Operation* DataPlane::awaiting(int peer) const noexcept {
  for (const auto& entry : transfers_) {
    if (entry.second->needsFrom(peer)) {
      return &entry.second->operation();
    }
  }
  return messages_.firstFrom(peer);
}

const Operation* DataPlane::awaitingAnyone() const noexcept {
  return messages_.firstFrom(PointToPoint::kAnyRank);
}

} // namespace pycomm
