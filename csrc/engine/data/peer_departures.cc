#include "engine/data/peer_departures.h"

#include <exception>
#include <utility>

#include "engine/report/failure_text.h"

namespace pycomm {

// ---- events

void PeerDepartures::saidGoodbye(int peer) {
  departures_.saidGoodbye(peer, Clock::now());
  report();
}

void PeerDepartures::readingEnded(int peer, const Error& error) {
  departures_.readingEnded(peer, brokenLink(peer, error), Clock::now());
  report();
}

void PeerDepartures::writingBroke(int peer, const Error& error) {
  if (isOwnTrouble(error.record().code)) { // no memory, no descriptors: the peer has nothing to do with it
    reporter_.notice(ownTrouble(std::make_exception_ptr(error), identity_));
    return;
  }
  departures_.writingBroke(peer, brokenLink(peer, error), Clock::now());
  report();
}

void PeerDepartures::posted(const PreparedSchedule* schedule, bool receives, TimePoint now) {
  departures_.posted(schedule, receives, now);
  report();
}

void PeerDepartures::tick(TimePoint now) {
  departures_.tick(now);
  report();
}

ErrorRecord PeerDepartures::brokenLink(int peer, const Error& error) const {
  ErrorRecord record = peerGone(peer, error.record(), identity_);
  if (record.cause.empty()) {
    record.cause = error.record().summary;
  }
  return record;
}

void PeerDepartures::report() {
  for (Departures::Action& action : departures_.takeActions()) {
    switch (action.kind) {
      case Departures::Action::Kind::Notice:
        reporter_.notice(std::move(action.record));
        break;
      case Departures::Action::Kind::Doubt:
        reporter_.doubt(std::move(action.record));
        break;
    }
  }
}

// ---- what Departures asks

Departures::Reading PeerDepartures::reading(int peer) const noexcept {
  if (!links_.isOpened(peer)) {
    return Departures::Reading::NotOpened;
  }
  return links_.isReading(peer) ? Departures::Reading::Open : Departures::Reading::Ended;
}

const Operation* PeerDepartures::owing(int peer) const noexcept {
  for (const auto& entry : tables_.entered) {
    const EdgeRow* const edge = entry.second.to(peer);
    if (edge != nullptr && edge->done < edge->frames) {
      return entry.second.operation.get();
    }
  }
  return messages_.firstTo(peer);
}

const Operation* PeerDepartures::awaiting(int peer) const noexcept {
  for (const auto& entry : tables_.entered) {
    const EdgeRow* const edge = entry.second.from(peer);
    if (edge != nullptr && edge->done < edge->frames) {
      return entry.second.operation.get();
    }
  }
  return messages_.firstFrom(peer);
}

const Operation* PeerDepartures::awaitingAnyone() const noexcept {
  return messages_.firstFrom(PointToPoint::kAnyRank);
}

} // namespace pycomm
