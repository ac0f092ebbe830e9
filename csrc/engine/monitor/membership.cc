#include "engine/monitor/membership.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// Lower comes first. What a rank can only see when it is itself the cause outranks what follows from it.
int causeClass(ErrorCode code) {
  switch (code) {
    case ErrorCode::CollectiveMismatch:
    case ErrorCode::ProtocolViolation:
    case ErrorCode::DataCorrupt:
    case ErrorCode::VersionMismatch:
    case ErrorCode::ConfigMismatch:
    case ErrorCode::DuplicateRank:
      return 0;
    case ErrorCode::PeerDead:
    case ErrorCode::PeerUnresponsive:
      return 1;
    case ErrorCode::OutOfMemory:
    case ErrorCode::TooManyFiles:
    case ErrorCode::SystemError:
    case ErrorCode::Internal:
    case ErrorCode::NoSharedMemory:
    case ErrorCode::Forked:
    case ErrorCode::InvalidArgument:
    case ErrorCode::Unsupported:
    case ErrorCode::RendezvousTimeout:
    case ErrorCode::StoreLost:
    case ErrorCode::NoInterface:
    case ErrorCode::PortsExhausted:
    case ErrorCode::QuorumLost: // these three come from no group
    case ErrorCode::LeftBehind:
    case ErrorCode::JoinRefused:
      return 2;
    case ErrorCode::ConnectFailed:
    case ErrorCode::ConnectionReset:
      return 3;
    case ErrorCode::Aborted:
    case ErrorCode::ShutDown:
    case ErrorCode::PeerLeft:
      return 4;
    case ErrorCode::Timeout:
    case ErrorCode::Ok:
      return 5;
  }
  return 6;
}

bool blamesHangingUp(ErrorCode code) {
  return code == ErrorCode::PeerDead || code == ErrorCode::ConnectionReset || code == ErrorCode::ConnectFailed ||
      code == ErrorCode::PeerLeft;
}

} // namespace

Membership::Membership(Config config, TimePoint now)
    : config_(std::move(config)),
      ranks_(config_.hosts.size()),
      heartbeat_at_(now + std::chrono::milliseconds(config_.heartbeat_every_ms)) {
  for (const int rank : config_.neighbours) {
    Rank& neighbour = ranks_.at(static_cast<size_t>(rank));
    neighbour.is_neighbour = true;
    neighbour.heard_at = now;
  }
}

bool Membership::isSameNews(const ErrorRecord& a, const ErrorRecord& b) noexcept {
  return a.code == b.code && a.rank == b.rank && a.peer == b.peer;
}

bool Membership::precedes(const ErrorRecord& a, const ErrorRecord& b) {
  // A deadline that can say who never came is better evidence than one that only saw a neighbour wait; best is who knows why it has
  // not come itself.
  const auto vagueness = [](const ErrorRecord& r) {
    if (r.code != ErrorCode::Timeout || r.phase == ErrorPhase::CopyToHost) {
      return 0;
    }
    return r.phase == ErrorPhase::NotEntered ? 1 : 2;
  };
  const auto key = [&](const ErrorRecord& r) {
    return std::make_tuple(
        causeClass(r.code), vagueness(r), r.peer < 0 ? r.rank : r.peer, r.rank, static_cast<int>(r.code));
  };
  return key(a) < key(b);
}

void Membership::sign(ErrorRecord& record, int peer) const {
  record.rank = config_.job.of(config_.rank);
  record.host = config_.hosts[static_cast<size_t>(config_.rank)];
  record.peer = config_.job.of(peer);
  record.peer_host = config_.hosts[static_cast<size_t>(peer)];
  record.group = config_.group;
}

Membership::Rank* Membership::neighbour(int rank) noexcept {
  return isNeighbour(rank) ? find(rank) : nullptr;
}

void Membership::spoke(int rank) noexcept {
  if (Rank* const found = find(rank)) {
    found->spoke = true;
  }
}

bool Membership::hasSpoken(int rank) const noexcept {
  const Rank* const found = find(config_.job.inGroup(rank));
  return found != nullptr && found->spoke;
}

void Membership::flood(const ErrorRecord& record, int except) {
  Action flood;
  flood.kind = Action::Kind::Flood;
  flood.except = except;
  flood.record = record;
  actions_.push_back(std::move(flood));
}

void Membership::learn(ErrorRecord record, int from, TimePoint now) {
  if (failure_ || isExplained(record)) {
    return;
  }
  if (now >= decideAt()) {
    // The choice is due: a rank whose thread comes to it late must not choose from more than the others, nor excuse more ranks. But a goodbye
    // may come before the choice and leave nothing to choose.
    const auto same = [&](const Late& known) {
      return isSameNews(known.record, record) && mayHaveLeft(known.record) == mayHaveLeft(record);
    };
    if (std::none_of(late_.begin(), late_.end(), same)) {
      late_.push_back(Late{std::move(record), from, now});
    }
    return;
  }
  spoke(config_.job.inGroup(record.rank));
  spoke(from); // a rank that passes news on hangs up because of it
  for (Candidate& known : candidates_) {
    if (isSameNews(known.record, record)) {
      if (known.mayHaveLeft() && !mayHaveLeft(record)) {
        confirm(known, from, now);
      }
      return; // else it is the same news by another way
    }
  }
  const bool mismatch = record.code == ErrorCode::CollectiveMismatch;
  const auto merge = std::chrono::milliseconds(mismatch ? config_.merge_mismatches_ms : config_.merge_ms);
  const TimePoint due = now + (mayHaveLeft(record) ? kGoodbyeWithin : merge);
  candidates_.reserve(candidates_.size() + 1); // all or nothing, also without memory
  flood(record, from);
  candidates_.push_back(Candidate{std::move(record), due});
}

// Copies: without memory the record stays, and the next tick goes on.
void Membership::learnLate() {
  while (!late_.empty() && late_.front().came_at < decideAt()) {
    const Late& late = late_.front();
    learn(late.record, late.from, late.came_at);
    late_.erase(late_.begin());
  }
}

// The other ranks have had time for their own news since the report of a reset: so this makes the choice earlier and never later.
void Membership::confirm(Candidate& known, int from, TimePoint now) {
  ErrorRecord certain = known.record;
  certain.phase = ErrorPhase::Unknown;
  flood(certain, from);
  known.due = std::min(decideAt(), now + std::chrono::milliseconds(config_.merge_ms));
  known.record = std::move(certain);
}

// The first certain candidate opens the merge window, and later ones do not extend it. If all are in doubt, the oldest has had its time.
TimePoint Membership::decideAt() const noexcept {
  if (failure_ || candidates_.empty()) {
    return TimePoint::max();
  }
  const auto certain = std::find_if(
      candidates_.begin(), candidates_.end(), [](const Candidate& candidate) { return !candidate.mayHaveLeft(); });
  return certain == candidates_.end() ? candidates_.front().due : certain->due;
}

// A rank that has said goodbye on a control link has left in order, even if one of its bulk links ended without a goodbye: a leaving rank
// cannot say one there to a rank that does not read for longer than it waits. Operations for which it still owed data end as they do for
// any rank that has left.
bool Membership::isExplained(const ErrorRecord& record) const {
  return record.code == ErrorCode::PeerDead && record.peer != config_.job.of(config_.rank) &&
      hasLeft(config_.job.inGroup(record.peer));
}

void Membership::dropExplained() noexcept {
  const auto explained = [this](const Candidate& candidate) { return isExplained(candidate.record); };
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), explained), candidates_.end());
  if (candidates_.empty()) {
    for (Rank& rank : ranks_) {
      rank.spoke = false; // of what follows it is not excused
    }
  }
}

bool Membership::doubts(int peer) const noexcept {
  return std::any_of(candidates_.begin(), candidates_.end(), [&](const Candidate& candidate) {
    return candidate.mayHaveLeft() && isOwn(candidate.record) && candidate.record.peer == config_.job.of(peer);
  });
}

std::vector<ErrorRecord> Membership::news() const {
  if (failure_) {
    return {*failure_};
  }
  std::vector<ErrorRecord> found;
  for (const Candidate& candidate : candidates_) {
    found.push_back(candidate.record);
  }
  return found;
}

void Membership::noticed(ErrorRecord record, TimePoint now) {
  learn(std::move(record), -1, now);
}

void Membership::doubted(ErrorRecord record, TimePoint now) {
  const Rank* const peer = neighbour(config_.job.inGroup(record.peer));
  if (peer != nullptr && peer->connected && !peer->over) {
    learn(std::move(record), -1, now);
  }
}

void Membership::reported(int from, ErrorRecord record, TimePoint now) {
  alive(from, now);
  learn(std::move(record), from, now);
}

void Membership::alive(int from, TimePoint now) {
  if (Rank* const rank = neighbour(from)) {
    rank->heard_at = now;
    rank->connected = true;
  }
}

bool Membership::saidGoodbye(int peer, int from) {
  if (hasLeft(peer)) {
    return false;
  }
  Rank& rank = ranks_.at(static_cast<size_t>(peer));
  rank.left = rank.over = true; // before anything that needs memory: it must not be lost
  if (failure_) {
    if (failure_->peer == config_.job.of(peer) && isExplained(*failure_)) {
      // This rank took the departure for a death. Ranks that learned of the goodbye in time have dropped that report, and must fail, too.
      ErrorRecord left = *failure_;
      left.code = ErrorCode::PeerLeft;
      left.summary = "Rank " + std::to_string(left.peer) + " on " + left.peer_host +
          " closed its process group, and rank " + std::to_string(left.rank) + " took that for the end of its process.";
      left.hint =
          "that rank left while others were still connecting or working; call barrier() before the end of the program";
      left.cause.clear();
      flood(left, -1);
    }
    return true;
  }
  dropExplained();
  Action news;
  news.kind = Action::Kind::Left;
  news.except = from;
  news.left = peer;
  actions_.push_back(std::move(news));
  return true;
}

void Membership::willLeave(int peer, const ErrorRecord& why, int from) {
  std::unique_ptr<const ErrorRecord>& because = ranks_.at(static_cast<size_t>(peer)).leaves_because;
  if (because != nullptr) {
    return;
  }
  auto known = std::make_unique<const ErrorRecord>(why);
  Action news;
  news.kind = Action::Kind::Leaving;
  news.except = from;
  news.left = peer;
  news.record = why;
  actions_.push_back(std::move(news));
  because = std::move(known);
}

bool Membership::isSilent(int peer, TimePoint now) const noexcept {
  const Rank* const rank = find(peer);
  return rank != nullptr && rank->is_neighbour &&
      now - rank->heard_at > std::chrono::milliseconds(2 * config_.heartbeat_every_ms);
}

std::vector<TimePoint> Membership::heardAt() const {
  std::vector<TimePoint> found;
  for (const Rank& rank : ranks_) {
    found.push_back(rank.is_neighbour && rank.connected && !rank.left ? rank.heard_at : TimePoint::max());
  }
  return found;
}

void Membership::controlClosed(int peer, const std::string& cause, TimePoint now, bool broke) {
  Rank* const rank = neighbour(peer);
  if (rank == nullptr || rank->left || (rank->over && (broke || !doubts(peer)))) {
    return; // a neighbour that has left, or whose end has been reported
  }
  rank->over = true;
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  sign(record, peer);
  record.cause = cause;
  record.summary =
      "Rank " + std::to_string(record.peer) + " on " + record.peer_host + " is gone: its process ended or was killed.";
  record.hint = kWhyItEnded;
  record.phase = broke ? ErrorPhase::Reset : ErrorPhase::Unknown;
  learn(std::move(record), -1, now);
}

void Membership::choose() {
  // A rank that was stopped finds, when it wakes, that everybody has gone: because of its own silence.
  const auto was_silent = [&](int rank) {
    return std::any_of(candidates_.begin(), candidates_.end(), [&](const Candidate& candidate) {
      const ErrorRecord& r = candidate.record;
      return r.code == ErrorCode::PeerUnresponsive && r.peer == rank && r.rank != rank;
    });
  };
  const auto excused = [&](const ErrorRecord& r) {
    return blamesHangingUp(r.code) && r.peer >= 0 && r.peer != r.rank && (hasSpoken(r.peer) || was_silent(r.rank));
  };
  // Where one rank calls something else than all others, they all blame it, and it blames any of them.
  const auto blamed = [&](const ErrorRecord& of) {
    return std::count_if(candidates_.begin(), candidates_.end(), [&](const Candidate& candidate) {
      return candidate.record.code == of.code && candidate.record.peer == of.peer;
    });
  };
  const auto before = [&](const ErrorRecord& a, const ErrorRecord& b) {
    const bool disagree = a.code == ErrorCode::CollectiveMismatch && b.code == a.code && blamed(a) != blamed(b);
    return disagree ? blamed(a) > blamed(b) : precedes(a, b);
  };
  const ErrorRecord* best = nullptr;
  for (const Candidate& candidate : candidates_) {
    if (!excused(candidate.record) && (best == nullptr || before(candidate.record, *best))) {
      best = &candidate.record;
    }
  }
  // Ranks that blame each other for silence, and nothing else: then the order alone decides.
  for (const Candidate& candidate : candidates_) {
    if (best == nullptr || (excused(*best) && precedes(candidate.record, *best))) {
      best = &candidate.record;
    }
  }
  ErrorRecord chosen = *best;
  if (mayHaveLeft(chosen)) {
    chosen.phase = ErrorPhase::Unknown; // no goodbye came
  }
  Action fail;
  fail.kind = Action::Kind::Fail;
  const Rank* const culprit = find(config_.job.inGroup(chosen.peer));
  const bool explained = chosen.code == ErrorCode::PeerLeft && culprit != nullptr && culprit->leaves_because != nullptr;
  fail.record = explained ? leftBecause(chosen, *culprit->leaves_because) : chosen;
  actions_.push_back(std::move(fail)); // the last that can throw: then the next tick chooses once more
  failure_ = std::move(chosen);
  late_.clear();
}

void Membership::tick(TimePoint now) {
  learnLate();
  if (decideAt() <= now) {
    choose();
  }
  if (heartbeat_at_ <= now) {
    // A tick that comes late: this process did not run for a time (a debugger, a paused container, a host that slept), and received
    // nothing because it did not read. If the whole group slept, no rank is to blame. The next heartbeat waits until this process has
    // read what arrived in that time: the others may have left, and a heartbeat to them would only bring a reset.
    if (const auto late = now - heartbeat_at_; late >= std::chrono::milliseconds(config_.heartbeat_every_ms)) {
      for (Rank& rank : ranks_) {
        rank.heard_at = std::min(now, rank.heard_at + late);
      }
      heartbeat_at_ = now + std::chrono::milliseconds(config_.merge_ms);
      return;
    }
    heartbeat_at_ = now + std::chrono::milliseconds(config_.heartbeat_every_ms);
    Action beat;
    beat.kind = Action::Kind::Heartbeat;
    actions_.push_back(std::move(beat));
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      if (rank.over || !rank.connected || now - rank.heard_at < std::chrono::milliseconds(config_.dead_after_ms)) {
        continue;
      }
      // If every other neighbour is silent as well, this rank itself receives nothing: to blame the first of them would
      // be wrong.
      const auto lately = now - std::chrono::milliseconds(config_.dead_after_ms / 2);
      const auto counts = [&](const Rank& other) { return &other != &rank && other.connected && !other.over; };
      const bool others = std::any_of(ranks_.begin(), ranks_.end(), counts);
      const bool heard = std::any_of(
          ranks_.begin(), ranks_.end(), [&](const Rank& other) { return counts(other) && other.heard_at > lately; });
      rank.over = true;
      ErrorRecord record;
      record.code = ErrorCode::PeerUnresponsive;
      if (others && !heard) {
        noticed(cutOff(std::move(record), now - rank.heard_at), now);
        break;
      }
      sign(record, static_cast<int>(i));
      record.elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - rank.heard_at).count();
      record.summary = "Rank " + std::to_string(record.peer) + " on " + record.peer_host + " has been silent for " +
          std::to_string(record.elapsed_ms) + " ms: its process is stopped, or its host or the network is down.";
      record.hint = "check that host and the cable or switch to it; a debugger or Ctrl-Z also stops a rank";
      noticed(std::move(record), now);
    }
  }
}

ErrorRecord Membership::cutOff(ErrorRecord record, TimePoint::duration silence) const {
  sign(record, config_.rank);
  record.elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(silence).count();
  record.summary = "Rank " + std::to_string(record.rank) + " on " + record.host + " has heard nobody for " +
      std::to_string(record.elapsed_ms) + " ms: its own host or network is cut off.";
  record.hint = "check that host's cable, interface and firewall";
  return record;
}

TimePoint Membership::nextTick() const noexcept {
  const TimePoint late = late_.empty() ? TimePoint::max() : late_.front().came_at;
  return std::min({decideAt(), heartbeat_at_, late});
}

std::vector<Membership::Action> Membership::takeActions() {
  return std::exchange(actions_, {});
}

std::vector<int> controlNeighbours(int rank, int size, const std::vector<int>& local_ranks) {
  std::set<int> ranks;
  for (int distance = 1; distance < size; distance *= 2) {
    ranks.insert((rank + distance) % size);
    ranks.insert((rank - distance + size) % size);
  }
  const auto self = std::find(local_ranks.begin(), local_ranks.end(), rank);
  if (self != local_ranks.end()) {
    ranks.insert(self == local_ranks.begin() ? local_ranks.back() : *(self - 1));
    ranks.insert(self + 1 == local_ranks.end() ? local_ranks.front() : *(self + 1));
  }
  ranks.erase(rank);
  return {ranks.begin(), ranks.end()};
}

} // namespace pycomm
