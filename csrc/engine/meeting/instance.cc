#include "engine/meeting/instance.h"

#include <algorithm>
#include <new>
#include <utility>

namespace pycomm {

Instance::Instance(int64_t uuid, std::vector<MemberHandle> members, JobRanks job)
    : uuid_(uuid),
      members_(std::move(members)),
      job_(std::move(job)),
      name_(instanceOf(uuid_, members_)),
      entered_(members_.size()),
      told_(members_.size()),
      ready_(members_.size()) {}

std::string Instance::who(int rank) const {
  return job_.text(rank) + " of the new group (" + member(rank).who() + ")";
}

ErrorRecord Instance::trouble(ErrorCode code, int rank, const std::string& says, const std::string& hint) const {
  ErrorRecord record;
  record.code = code;
  record.peer = job_.of(rank);
  record.peer_host = member(rank).host.hostname;
  record.summary = "reconfigure(uuid=" + std::to_string(uuid_) + "): " + who(rank) + " " + says;
  record.hint = hint;
  record.phase = ErrorPhase::Rendezvous;
  return record;
}

void Instance::throwIfFailed() const {
  if (failure_) {
    throw Error(*failure_);
  }
}

void Instance::reserve(size_t nbytes) {
  if (nbytes > kMaxStored - stored_) {
    throw Error(ErrorCode::ProtocolViolation, "the members of a meeting have written more than any group needs");
  }
  stored_ += nbytes;
}

void Instance::set(const std::string& key, std::string value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfFailed();
  reserve(key.size() + value.size());
  values_[key] = std::move(value);
}

std::optional<std::string> Instance::find(const std::string& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfFailed();
  const auto found = values_.find(key);
  return found == values_.end() ? std::nullopt : std::optional<std::string>(found->second);
}

bool Instance::has(const std::string& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfFailed();
  return values_.count(key) != 0;
}

int64_t Instance::add(const std::string& key, int64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfFailed();
  const auto counter = counters_.find(key);
  const bool fresh = counter == counters_.end();
  int64_t sum = 0;
  if (__builtin_add_overflow(fresh ? 0 : counter->second, amount, &sum)) {
    throw Error(ErrorCode::ProtocolViolation, "a member of a meeting adds more than a counter holds");
  }
  if (fresh) {
    reserve(key.size());
  }
  return counters_[key] = sum;
}

bool Instance::remove(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfFailed();
  return values_.erase(key) + counters_.erase(key) > 0;
}

Instance::Ready Instance::ready(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  throwIfFailed();
  const auto index = static_cast<size_t>(rank);
  if (!ready_.at(index)) {
    ready_[index] = true;
    ++ready_count_;
  }
  Ready ready;
  ready.count = ready_count_;
  const auto missing = std::find(ready_.begin(), ready_.end(), false);
  ready.first_missing = missing == ready_.end() ? -1 : static_cast<int>(missing - ready_.begin());
  return ready;
}

bool Instance::enter(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool before = entered_.at(static_cast<size_t>(rank));
  entered_[static_cast<size_t>(rank)] = true;
  return !before;
}

bool Instance::hasEntered(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entered_.at(static_cast<size_t>(rank));
}

void Instance::left(int rank, bool knows_that_it_entered) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  entered_[static_cast<size_t>(rank)] = false;
  if (failure_ || isComplete() || !knows_that_it_entered) {
    return;
  }
  try {
    failure_ = trouble(
        ErrorCode::PeerDead,
        rank,
        "hung up before all members were ready: its process has ended, or a link to it broke",
        "look for the first error in that process's log; leave its handle out and call reconfigure() again with a new uuid");
  } catch (const std::bad_alloc&) {
    failure_ = noMemoryLeft();
    failure_->peer = job_.of(rank);
  }
}

bool Instance::fail(const ErrorRecord& cause) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_ && !isComplete()) {
    failure_ = cause;
  }
  return failure_.has_value();
}

void Instance::told(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  told_.at(static_cast<size_t>(rank)) = true;
}

bool Instance::allTold() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t rank = 1; rank < entered_.size(); ++rank) {
    if (entered_[rank] && !told_[rank]) {
      return false;
    }
  }
  return true;
}

std::optional<ErrorRecord> Instance::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool Instance::complete() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return isComplete();
}

void Instance::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  values_.clear();
  counters_.clear();
}

} // namespace pycomm
