#pragma once

#include <functional>
#include <optional>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// How a data plane ends: whether it runs, has failed or closes, when its links end, and the error of operations that come too late.
/// Without I/O and without a clock of its own.
///
/// Running -> Failed, by fail(): the group has failed.
/// Running -> Closing, by close(): links stay open for goodbyes.
/// Closing -> Failed and closing, by fail(), or Failed -> Failed and closing, by close(): links stay open for a while.
/// From either of the last two -> Ended, by end(), at endsAt().
/// Thread: the lane's.
class PlaneEnd {
 public:
  /// The identity outlives this.
  explicit PlaneEnd(const GroupIdentity& identity) : identity_(identity) {}

  // ---- events
  /// False if it has failed before: the first cause stays.
  [[nodiscard]] bool fail(const ErrorRecord& cause, TimePoint now) noexcept;
  /// The owner calls `closed` after end().
  void close(const ErrorRecord& reason, std::function<void()> closed, TimePoint now) noexcept;
  /// Each link has its goodbye queued. `unsent`: one of them waits for room.
  void goodbyesQueued(bool unsent, TimePoint now) noexcept;
  /// The last goodbye has left, or cannot.
  void goodbyesSaid(TimePoint now) noexcept;
  /// Returns what close() got. The plane counts as failed from now on.
  [[nodiscard]] std::function<void()> end() noexcept;

  // ---- questions
  /// Operations begin, frames leave, and reports count.
  [[nodiscard]] bool running() const noexcept {
    return !failure_ && !closing_;
  }
  [[nodiscard]] bool failed() const noexcept {
    return failure_.has_value();
  }
  /// TimePoint::max() unless close() was called and end() was not.
  [[nodiscard]] TimePoint endsAt() const noexcept {
    return ends_at_;
  }
  /// Ends an operation that comes too late to begin, with the cause of the end.
  void endAtOnce(Operation& operation) const noexcept;

 private:
  const GroupIdentity& identity_;
  std::optional<ErrorRecord> failure_;
  TimePoint failed_at_{};
  std::optional<ErrorRecord> closing_; ///< why, once close() was called
  TimePoint ends_at_ = TimePoint::max();
  std::function<void()> closed_;
};

} // namespace pycomm
