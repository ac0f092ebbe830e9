#include "engine/report/group_failure.h"

#include "engine/report/failure_text.h"

namespace pycomm {

void GroupFailure::setOldest(const ErrorRecord& oldest, TimePoint issued_at) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (issued_at < oldest_issued_at_) {
    oldest_ = oldest;
    oldest_issued_at_ = issued_at;
  }
}

std::optional<ErrorRecord> GroupFailure::record() const {
  if (!happened()) {
    return std::nullopt;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (oldest_) {
      return oldest_;
    }
  }
  return errorOf(token_.reason(), identity_);
}

} // namespace pycomm
