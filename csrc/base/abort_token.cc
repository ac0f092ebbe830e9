#include "base/abort_token.h"

#include <algorithm>
#include <chrono>
#include <thread>
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

void pauseFor(int64_t pause_ms, Deadline deadline, const AbortToken& abort) {
  const Deadline end = Deadline::at(std::min(deadline.instant(), Deadline::after(pause_ms).instant()));
  while (!end.expired()) {
    abort.throwIfAborted();
    std::this_thread::sleep_for(std::chrono::milliseconds(end.remainingMs(kAbortSliceMs)));
  }
}

} // namespace pycomm
