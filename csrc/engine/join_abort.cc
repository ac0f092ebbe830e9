#include "engine/join_abort.h"

#include "engine/group.h"

namespace pycomm {

// The token first: the join looks at it after made(), once its group can be aborted. So one of the two sees the other.
void JoinAbort::abort(const ErrorRecord& reason) {
  if (!token_.abort(reason)) {
    return;
  }
  std::shared_ptr<Group> group;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    group = group_.lock();
  }
  if (group != nullptr) {
    group->abort(reason);
  }
}

void JoinAbort::made(const std::shared_ptr<Group>& group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  group_ = group;
}

} // namespace pycomm
