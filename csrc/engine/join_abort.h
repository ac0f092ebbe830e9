#pragma once

#include <memory>
#include <mutex>

#include "base/abort_token.h"
#include "base/error.h"

namespace pycomm {

class Group;

/// Ends a Group::join() that another thread runs. All ranks that have met this one get the reason; a rank that has not met any yet leaves a
/// notice in the store (notices.h).
class JoinAbort {
 public:
  /// On any thread. The first reason counts. If the group is complete already, it fails with it. After an exception it can be called again.
  void abort(const ErrorRecord& reason);

  /// For the waits of the join.
  [[nodiscard]] const AbortToken& token() const noexcept {
    return token_;
  }
  /// The join has made this group: from now on abort() ends it, too.
  void made(const std::shared_ptr<Group>& group);

 private:
  AbortToken token_;
  std::mutex mutex_; ///< guards group_
  std::weak_ptr<Group> group_;
};

} // namespace pycomm
