// The host plane's own thread, and what the lane asks the plane.
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <system_error>

#include "engine/failure_text.h"
#include "engine/host_plane.h"

namespace pycomm {

void HostPlane::wakeWorker() {
  const std::lock_guard<std::mutex> lock(worker_mutex_);
  wanted_ = true;
  if (worker_.joinable() || stop_) {
    worker_wakes_.notify_one();
    return;
  }
  // Signals belong to the interpreter's threads: a handler that ran here would touch Python from a native thread.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    worker_ = std::thread([this] { workerMain(); });
  } catch (const std::system_error& error) {
    ErrorRecord record;
    record.code = ErrorCode::SystemError;
    record.peer = identity_.rank;
    record.summary = "this process could not start a thread, pycomm-host";
    record.cause = errnoText(error.code().value());
    record.hint = "raise the limit on processes and threads (ulimit -u, or pids.max of the container)";
    events_.notice(errorOf(record, identity_));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void HostPlane::workerMain() noexcept {
  pthread_setname_np(pthread_self(), "pycomm-host");
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(worker_mutex_);
      worker_wakes_.wait(lock, [&] { return wanted_ || stop_; });
      if (stop_) {
        return;
      }
      wanted_ = false;
    }
    // Never spins: the program computes beside it. Waits for a driver to leave; what that left behind is done here.
    const std::lock_guard<std::mutex> baton(baton_);
    runAll();
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
    const bool ended = view_.card(rank).done.load(std::memory_order_seq_cst) >= ticket;
    if (rank == view_.rank || ended) {
      continue;
    }
    const HostSlot& slot = view_.slot(rank, ticket);
    const bool entered = slot.ticket.load(std::memory_order_seq_cst) == ticket;
    int& first = entered ? standing.behind : standing.not_entered;
    first = first < 0 ? rank : first;
  }
  return standing;
}

} // namespace pycomm
