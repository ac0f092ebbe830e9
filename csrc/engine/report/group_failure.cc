#include "engine/report/group_failure.h"

#include "engine/report/failure_text.h"

namespace pycomm {

void GroupFailure::setOldest(const ErrorRecord& oldest) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!oldest_ || oldest_->elapsed_ms < oldest.elapsed_ms) {
    oldest_ = oldest;
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
