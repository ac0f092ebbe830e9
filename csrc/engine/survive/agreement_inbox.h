#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "engine/meeting/endpoint.h"
#include "engine/survive/agreement_driver.h"

namespace pycomm {

[[nodiscard]] inline elastic::Incarnation incarnationOf(const ProcessId& id) {
  return {std::stoull(id.substr(0, 16), nullptr, 16), std::stoull(id.substr(16), nullptr, 16)};
}

/// The endpoint brings messages here, on the control loop; groups and the groups' thread bring the rest. Any thread.
class AgreementDriver::Inbox final : public Endpoint::Mailbox {
 public:
  Inbox() : wake_(UniqueFd::from([] { return ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); })) {
    if (!wake_) {
      throw Error(systemError(ErrorCode::SystemError, "no eventfd", errno));
    }
  }

  /// These may bring messages, for good; all others are newcomers, of which the last kMostStrangers may.
  void know(const std::vector<MemberHandle>& members) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const MemberHandle& member : members) {
      endpoints_[member.incarnation] = member.endpoint;
      std::erase(strangers_, member.incarnation);
    }
  }
  /// This one is known no more.
  void forget(const ProcessId& stranger) {
    const std::lock_guard<std::mutex> lock(mutex_);
    endpoints_.erase(stranger);
    std::erase(strangers_, stranger);
  }
  /// The answer to a process that wants to join: the text that it compares with its own, and the members' handles. Empty: none can.
  void announce(std::vector<std::string> notice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    notice_ = std::move(notice);
  }
  /// Whether parts of the members' state are taken: this process is a newcomer.
  void expectState(bool expects) {
    const std::lock_guard<std::mutex> lock(mutex_);
    expects_state_ = expects;
    state_ = {};
    giver_.clear();
  }

  [[nodiscard]] bool knows(const ProcessId& from, const std::string& handle, const std::optional<ProcessId>& endpoint)
      override;
  [[nodiscard]] bool deliver(const ProcessId& from, const std::string& bytes) override;
  [[nodiscard]] std::vector<std::string> notice() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return notice_;
  }
  [[nodiscard]] bool take(const ProcessId& from, const std::vector<std::string>& words) override;

  void put(Event event, size_t most = SIZE_MAX) {
    const std::lock_guard<std::mutex> lock(mutex_);
    putLocked(std::move(event), most);
  }
  void retire() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    retiring_ = true;
    ring();
  }
  void stop() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    ring();
  }
  /// This process can take no part any more, and may have no memory to say more.
  void fail() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_ = true;
    ring();
  }

  struct Taken {
    std::deque<Event> events;
    bool retiring = false; ///< before these events
    bool failed = false; ///< likewise
    bool stopping = false; ///< behind them: to say goodbye
  };
  [[nodiscard]] Taken take() {
    uint64_t rung = 0;
    (void)::read(wake_.get(), &rung, sizeof rung);
    const std::lock_guard<std::mutex> lock(mutex_);
    return {std::exchange(events_, {}), retiring_, failed_, stopping_};
  }
  [[nodiscard]] int fd() const noexcept {
    return wake_.get();
  }

 private:
  /// False if there are as many already.
  bool putLocked(Event event, size_t most) {
    if (events_.size() >= most) {
      return false;
    }
    events_.push_back(std::move(event));
    ring();
    return true;
  }
  void ring() const noexcept {
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof one);
  }

  const UniqueFd wake_;
  mutable std::mutex mutex_; ///< guards the rest
  std::map<ProcessId, ProcessId> endpoints_; ///< of those that may bring messages
  std::deque<ProcessId> strangers_; ///< of these, those that are no members, the newest last
  std::vector<std::string> notice_;
  bool expects_state_ = false;
  ProcessId giver_; ///< of the state that comes
  State state_; ///< its parts so far
  size_t state_nbytes_ = 0; ///< when it is complete
  int64_t given_in_ = 0; ///< the epoch in which that began
  std::deque<Event> events_;
  bool retiring_ = false;
  bool failed_ = false;
  bool stopping_ = false;
};

} // namespace pycomm
