// The host plane's own thread, and what the lane asks the plane.
#include <algorithm>

#include "base/fault_point.h"
#include "base/native_thread.h"
#include "engine/host/host_plane.h"

namespace pycomm {

// Wakes the thread, or starts it, with worker_mutex_. Throws what startNativeThread throws. False if the plane is closed.
bool HostPlane::startWorker() {
  if (stop_) {
    return false;
  }
  if (worker_.joinable()) {
    worker_wakes_.notify_one();
  } else {
    worker_ = startNativeThread("pycomm-host", [this] { workerMain(); });
  }
  return true;
}

void HostPlane::wakeWorker() {
  const std::lock_guard<std::mutex> lock(worker_mutex_);
  wanted_ = true;
  try {
    (void)startWorker();
  } catch (...) { // not the caller's: the operation is posted
    report();
  }
}

bool HostPlane::onWorker(std::function<void()> errand) {
  const std::lock_guard<std::mutex> lock(worker_mutex_);
  try {
    if (!startWorker()) {
      return false;
    }
  } catch (const Error&) {
    return false;
  }
  errands_.push_back(std::move(errand));
  return true;
}

void HostPlane::workerMain() noexcept {
  std::vector<std::function<void()>> errands;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(worker_mutex_);
      worker_wakes_.wait(lock, [&] { return wanted_ || stop_ || !errands_.empty(); });
      errands.swap(errands_);
      if (stop_ && errands.empty()) {
        return;
      }
      wanted_ = false;
    }
    static_cast<void>(PYCOMM_FAULT("host.errand"));
    for (const std::function<void()>& errand : errands) {
      errand();
    }
    errands.clear();
    {
      // Never spins: the program computes beside it. Waits for a driver to leave; what that left behind is done here.
      const std::lock_guard<std::mutex> lock(run_mutex_);
      runAll();
      static_cast<void>(PYCOMM_FAULT("host.rest"));
    }
    // A caller that posted while this thread was leaving, and could not drive, waits for this thread.
    if (!allDone() && !ending_.load(std::memory_order_seq_cst)) {
      const std::lock_guard<std::mutex> lock(worker_mutex_);
      wanted_ = true;
    }
  }
}

std::vector<std::shared_ptr<Operation>> HostPlane::recent() const {
  const std::lock_guard<std::mutex> lock(inbox_mutex_);
  std::vector<std::shared_ptr<Operation>> operations;
  const uint64_t kept = std::min<uint64_t>(recent_count_, recent_.size());
  for (uint64_t i = recent_count_ - kept; i < recent_count_; ++i) {
    operations.push_back(recent_[i % recent_.size()]);
  }
  return operations;
}

HostPlane::Standing HostPlane::standing(const Operation& operation) const noexcept {
  Standing standing;
  const uint64_t ticket = operation.shared().ticket;
  for (int rank = 0; rank < view_.size; ++rank) {
    const bool ended = view_.progress(rank).done.load(std::memory_order_seq_cst) >= ticket;
    if (rank == view_.rank || ended) {
      continue;
    }
    const HostSlot& slot = view_.slot(rank, ticket);
    const bool entered = (slot.ticket.load(std::memory_order_seq_cst) & ~kHostWithdrawn) == ticket;
    int& first = entered ? standing.behind : standing.not_entered;
    first = first < 0 ? rank : first;
  }
  return standing;
}

} // namespace pycomm
