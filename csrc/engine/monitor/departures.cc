#include "engine/monitor/departures.h"

#include <algorithm>

#include "engine/operation/operation.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// How long a link may take that the peer opened before it left.
constexpr std::chrono::milliseconds kLinkWithin(3000);

} // namespace

Departures::Departures(GroupIdentity identity, const Dealings& dealings)
    : identity_(std::move(identity)),
      dealings_(dealings),
      presence_(static_cast<size_t>(identity_.size), Presence::Here) {}

void Departures::notice(ErrorRecord record) {
  actions_.push_back(Action{Action::Kind::Notice, std::move(record)});
}

void Departures::saidGoodbye(int peer, TimePoint now) {
  Presence& presence = presence_[static_cast<size_t>(peer)];
  away_ += presence == Presence::Here ? 1 : 0;
  presence = Presence::Left;
  lost_.erase(peer);
  suspicions_.erase(peer);
  check(peer, now);
  checkAnyone(peer, now);
}

void Departures::readingEnded(int peer, ErrorRecord gone, TimePoint now) {
  if (presence_[static_cast<size_t>(peer)] != Presence::Left) {
    notice(std::move(gone));
    return;
  }
  if (gone.code == ErrorCode::DataCorrupt) { // the peer had sent all that was due
    if (dealings_.awaitingAnyone() != nullptr) { // perhaps for what was changed
      notice(gone);
    }
    changed_.emplace(peer, std::move(gone));
  }
  saidGoodbye(peer, now); // what waited for this link waits in vain
}

void Departures::writingBroke(int peer, ErrorRecord gone, TimePoint now) {
  if (presence_[static_cast<size_t>(peer)] == Presence::Left) {
    saidGoodbye(peer, now); // what is queued for it will not leave
  } else {
    suspicions_.emplace(peer, Suspicion{Suspicion::State::AwaitsGoodbye, std::move(gone), now + kGoodbyeWithin});
  }
}

void Departures::posted(const PreparedSchedule* schedule, bool receives, TimePoint now) {
  if (away_ == 0) {
    return;
  }
  const auto needs = [&](int peer) {
    const auto to = [&](const Edge& edge) { return edge.peer == peer; };
    return schedule != nullptr &&
        (std::any_of(schedule->incoming.begin(), schedule->incoming.end(), to) ||
         std::any_of(schedule->outgoing.begin(), schedule->outgoing.end(), to));
  };
  int first = -1;
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (isAway(peer)) {
      first = first < 0 ? peer : first;
      if (needs(peer)) { // what earlier operations need was checked when they were posted, or when the peer went
        check(peer, now);
      }
    }
  }
  if (receives) { // else a receive that waits has been checked: again, it would take a lost peer for one that left
    checkAnyone(first, now);
  }
}

// Of a peer that has left or is lost: whether an operation still needs it.
void Departures::check(int peer, TimePoint now) {
  const Operation* const owing = dealings_.owing(peer);
  const Operation* const awaiting = dealings_.awaiting(peer);
  const Reading reading = dealings_.reading(peer);
  const auto lost = lost_.find(peer);
  const bool missed = awaiting != nullptr && reading == Reading::Ended;
  if (owing != nullptr && lost != lost_.end()) {
    notice(lost->second); // the peer is still there: the link broke
  } else if (owing != nullptr || missed) {
    const bool missed_first = missed && (owing == nullptr || awaiting->issuedAt() < owing->issuedAt());
    const auto changed = missed_first ? changed_.find(peer) : changed_.end();
    notice(
        changed != changed_.end() ? changed->second : peerLeftUs(peer, missed_first ? *awaiting : *owing, identity_));
  } else if (awaiting != nullptr && reading == Reading::NotOpened) {
    suspicions_.emplace(
        peer, Suspicion{Suspicion::State::AwaitsLink, peerLeftUs(peer, *awaiting, identity_), now + kLinkWithin});
  }
}

// A receive from any rank can be served as long as a rank is there, or a link may bring a message that was sent before its sender left:
// a goodbye on the control link may even arrive before the Hello of that link.
void Departures::checkAnyone(int left, TimePoint now) {
  const Operation* const receive = withoutSenders();
  if (receive == nullptr) {
    return;
  }
  bool on_its_way = false;
  for (int peer = 0; peer < identity_.size; ++peer) {
    on_its_way = on_its_way || (peer != identity_.rank && dealings_.reading(peer) == Reading::NotOpened);
  }
  ErrorRecord record = changed_.empty() ? peerLeftUs(left, *receive, identity_) : changed_.begin()->second;
  if (!on_its_way) {
    notice(std::move(record));
    return;
  }
  const auto found = suspicions_.find(left);
  if (found == suspicions_.end() || found->second.state == Suspicion::State::Doubted) {
    suspicions_.insert_or_assign(left, Suspicion{Suspicion::State::AwaitsLink, std::move(record), now + kLinkWithin});
  }
}

// A receive from any rank that waits although all other ranks have left and none of their links is open; null if there is none.
const Operation* Departures::withoutSenders() const noexcept {
  if (away_ != static_cast<size_t>(identity_.size) - 1) {
    return nullptr;
  }
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (dealings_.reading(peer) == Reading::Open) {
      return nullptr;
    }
  }
  return dealings_.awaitingAnyone();
}

// A broken link to a peer matters only if something has still to go out on it. The peer sends on a link of its own, and the end of that
// link is better evidence. If the peer died, the ranks with a control link to it report that.
void Departures::decide(int peer, Suspicion suspicion, TimePoint now) {
  if (suspicion.state == Suspicion::State::Doubted) {
    actions_.push_back(Action{Action::Kind::Doubt, std::move(suspicion.record)});
    checkAnyone(peer, now);
    return;
  }
  const Reading reading = dealings_.reading(peer);
  if (suspicion.record.code == ErrorCode::PeerLeft) {
    if (reading == Reading::Open) {
      return; // the link has arrived, and its end will be reported
    }
    if (const Operation* const receive = withoutSenders()) {
      notice(peerLeftUs(peer, *receive, identity_));
      return;
    }
  }
  if (dealings_.owing(peer) == nullptr) {
    const bool due = dealings_.awaiting(peer) != nullptr;
    if (!due) {
      lose(peer, suspicion.record, suspicion.due + kLinkWithin);
      return;
    }
    // The peer's link may be on its way, or still bring what is due. But the peer may wait for credit that went on the broken link.
    if (suspicion.state == Suspicion::State::AwaitsGoodbye && reading != Reading::Ended) {
      suspicion.state = Suspicion::State::AwaitsLink;
      suspicion.due += kLinkWithin;
      suspicions_.emplace(peer, std::move(suspicion));
      return;
    }
  }
  notice(std::move(suspicion.record));
}

// Nothing is due in either direction. Either the peer was only asked whether it has entered an operation, and has ended since. Or a
// message had left and is lost, and the rank that waits for it would wait for ever.
void Departures::lose(int peer, const ErrorRecord& broke, TimePoint doubt_at) {
  Presence& presence = presence_[static_cast<size_t>(peer)];
  away_ += presence == Presence::Here ? 1 : 0;
  presence = Presence::Lost;
  ErrorRecord lost = linkLost(peer, broke, identity_);
  lost_.insert_or_assign(peer, lost);
  suspicions_.emplace(peer, Suspicion{Suspicion::State::Doubted, std::move(lost), doubt_at});
}

void Departures::tick(TimePoint now) {
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
    decide(entry.first, std::move(entry.second), now);
  }
}

TimePoint Departures::nextTick() const noexcept {
  TimePoint next = TimePoint::max();
  for (const auto& entry : suspicions_) {
    next = std::min(next, entry.second.due);
  }
  return next;
}

} // namespace pycomm
