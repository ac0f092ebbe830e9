#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/error.h"
#include "engine/operation/group_identity.h"

namespace pycomm {

/// What the oldest operation of a plane will end with, and when that was issued. Its elapsed time says less: planes end one after the other.
using OldestEnds = std::function<void(const ErrorRecord& error, TimePoint issued_at)>;

/// Whether a group has failed, why, and what that did to the oldest operation that was under way here. It fails once, for good.
///
/// Any thread.
class GroupFailure final {
 public:
  /// `identity` outlives this.
  explicit GroupFailure(const GroupIdentity& identity) noexcept : identity_(identity) {}

  /// The group has failed. Before anybody can see that, and before any operation ends with it.
  void set(const ErrorRecord& cause) {
    if (!token_.abort(cause)) {
      return;
    }
    std::vector<std::function<void()>> then;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      then.swap(then_);
    }
    for (const auto& each : then) {
      each();
    }
  }
  /// Calls `then` once, as soon as the group has failed: on the control loop, so it does not block; now, if that has happened. It does not
  /// throw.
  void whenSet(std::function<void()> then) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!happened()) {
        then_.push_back(std::move(then));
        return;
      }
    }
    then();
  }
  /// See OldestEnds. Of several planes, the one whose operation was issued first counts.
  void setOldest(const ErrorRecord& oldest, TimePoint issued_at);

  [[nodiscard]] bool happened() const noexcept {
    return token_.aborted();
  }
  /// What the oldest operation ended with, else the cause; nothing while all is well.
  [[nodiscard]] std::optional<ErrorRecord> record() const;
  /// For waits that end when the group fails.
  [[nodiscard]] const AbortToken& token() const noexcept {
    return token_;
  }

 private:
  const GroupIdentity& identity_;
  AbortToken token_;
  mutable std::mutex mutex_; ///< guards the rest
  std::optional<ErrorRecord> oldest_;
  TimePoint oldest_issued_at_ = TimePoint::max();
  std::vector<std::function<void()>> then_;
};

} // namespace pycomm
