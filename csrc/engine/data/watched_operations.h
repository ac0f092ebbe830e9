#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/tables.h"
#include "engine/operation/operation.h"

namespace pycomm {

class HostPlane;

/// Operations of one group whose bytes the data loop does not move, or not yet:
///   - those whose input is still on its way from a device (hold);
///   - those in shared memory that wait for long (stuck), or that other ranks speak of (recall): the HostPlane runs them;
///   - those that another library runs, NCCL (follow).
/// The data loop only watches over them: all but the first have a row, so ranks can ask each other about them, and their deadlines are
/// reported.
/// Thread: the data loop's.
class WatchedOperations {
 public:
  /// The tables outlive this.
  explicit WatchedOperations(Tables& tables) : tables_(tables) {}

  /// Of a group that also has a HostPlane, which outlives this.
  void accompany(HostPlane* host) noexcept;
  [[nodiscard]] const HostPlane* host() const noexcept {
    return host_;
  }

  // ---- events
  /// The operation's input has not come.
  void hold(const std::shared_ptr<Operation>& operation);
  /// It has come now: whether it was awaited.
  [[nodiscard]] bool release(const std::shared_ptr<Operation>& operation) noexcept;
  /// An operation of the HostPlane does not move, and these ranks (bits, see HostPlane::inGroup) have not entered it.
  void stuck(const std::shared_ptr<Operation>& operation, uint64_t lacking);
  /// One of the HostPlane's has ended of which something may be kept here.
  void hostEnded(const OperationId& id, const Descriptor& descriptor);
  void follow(const std::shared_ptr<Operation>& operation);
  /// A peer speaks of an operation that has no row: if it is one of the HostPlane's, or will be, it gets one.
  void recall(const FrameHeader& header);
  /// Takes all that are held, for `end`.
  void endHeld(const std::function<void(Operation&)>& end) noexcept;

  // ---- questions
  [[nodiscard]] bool holds(const Operation& operation) const noexcept;
  /// The error of an operation whose deadline has passed, which has a row and does not run here; nothing if it has ended.
  [[nodiscard]] std::optional<ErrorRecord> overdue(OperationRow& row);
  /// The errors of held ones whose deadline has passed, again each second while they are held.
  [[nodiscard]] std::vector<ErrorRecord> overdueHeld(TimePoint now);
  [[nodiscard]] TimePoint nextDeadline() const noexcept {
    return next_deadline_;
  }
  [[nodiscard]] size_t held() const noexcept {
    return tables_.held.size();
  }

 private:
  /// It has a row from now on, and until it has ended.
  OperationRow& watch(const std::shared_ptr<Operation>& operation);
  [[nodiscard]] ErrorRecord overdueOnHost(const OperationRow& row) const;

  Tables& tables_;
  HostPlane* host_ = nullptr;
  int64_t recalled_ = 0; ///< the tables know those of the HostPlane up to this number
  TimePoint next_deadline_ = TimePoint::max(); ///< no held one's is earlier, but for those that have been reported
};

} // namespace pycomm
