#include "engine/host/host_queue.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/report/failure_text.h"
#include "engine/report/mismatch.h"

namespace pycomm {
namespace {

constexpr size_t kCompactAt = 256;

/// False if there is no memory to say it: then the next sleep, a second later at the most, is for saying it again.
template <typename Say>
bool said(const Say& say) noexcept {
  try {
    say();
    return true;
  } catch (...) {
    return false;
  }
}

} // namespace

void HostQueue::Events::noticeException(const GroupIdentity& identity) const noexcept {
  try {
    notice(ownTrouble(std::current_exception(), identity));
  } catch (...) { // no memory even to say so: the deadline ends what waits
  }
}

bool HostQueue::step(uint64_t& blocked) noexcept {
  if (stopped_) {
    return false;
  }
  bool moved = false;
  try {
    if (parts_.inbox.arrived()) {
      takeInbox();
    }
    enter(blocked, moved);
    run(blocked, moved);
  } catch (...) {
    stopped_ = true;
    parts_.events.noticeException(parts_.identity);
    return false;
  }
  return moved;
}

void HostQueue::takeInbox() {
  parts_.inbox.take(taken_);
  for (std::shared_ptr<Operation>& operation : taken_) {
    PYCOMM_FAULT_POINT("operation.post");
    const TimePoint issued = operation->issuedAt();
    const Deadline deadline = operation->request().deadline;
    const uint64_t ticket = operation->shared().ticket;
    operation->mark().running(issued, operation->shared().bytes_total);
    const TimePoint tell_at = // early enough for the others' answers
        deadline.isNever() ? TimePoint::max() : issued + (deadline.instant() - issued) / 4 * 3;
    queue_.emplace_back(parts_.memory, std::move(operation), ticket, tell_at);
  }
  taken_.clear();
}

void HostQueue::enter(uint64_t& blocked, bool& moved) {
  while (entered_ < queue_.size() && !parts_.ending.load(std::memory_order_seq_cst) &&
         queue_[entered_].transfer.mayEnter(blocked)) {
    HostTransfer& transfer = queue_[entered_].transfer;
    if (transfer.large()) {
      parts_.memory.commitStage();
    }
    transfer.enter();
    parts_.bell.ringOthers();
    moves_ += entered_ == head_ ? 1 : 0;
    ++entered_;
    moved = true;
  }
}

void HostQueue::run(uint64_t& blocked, bool& moved) {
  while (head_ < entered_) {
    HostTransfer& transfer = queue_[head_].transfer;
    const bool was_astray = transfer.astray();
    const HostTransfer::AdvanceResult result =
        transfer.advance(rounds_, parts_.ending.load(std::memory_order_seq_cst), blocked);
    if (result == HostTransfer::AdvanceResult::Differs) {
      throwDiffers(transfer);
    }
    if (result == HostTransfer::AdvanceResult::Blocked) {
      moves_ += transfer.astray() != was_astray ? 1 : 0;
      break;
    }
    moved = true;
    ++moves_;
    if (result == HostTransfer::AdvanceResult::Moved) {
      if (transfer.large()) {
        parts_.bell.ringOthers();
      }
      return; // who drives looks whether it is to stop
    }
    finish(queue_[head_]);
    ++head_;
  }
  dropEnded();
}

void HostQueue::dropEnded() {
  if (head_ == queue_.size()) {
    queue_.clear();
    head_ = entered_ = 0;
  } else if (head_ >= kCompactAt) {
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head_));
    entered_ -= head_;
    head_ = 0;
  }
}

void HostQueue::throwDiffers(const HostTransfer& transfer) const {
  const Operation::Request& request = transfer.operation()->request();
  throw Error(disagreement(
      parts_.identity.hosts,
      parts_.identity.job,
      parts_.identity.rank,
      request.descriptor,
      transfer.differentPeer(),
      transfer.differentDescriptor(),
      request.id));
}

void HostQueue::finish(const Entry& entry) {
  PYCOMM_FAULT_POINT("operation.finish");
  const HostView& view = parts_.memory.view();
  Operation& operation = *entry.transfer.operation();
  // After the last read of the others' slots: they are written again once all have stored this.
  view.progress(view.rank).done.store(entry.transfer.ticket(), std::memory_order_seq_cst);
  parts_.bell.ringOthers();
  operation.mark().received(operation.shared().bytes_total);
  parts_.inbox.ended();
  operation.finish(std::nullopt);
}

// When the oldest operation, which has moved since the last look, is to be reported.
TimePoint HostQueue::stuckAt(TimePoint now) const noexcept {
  if (head_ == entered_) {
    return TimePoint::
        max(); // none runs: this rank waits for its own input, or for slots of operations that have ended here
  }
  const HostTransfer& oldest = queue_[head_].transfer;
  if (oldest.astray()) {
    return now;
  }
  Clock::duration patience = std::chrono::milliseconds(tell_after_ms_);
  const Deadline deadline = oldest.operation()->request().deadline;
  if (!deadline.isNever()) { // early enough for the others' answers
    patience = std::min(patience, (deadline.instant() - oldest.operation()->issuedAt()) / 4);
  }
  return now + patience;
}

TimePoint HostQueue::reportStuck(TimePoint now) noexcept {
  if (std::exchange(looked_, moves_) != moves_) {
    stuck_at_ = stuckAt(now);
  }
  TimePoint next = TimePoint::max();
  for (size_t i = head_; i < queue_.size(); ++i) {
    Entry& entry = queue_[i];
    if (entry.tell_at <= now || (i == head_ && stuck_at_ <= now)) {
      static_cast<void>(said([&] { parts_.events.stuck(entry.transfer.operation(), entry.transfer.lacking()); }));
      entry.tell_at = now + kReportAgain; // the ranks that lack may be others then; or there was no memory for it
      stuck_at_ = i == head_ ? TimePoint::max() : stuck_at_;
    }
    next = std::min(next, entry.tell_at);
  }
  return std::min(next, stuck_at_);
}

void HostQueue::reportLeft(uint64_t ranks) noexcept {
  const Operation* const waiting = running();
  if (waiting == nullptr) {
    return;
  }
  for (int peer = 0; peer < parts_.identity.size; ++peer) {
    if ((ranks & hostBit(peer)) != 0) {
      stopped_ = said([&] { parts_.events.notice(peerLeftUs(peer, *waiting, parts_.identity)); });
      return;
    }
  }
}

const Operation* HostQueue::running() const noexcept {
  return stopped_ || head_ == queue_.size() ? nullptr : queue_[head_].transfer.operation().get();
}

void HostQueue::finishAll() noexcept {
  uint64_t blocked = 0;
  while (step(blocked)) {
  }
}

void HostQueue::withdrawAll() const noexcept {
  for (size_t i = head_; i < entered_; ++i) {
    queue_[i].transfer.withdraw();
  }
}

BufferView HostQueue::writtenBy(int peer) const noexcept {
  for (size_t i = head_; i < entered_; ++i) {
    const BufferView part = queue_[i].transfer.writtenBy(peer);
    if (part.nbytes > 0) {
      return part;
    }
  }
  return {};
}

void HostQueue::takeAwayAll(uint64_t dead) const noexcept {
  int pauses = 0; // of all peers together: one that is stopped never ends its step
  for (int peer = 0; peer < parts_.identity.size; ++peer) {
    if (peer == parts_.identity.rank || (dead & hostBit(peer)) != 0) {
      continue;
    }
    BufferView part = writtenBy(peer);
    for (; part.nbytes > 0 && pauses < kHostPauses; ++pauses) {
      PYCOMM_FAULT_POINT("host.pause");
      hostPause();
      part = writtenBy(peer);
    }
    if (part.nbytes > 0) {
      takeAway(peer, part);
    }
  }
}

void HostQueue::takeAway(int peer, BufferView part) const noexcept {
  const bool taken = parts_.memory.takeAway(part);
  try {
    const std::string what = parts_.identity.rankText(peer) + " stopped in the middle of a write into a tensor of " +
        parts_.identity.rankText(parts_.identity.rank) + " (" + parts_.identity.text() + ")";
    log(LogLevel::Warn,
        taken ? what + ": from now on, operations copy that tensor; allocate a new one to avoid this"
              : what + ", and there is no memory to protect the tensor: if that rank continues, it may still write " +
                std::to_string(part.nbytes >> 10) + " KiB there");
  } catch (const std::bad_alloc&) { // nor for that line
  }
}

void HostQueue::endAll(
    const std::function<ErrorRecord(const Operation&)>& why,
    const std::function<void(const ErrorRecord&)>& told) noexcept {
  std::vector<Entry> queued;
  std::vector<std::shared_ptr<Operation>> posted[2];
  queued.swap(queue_);
  posted[0].swap(taken_);
  posted[1] = parts_.inbox.close();
  const size_t first = std::exchange(head_, 0);
  entered_ = 0;
  bool oldest = true;
  const auto end = [&](Operation& operation) {
    ErrorRecord record = recordInAnyCase(parts_.identity, [&] { return why(operation); });
    record.bytes_done = operation.shared().bytes_done.load(std::memory_order_relaxed);
    record.bytes_total = operation.shared().bytes_total;
    record.phase = record.phase.known() ? record.phase : ErrorPhase::Transfer;
    try {
      if (std::exchange(oldest, false) && told) {
        told(record);
      }
    } catch (...) { // no memory to keep it: the group's cause itself is known
    }
    parts_.inbox.ended();
    operation.finish(std::move(record));
  };
  for (size_t i = first; i < queued.size(); ++i) {
    end(*queued[i].transfer.operation());
  }
  for (const auto& some : posted) {
    for (const std::shared_ptr<Operation>& operation : some) {
      if (operation != nullptr) { // null: among the queued ones already
        end(*operation);
      }
    }
  }
}

} // namespace pycomm
