#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/data/protocol.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

class HostPlane;

/// Operations of one group whose bytes the lane does not move, or not yet:
///   - those whose input is still on its way from a device (hold);
///   - those in shared memory that wait for long (stuck), or that other ranks speak of (recall): the HostPlane runs them;
///   - those that another library runs, NCCL (follow).
/// The lane only watches over them: they have their place in the roll call, so ranks can ask each other about them, and their deadlines
/// are reported.
/// Thread: the lane's.
class WatchedOperations {
 public:
  /// The identity and the protocol outlive this.
  WatchedOperations(const GroupIdentity& identity, Protocol& protocol) : identity_(identity), protocol_(protocol) {}

  /// Of a group that also has a HostPlane, which outlives this.
  void accompany(HostPlane* host) noexcept {
    host_ = host;
  }

  // ---- events
  /// The operation's input has not come.
  void hold(const std::shared_ptr<Operation>& operation);
  /// It has come now: whether it was awaited.
  [[nodiscard]] bool release(const std::shared_ptr<Operation>& operation) noexcept {
    return held_.erase(operation) != 0;
  }
  /// An operation of the HostPlane does not move, and these ranks (bits, see HostPlane::inGroup) have not entered it.
  void stuck(const std::shared_ptr<Operation>& operation, uint64_t lacking);
  /// One of the HostPlane's has ended of which something may be kept here or in the protocol.
  void hostEnded(const OperationId& id, const Descriptor& descriptor);
  void follow(const std::shared_ptr<Operation>& operation);
  /// Another library has ended it; null if the group had ended it before.
  [[nodiscard]] std::shared_ptr<Operation> unfollow(uint64_t op_id);
  /// A peer speaks of an operation that the lane does not run: if it is one of the HostPlane's, or will be, the roll call gets to know it.
  void recall(const FrameHeader& header);
  /// Takes all operations that only this knows, for `end`. Those of the HostPlane are forgotten: it ends them itself.
  void endAll(const std::function<void(Operation&)>& end) noexcept;

  // ---- questions
  [[nodiscard]] bool has(const Operation& operation) const noexcept;
  /// The error of an operation whose deadline has passed, as RollCall reports; nothing if it is none of these or has ended.
  [[nodiscard]] std::optional<ErrorRecord> overdue(uint64_t op_id);
  /// The errors of held ones whose deadline has passed, again each second while they are held.
  [[nodiscard]] std::vector<ErrorRecord> overdueHeld(TimePoint now);
  [[nodiscard]] TimePoint nextDeadline() const noexcept {
    return next_deadline_;
  }
  struct Usage {
    size_t held = 0;
    size_t on_host = 0; ///< stuck or recalled
    size_t followed = 0;
  };
  [[nodiscard]] Usage usage() const noexcept {
    return {held_.size(), watched_.size(), followed_.size()};
  }

 private:
  /// The roll call knows it from now on, and until it has ended.
  void watch(const std::shared_ptr<Operation>& operation);
  [[nodiscard]] std::optional<ErrorRecord> overdueOnHost(const Operation& operation) const;

  const GroupIdentity& identity_;
  Protocol& protocol_;
  HostPlane* host_ = nullptr;
  std::set<std::shared_ptr<Operation>> held_;
  std::unordered_map<uint64_t, std::shared_ptr<Operation>>
      watched_; ///< in shared memory: they wait for long, or a peer asked for them
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> followed_;
  int64_t recalled_ = 0; ///< the protocol knows those of the HostPlane up to this number
  TimePoint next_deadline_ = TimePoint::max(); ///< no held one's is earlier, but for those that have been reported
};

} // namespace pycomm
