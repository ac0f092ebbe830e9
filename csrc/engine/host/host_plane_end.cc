// How the host plane ends: with the group's failure, or in good order.
#include <new>
#include <utility>

#include "base/log.h"
#include "engine/host/host_plane.h"
#include "engine/report/failure_text.h"

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
    try {
      log(LogLevel::Warn,
          "no memory to take a tensor away from the other ranks of " + identity_.name +
              ": if one of them is stopped and goes on later, it may still write into that tensor");
    } catch (const std::bad_alloc&) { // nor for that line
    }
  }
}

// Without taking memory, until all have ended.
void HostPlane::endAll(
    const std::function<ErrorRecord(const Operation&)>& why,
    const std::function<void(const ErrorRecord&)>& told) noexcept {
  for (size_t i = head_; i < entered_; ++i) { // copies, so not with the lock that all threads take to issue operations
    takeAway(queue_[i].published());
  }
  std::vector<HostTransfer> queued;
  std::vector<std::shared_ptr<Operation>> posted[2];
  queued.swap(queue_);
  posted[0].swap(taken_);
  posted[1] = inbox_.close();
  const size_t first = std::exchange(head_, 0);
  entered_ = 0;
  bool oldest = true;
  const auto end = [&](Operation& operation) {
    ErrorRecord record = recordInAnyCase(identity_, [&] { return why(operation); });
    record.bytes_done = operation.shared().bytes_done.load(std::memory_order_relaxed);
    record.bytes_total = operation.shared().bytes_total;
    record.phase = record.phase.empty() ? "transfer" : record.phase;
    try {
      if (std::exchange(oldest, false) && told) {
        told(record);
      }
    } catch (...) { // no memory to keep it: the group's cause itself is known
    }
    inbox_.ended();
    operation.finish(std::move(record));
  };
  for (size_t i = first; i < queued.size(); ++i) {
    end(*queued[i].operation());
  }
  for (const auto& some : posted) {
    for (const std::shared_ptr<Operation>& operation : some) {
      if (operation != nullptr) { // null: among the queued ones already
        end(*operation);
      }
    }
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
    const std::function<void(const ErrorRecord&)>& told,
    const std::function<void()>& ended) noexcept {
  ending_.store(true, std::memory_order_seq_cst);
  ringSelf(); // the thread that runs operations leaves, after one step at the most
  const auto end = [this](const ErrorRecord& why, const auto& oldest, const auto& then) {
    {
      const std::lock_guard<std::mutex> lock(run_mutex_);
      finishWhatCanBe();
      broken_ = true;
      view_.progress(view_.rank).left.store(kGaveUp, std::memory_order_seq_cst); // before operands are let go of
      for (size_t i = head_; i < entered_; ++i) {
        queue_[i].withdraw();
      }
      endAll([&](const Operation& operation) { return errorOf(operation, why, identity_); }, oldest);
    }
    try {
      if (then) {
        then();
      }
    } catch (const std::bad_alloc&) { // of what is said about it
    }
  };
  try {
    if (worker_.run([=] { end(cause, told, ended); })) {
      return;
    }
  } catch (const std::bad_alloc&) { // then here
  }
  end(cause, told, ended);
}

void HostPlane::close(const ErrorRecord& reason) {
  ending_.store(true, std::memory_order_seq_cst);
  ringSelf();
  worker_.stop(); // first: a failure that came before ends all with its cause there
  const std::lock_guard<std::mutex> lock(run_mutex_);
  std::atomic<uint32_t>& left = view_.progress(view_.rank).left;
  if (left.load(std::memory_order_seq_cst) != kGaveUp) {
    finishWhatCanBe();
    const Operation* under_way = head_ < queue_.size() ? queue_[head_].operation().get() : nullptr;
    if (under_way != nullptr && !broken_) {
      try {
        events_.notice(leftInTheMiddle(*under_way, identity_));
      } catch (const std::bad_alloc&) { // the others find that this rank has left
      }
    }
    for (size_t i = head_; i < entered_; ++i) {
      queue_[i].withdraw();
    }
    left.store(kLeftInOrder, std::memory_order_seq_cst);
    ring();
  }
  broken_ = true;
  endAll([&](const Operation& operation) { return errorOf(operation, reason, identity_); }, nullptr);
}

} // namespace pycomm
