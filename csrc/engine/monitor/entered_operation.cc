#include "engine/monitor/entered_operation.h"

#include <algorithm>
#include <utility>

namespace pycomm {
namespace {

// When an operation that waits asks all ranks. The first answers may be lost, or be true no more: so once more. And for the last time a
// little later than the patience of RollCall::standOff(), so that the answers find it over, also where the other rank counts from the
// first round.
constexpr std::chrono::milliseconds kFirstRound(200);
constexpr std::chrono::milliseconds kSecondRound(2000);
constexpr std::chrono::milliseconds kAfterPatience = kFirstRound + std::chrono::milliseconds(50);
constexpr int kRounds = 3;

// Not this shortly before the deadline: the answers that are there must do.
constexpr std::chrono::milliseconds kAnswerWithin(200);

} // namespace

void EnteredOperation::enter(const OperationId& id, const Descriptor& descriptor, Deadline deadline, TimePoint now) {
  id_ = id;
  descriptor_ = descriptor;
  deadline_ = deadline;
  since_ = now;
}

void EnteredOperation::came(int peer) {
  came_.insert(peer);
  const auto same = [&](const NotEntered& one) { return one.peer == peer; };
  missing_.erase(std::remove_if(missing_.begin(), missing_.end(), same), missing_.end());
}

void EnteredOperation::lacks(int peer, std::string last) {
  const auto earlier =
      std::find_if(missing_.begin(), missing_.end(), [&](const NotEntered& one) { return one.peer == peer; });
  if (earlier == missing_.end()) {
    missing_.push_back(NotEntered{peer, std::move(last)});
  } else {
    earlier->last = std::move(last);
  }
}

void EnteredOperation::progressed(TimePoint now) noexcept {
  since_ = now;
  missing_.clear();
}

std::optional<NotEntered> EnteredOperation::missing() const {
  if (missing_.empty()) {
    return std::nullopt;
  }
  return *std::min_element(
      missing_.begin(), missing_.end(), [](const NotEntered& a, const NotEntered& b) { return a.peer < b.peer; });
}

std::optional<NotEntered> EnteredOperation::missing(int peer) const {
  for (const NotEntered& entry : missing_) {
    if (entry.peer == peer) {
      return entry;
    }
  }
  return std::nullopt;
}

bool EnteredOperation::asksOnly(const std::vector<int>& ranks, TimePoint now) {
  asks_only_.emplace(ranks.begin(), ranks.end());
  told_waiting_ = true; // it has no edges
  if (asked_them_ || ranks.empty()) {
    return false;
  }
  since_ = now;
  asked_them_ = true;
  return true;
}

bool EnteredOperation::takeFirstQuestion(TimePoint now, const RollCallConfig& config) noexcept {
  if (told_waiting_ || waited(now) < std::chrono::milliseconds(config.waiting_after_ms)) {
    return false;
  }
  told_waiting_ = true;
  return true;
}

bool EnteredOperation::takeRound(TimePoint now, const RollCallConfig& config) noexcept {
  bool due = false;
  while (asksEveryone(config) && waited(now) >= nextRound(config)) {
    due = due || rounds_ == 0 || deadline_.instant() > now + kAnswerWithin;
    ++rounds_;
  }
  return due;
}

TimePoint EnteredOperation::nextQuestion(const RollCallConfig& config) const noexcept {
  if (!told_waiting_) {
    return firstQuestion(config);
  }
  return asksEveryone(config) ? since_ + nextRound(config) : TimePoint::max();
}

bool EnteredOperation::asksEveryone(const RollCallConfig& config) const noexcept {
  return asks() && rounds_ < kRounds && config.mayAskEveryone() && !isMessage();
}

std::chrono::milliseconds EnteredOperation::nextRound(const RollCallConfig& config) const noexcept {
  return rounds_ == 0 ? kFirstRound
      : rounds_ == 1  ? kSecondRound
                      : std::chrono::milliseconds(config.standoff_after_ms) + kAfterPatience;
}

} // namespace pycomm
