// How the host plane ends: with the group's failure, or in good order.
#include <utility>

#include "base/log.h"
#include "engine/failure_text.h"
#include "engine/host_plane.h"

namespace pycomm {

// A stopped peer that goes on one day must find nothing of the user's where it reads and writes then.
void HostPlane::takeAway(const HostTransfer::Published& published) {
  bool taken = true;
  if (published.output.ptr != nullptr) {
    taken = heaps_.own->detach(published.output.ptr, published.output.nbytes);
  }
  if (published.input.ptr != nullptr && published.input.ptr != published.output.ptr) {
    taken = heaps_.own->detach(published.input.ptr, published.input.nbytes) && taken;
  }
  if (!taken) {
    log(LogLevel::Warn,
        "no memory to take a tensor away from the other ranks of " + identity_.name +
            ": if one of them is stopped and goes on later, it may still write into that tensor");
  }
}

void HostPlane::endAll(
    const std::function<ErrorRecord(const Operation&)>& why,
    const std::function<void(const ErrorRecord&)>& told) {
  for (size_t i = head_; i < entered_; ++i) { // copies, so not with the lock that all threads take to issue operations
    takeAway(queue_[i].published());
  }
  std::vector<std::shared_ptr<Operation>> rest;
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    over_ = true;
    for (size_t i = head_; i < queue_.size(); ++i) {
      rest.push_back(queue_[i].operation());
    }
    for (const auto* posted : {&taken_, &inbox_}) {
      for (const std::shared_ptr<Operation>& operation : *posted) {
        if (operation != nullptr) { // null: in queue_ already
          rest.push_back(operation);
        }
      }
    }
    queue_.clear();
    taken_.clear();
    inbox_.clear();
    head_ = entered_ = 0;
  }
  pending_.fetch_sub(rest.size(), std::memory_order_seq_cst);
  for (size_t i = 0; i < rest.size(); ++i) {
    ErrorRecord record = why(*rest[i]);
    record.bytes_done = rest[i]->shared().bytes_done.load(std::memory_order_relaxed);
    record.bytes_total = rest[i]->shared().bytes_total;
    record.phase = record.phase.empty() ? "transfer" : record.phase;
    if (i == 0 && told) {
      told(record);
    }
    rest[i]->finish(std::move(record));
  }
}

// An operation for which all ranks have done their part ends well, although this one comes late to it: with a barrier that is over
// elsewhere, a peer may have gone on and left long ago. Nothing new is entered.
void HostPlane::finishWhatCanBe() noexcept {
  uint64_t blocked = 0;
  while (step(blocked)) {
  }
}

void HostPlane::fail(
    const ErrorRecord& cause,
    std::function<void(const ErrorRecord&)> told,
    std::function<void()> ended) {
  ending_.store(true, std::memory_order_seq_cst);
  ringSelf(); // whoever has the baton leaves it: after a step at the most
  const auto end = [this, cause, told = std::move(told), ended = std::move(ended)] {
    {
      const std::lock_guard<std::mutex> baton(baton_);
      finishWhatCanBe();
      broken_ = true;
      view_.card(view_.rank).left.store(kGaveUp, std::memory_order_seq_cst); // before operands are let go of
      endAll([&](const Operation& operation) { return errorOf(operation, cause, identity_); }, told);
    }
    if (ended) {
      ended();
    }
  };
  if (!onWorker(end)) {
    end();
  }
}

void HostPlane::close(const ErrorRecord& reason) {
  const bool failed = ending_.exchange(true, std::memory_order_seq_cst);
  ringSelf();
  {
    const std::lock_guard<std::mutex> baton(baton_);
    if (!failed) {
      finishWhatCanBe();
      const Operation* under_way = head_ < queue_.size() ? queue_[head_].operation().get() : nullptr;
      if (under_way != nullptr && !broken_) {
        events_.notice(leftInTheMiddle(*under_way, identity_));
      }
      view_.card(view_.rank).left.store(kLeftInOrder, std::memory_order_seq_cst);
      ring();
    }
    broken_ = true;
    endAll([&](const Operation& operation) { return errorOf(operation, reason, identity_); }, nullptr);
  }
  std::thread worker;
  {
    const std::lock_guard<std::mutex> lock(worker_mutex_);
    stop_ = true;
    worker.swap(worker_);
  }
  worker_wakes_.notify_all();
  if (worker.joinable()) {
    worker.join();
  }
}

} // namespace pycomm
