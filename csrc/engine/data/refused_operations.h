#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "engine/operation/group_identity.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// Operations that cannot begin because of an exception on this rank. They end with the group's failure, which the exception becomes. If
/// one of them ended before, its waiter might begin an operation that the other ranks do not expect, and they would blame that.
///
/// add() -> endAll(), with the failure; or endWith() or endLate(), if the failure was lost.
/// Thread: the lane's.
class RefusedOperations {
 public:
  /// The identity outlives this.
  explicit RefusedOperations(const GroupIdentity& identity) : identity_(identity) {}

  // ---- events
  /// If there is no memory to remember the operation, it ends at once.
  void add(const std::shared_ptr<Operation>& operation, const std::exception_ptr& exception) noexcept;
  void endAll(const std::function<void(Operation&)>& end) noexcept;
  /// The exception could not be reported.
  void endWith(const std::exception_ptr& exception) noexcept;
  /// Ends those whose deadline has passed: the failure was lost, for want of memory on its way.
  void endLate(TimePoint now) noexcept;

  // ---- questions
  [[nodiscard]] bool has(const Operation& operation) const noexcept;
  [[nodiscard]] TimePoint nextDeadline() const noexcept;
  [[nodiscard]] size_t size() const noexcept {
    return operations_.size();
  }

 private:
  void end(Operation& operation, const std::exception_ptr& exception) const noexcept;

  const GroupIdentity& identity_;
  std::vector<std::shared_ptr<Operation>> operations_; ///< oldest first
};

} // namespace pycomm
