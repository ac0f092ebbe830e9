#include "engine/join_abort.h"

#include "engine/group.h"

namespace pycomm {

// The token first: the join looks at it after made(), once its group can be aborted. So one of the two sees the other.
void JoinAbort::abort(const ErrorRecord& reason) {
  (void)token_.abort(reason); // false if an earlier call had no memory for the rest of this
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
