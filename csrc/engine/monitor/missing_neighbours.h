#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"

namespace pycomm {

/// The control neighbours without a link, while a group forms. Any thread.
class MissingNeighbours {
 public:
  explicit MissingNeighbours(std::vector<int> neighbours) : ranks_(std::move(neighbours)) {}

  void connected(int rank) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ranks_.erase(std::remove(ranks_.begin(), ranks_.end(), rank), ranks_.end());
    }
    changed_.notify_all();
  }
  /// The group has failed: wait() looks at its abort token at once.
  void failed() noexcept {
    changed_.notify_all();
  }
  /// Waits until every neighbour has connected, or `abort`. Returns the ranks still missing then, or at the deadline.
  [[nodiscard]] std::vector<int> wait(Deadline deadline, const AbortToken& abort) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ranks_.empty() && !abort.aborted() && !deadline.expired()) {
      changed_.wait_for(lock, std::chrono::milliseconds(deadline.remainingMs(kAbortSliceMs)));
    }
    return ranks_;
  }

 private:
  std::mutex mutex_; ///< guards ranks_
  std::condition_variable changed_;
  std::vector<int> ranks_;
};

} // namespace pycomm
