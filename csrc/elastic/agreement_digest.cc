#include "elastic/agreement.h"

namespace pycomm::elastic {
namespace {

/// Adds up one field after the other.
class Digest {
 public:
  template <typename Number>
  Digest& operator<<(const Number& value) noexcept {
    digest_ = mixed(digest_, static_cast<uint64_t>(value));
    return *this;
  }
  Digest& operator<<(const Incarnation& of) noexcept {
    return *this << of.high << of.low;
  }
  Digest& operator<<(const MemberSet& set) noexcept {
    for (size_t i = set._Find_first(); i < kMaxMembers; i = set._Find_next(i)) {
      *this << i;
    }
    return *this << kMaxMembers;
  }
  Digest& operator<<(const StepState& step) noexcept {
    return *this << step.committed << step.launched << step.finished;
  }
  Digest& operator<<(const std::optional<Accepted>& accepted) noexcept {
    return accepted ? *this << accepted->ballot.number() << accepted->next.id() : *this << 0;
  }
  Digest& operator<<(const std::vector<Incarnation>& list) noexcept {
    for (const Incarnation& of : list) {
      *this << of;
    }
    return *this << list.size();
  }
  Digest& operator<<(const Message& promise) noexcept {
    *this << promise.step << promise.leaving << promise.reach << promise.newcomers << promise.accepted;
    return *this;
  }
  [[nodiscard]] uint64_t value() const noexcept {
    return digest_;
  }

 private:
  uint64_t digest_ = 0;
};

} // namespace

uint64_t Agreement::digest() const {
  Digest out;
  const auto time = [&](TimePoint at) { out << (at == TimePoint::max() ? -1 : (at - now_).count()); };
  out << phase_ << view_id_ << step_ << awaits_step_ << leaving_ << raised_ << cause_ << sealed_ << nonce_ << round_
      << loaded_ << asked_view_ << loaded_view_;
  out << reach_ << newcomers_reached_ << fellows_ << contacts_ << promised_.number() << accepted_;
  for (const View& view : past_) {
    out << view.id();
  }
  if (culprit_) {
    out << *culprit_;
  }
  for (const auto& [of, suspicion] : suspects_) {
    out << 1 << of << suspicion.code << (suspicion.nonce < nonce_);
  }
  for (const Incarnation& of : rumours_) {
    out << 2 << of;
  }
  for (const Incarnation& of : deaf_) {
    out << 8 << of;
  }
  for (const auto& [of, times] : resets_) {
    out << 3 << of << times;
  }
  for (const auto& [of, gone] : gone_) {
    out << 4 << of << gone.epoch << gone.accepted << gone.left;
  }
  for (const auto& [of, newcomer] : newcomers_) {
    out << 5 << of << newcomer.linked << newcomer.awaited << newcomer.loaded << newcomer.back_off.count();
    time(newcomer.not_before);
  }
  if (owed_) {
    out << 6 << *owed_;
  }
  if (proposal_) {
    out << 7 << proposal_->ballot.number() << proposal_->dead << proposal_->accepted;
    for (const auto& [position, promise] : proposal_->promises) {
      out << position << promise;
    }
    for (const auto& [of, promise] : proposal_->newcomers) {
      out << of << promise;
    }
    out << (proposal_->value ? proposal_->value->id() : 0);
    time(proposal_->since);
  }
  for (const TimePoint at : {began_, propose_at_, retry_at_, pause_until_, too_few_until_, asked_at_}) {
    time(at);
  }
  out << retry_after_.count();
  return out.value();
}

} // namespace pycomm::elastic
