#include "base/abort_token.h"

#include <utility>

namespace pycomm {

bool AbortToken::abort(ErrorRecord&& reason) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_.load(std::memory_order_relaxed)) {
    return false;
  }
  reason_ = std::move(reason);
  aborted_.store(true, std::memory_order_release);
  return true;
}

ErrorRecord AbortToken::reason() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

void AbortToken::throwIfAborted() const {
  if (aborted()) {
    throw Error(reason());
  }
}

} // namespace pycomm
