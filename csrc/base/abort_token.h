#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/deadline.h"
#include "base/error.h"

namespace pycomm {

/// Ends every wait of one group, and gives the reason. The first reason wins and stays.
/// Thread-safe. `aborted()` is one acquire load: a thread that reads true also sees the reason.
class AbortToken {
 public:
  /// True if this call was the first.
  bool abort(const ErrorRecord& reason) {
    return abort(ErrorRecord(reason));
  }
  bool abort(ErrorRecord&& reason) noexcept;

  [[nodiscard]] bool aborted() const noexcept {
    return aborted_.load(std::memory_order_acquire);
  }
  /// The first reason. Call only after aborted() has returned true.
  [[nodiscard]] ErrorRecord reason() const;

  /// Throws Error(reason()) once aborted.
  void throwIfAborted() const;

 private:
  std::atomic<bool> aborted_{false};
  mutable std::mutex mutex_; ///< guards reason_; held only to copy it
  ErrorRecord reason_;
};

/// How long a wait goes on at the most before it looks at its token again.
inline constexpr int kAbortSliceMs = 50;

/// Sleeps so long, or until the deadline. Throws as throwIfAborted().
void pauseFor(int64_t pause_ms, Deadline deadline, const AbortToken& abort);

} // namespace pycomm
