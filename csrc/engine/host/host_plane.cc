#include "engine/host/host_plane.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/fault_point.h"
#include "engine/report/failure_text.h"
#include "engine/report/mismatch.h"
#include "transport/memory/futex.h"

namespace pycomm {
namespace {

// A bound on one sleep, so that a lost wake-up (a bug) shows as a delay and not as a hang.
constexpr int kLongestParkMs = 1000;
constexpr int kLooksBeforeYield = 32;
constexpr size_t kCompactAt = 256;

inline void pauseCore() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

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

HostPlane::HostPlane(
    GroupIdentity identity,
    std::shared_ptr<const SharedArena> arena,
    HostHeaps heaps,
    Config config,
    Events events)
    : identity_(std::move(identity)),
      arena_(std::move(arena)),
      heaps_(std::move(heaps)),
      view_{arena_->at(0), heaps_.own == nullptr ? nullptr : heaps_.ranges.data(), identity_.rank, identity_.size},
      config_(config),
      events_(std::move(events)),
      worker_([this] { return work(); }) {}

HostPlane::~HostPlane() = default;

bool HostPlane::serves(const ScheduleRequest& request, int size) noexcept {
  if (size < 2 || size > kMaxHostRanks || request.algorithm != Algorithm::Auto || request.codec != Codec::None ||
      !request.counts.empty() || !request.recv_counts.empty() || IssueContext::current() != nullptr) {
    return false;
  }
  switch (request.kind) {
    case Collective::AllReduce:
    case Collective::Broadcast:
    case Collective::AllGather:
    case Collective::ReduceScatter:
    case Collective::Barrier:
      return true;
    case Collective::Reduce:
    case Collective::AllToAll:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::Send:
    case Collective::Recv:
      break;
  }
  return false;
}

bool HostPlane::post(
    const std::function<std::shared_ptr<Operation>()>& make,
    bool waits,
    std::shared_ptr<Operation>& made) {
  if (!inbox_.post(make, made)) {
    return false;
  }
  ringSelf(); // another thread of this process may run operations, and sleep
  if (!waits) {
    wakeWorker();
  }
  return true;
}

void HostPlane::release(Operation& operation) noexcept {
  operation.shared().held.store(false, std::memory_order_seq_cst);
  ringSelf();
}

bool HostPlane::drive(const Operation& operation, Deadline deadline) {
  {
    const std::unique_lock<std::mutex> lock(run_mutex_, std::try_to_lock);
    if (!lock.owns_lock() || ending_.load(std::memory_order_seq_cst)) {
      return false;
    }
    run([&] { return operation.done(); }, deadline, config_.spin_us);
  }
  if (ending_.load(std::memory_order_seq_cst)) {
    return false; // the thread that ends the plane ends the operation
  }
  if (!inbox_.allEnded()) { // also what was posted while this thread was leaving
    wakeWorker();
  }
  return true;
}

void HostPlane::wakeWorker() {
  try {
    worker_.wake();
  } catch (...) { // not the caller's: the operation is posted
    report();
  }
}

bool HostPlane::work() noexcept {
  {
    // Never spins: the program computes beside it. Waits for a driver to leave; what that left behind is done here.
    const std::lock_guard<std::mutex> lock(run_mutex_);
    run([&] { return inbox_.allEnded(); }, Deadline::never(), 0);
    static_cast<void>(PYCOMM_FAULT("host.rest"));
  }
  // A caller that posted while this thread was leaving, and could not drive, waits for this thread.
  return !inbox_.allEnded() && !ending_.load(std::memory_order_seq_cst);
}

template <typename Done>
void HostPlane::run(const Done& done, Deadline deadline, int spin_us) {
  const int looks_before_yield = config_.crowded ? 1 : kLooksBeforeYield;
  int looks = 0;
  TimePoint spin_until{};
  while (!done() && !ending_.load(std::memory_order_seq_cst)) {
    uint64_t blocked = 0;
    if (step(blocked)) {
      looks = 0;
      if (deadline.expired()) { // a long operation must not keep its caller from looking for Ctrl-C
        return;
      }
      continue;
    }
    if (spin_us > 0) {
      if (++looks % looks_before_yield != 0) {
        pauseCore();
        continue;
      }
      const TimePoint now = Clock::now();
      if (looks == looks_before_yield) {
        spin_until = now + std::chrono::microseconds(spin_us);
      }
      if (now < spin_until) {
        std::this_thread::yield(); // the scheduler may have put the peer on this core
        continue;
      }
    }
    if (deadline.expired()) {
      return;
    }
    sleep(deadline);
    looks = 0;
  }
}

bool HostPlane::step(uint64_t& blocked) noexcept {
  if (broken_) {
    return false;
  }
  bool moved = false;
  try {
    if (inbox_.arrived()) {
      takeInbox();
    }
    runQueue(blocked, moved);
  } catch (...) {
    broken_ = true;
    report();
    return false;
  }
  return moved;
}

void HostPlane::takeInbox() {
  inbox_.take(taken_);
  for (std::shared_ptr<Operation>& operation : taken_) {
    PYCOMM_FAULT_POINT("operation.post");
    const TimePoint issued = operation->issuedAt();
    const Deadline deadline = operation->request().deadline;
    const uint64_t ticket = operation->shared().ticket;
    operation->mark().running(issued, operation->shared().bytes_total);
    HostTransfer& transfer = queue_.emplace_back(view_, heaps_.own.get(), std::move(operation), ticket);
    transfer.tell_at = issued + std::chrono::milliseconds(config_.tell_after_ms);
    if (!deadline.isNever()) { // early enough for the others' answers
      transfer.tell_at = std::min(transfer.tell_at, issued + (deadline.instant() - issued) / 4);
    }
  }
  taken_.clear();
}

void HostPlane::prepareStage() {
  if (!staged_) {
    arena_->commit(
        HostView::stageOffset(view_.size, view_.rank),
        HostView::stageOffset(view_.size, view_.rank + 1) - HostView::stageOffset(view_.size, view_.rank));
    staged_ = true;
  }
}

void HostPlane::runQueue(uint64_t& blocked, bool& moved) {
  while (entered_ < queue_.size() && !ending_.load(std::memory_order_seq_cst) && queue_[entered_].mayEnter(blocked)) {
    HostTransfer& transfer = queue_[entered_];
    if (transfer.large()) {
      prepareStage();
    }
    transfer.enter();
    ring();
    ++entered_;
    moved = true;
  }
  while (head_ < entered_) {
    HostTransfer& transfer = queue_[head_];
    const HostTransfer::Progress progress = transfer.advance(rounds_, blocked);
    if (progress == HostTransfer::Progress::Differs) {
      const Operation::Request& request = transfer.operation()->request();
      throw Error(disagreement(
          identity_.hosts,
          identity_.rank,
          request.descriptor,
          transfer.differentPeer(),
          transfer.differentDescriptor(),
          request.id));
    }
    if (progress == HostTransfer::Progress::Blocked) {
      break;
    }
    moved = true;
    if (progress == HostTransfer::Progress::Moved) {
      if (transfer.large()) {
        ring();
      }
      return; // who drives looks whether it is to stop
    }
    settle(transfer);
    ++head_;
  }
  if (head_ == queue_.size()) {
    queue_.clear();
    head_ = entered_ = 0;
  } else if (head_ >= kCompactAt) {
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head_));
    entered_ -= head_;
    head_ = 0;
  }
}

void HostPlane::settle(HostTransfer& transfer) {
  PYCOMM_FAULT_POINT("operation.finish");
  Operation& operation = *transfer.operation();
  // After the last read of the others' slots: they are written again once all have stored this.
  view_.progress(view_.rank).done.store(transfer.ticket(), std::memory_order_seq_cst);
  ring();
  operation.mark().received(operation.shared().bytes_total);
  if (transfer.told) {
    events_.unstuck(operation.request().id.id);
  }
  inbox_.ended();
  operation.finish(std::nullopt);
}

// Wakes those who sleep until this rank goes on.
void HostPlane::ring() const noexcept {
  for (int peer = 0; peer < view_.size; ++peer) {
    HostProgress& progress = view_.progress(peer);
    if (peer != view_.rank && (progress.waits_for.load(std::memory_order_seq_cst) >> view_.rank & 1) != 0) {
      progress.bell.fetch_add(1, std::memory_order_seq_cst);
      futexWake(progress.bell);
    }
  }
}

void HostPlane::ringSelf() const noexcept {
  HostProgress& progress = view_.progress(view_.rank);
  if (progress.waits_for.load(std::memory_order_seq_cst) != 0) {
    progress.bell.fetch_add(1, std::memory_order_seq_cst);
    futexWake(progress.bell);
  }
}

// No wake-up is lost: this rank stores for whom it waits (1), reads the bell, then looks once more whether it can go on (2). A peer
// stores its counter (3), then looks who waits (4), and rings if it is this one. All four are sequentially consistent, so they have one
// order: if (4) came before (1), then (3) came before (2), and the look finds it. If (4) came after (1), the peer rings: either before
// the bell was read, then (3) came before (2) as well; or after it, then the kernel finds another value than was read and does not let
// this thread sleep. Release and acquire alone would let a processor do (4) before (3) is seen.
void HostPlane::sleep(Deadline deadline) noexcept {
  HostProgress& progress = view_.progress(view_.rank);
  uint64_t blocked = 0;
  if (step(blocked)) {
    return;
  }
  progress.waits_for.store(blocked | uint64_t{1} << view_.rank, std::memory_order_seq_cst);
  const uint32_t bell = progress.bell.load(std::memory_order_seq_cst);
  uint64_t left = 0;
  for (int peer = 0; peer < view_.size; ++peer) {
    if (peer != view_.rank && view_.progress(peer).left.load(std::memory_order_seq_cst) == kLeftInOrder) {
      left |= uint64_t{1} << peer;
    }
  }
  uint64_t still = 0;
  const bool moved = step(still);
  if (!moved && (still & left) != 0) {
    missLeft(still & left); // it left before, and has not gone on since
  }
  if (!moved && still == blocked && !ending_.load(std::memory_order_seq_cst)) {
    const TimePoint now = Clock::now();
    TimePoint until = std::min(now + std::chrono::milliseconds(kLongestParkMs), deadline.instant());
    until = std::min(until, tellStuck(now));
    const auto pause = std::chrono::duration_cast<std::chrono::microseconds>(until - now).count();
    if (pause > 0) {
      futexWait(progress.bell, bell, pause);
    }
  }
  progress.waits_for.store(0, std::memory_order_seq_cst);
}

TimePoint HostPlane::tellStuck(TimePoint now) {
  TimePoint next = TimePoint::max();
  for (size_t i = head_; i < queue_.size(); ++i) {
    HostTransfer& transfer = queue_[i];
    if (transfer.tell_at <= now || (!transfer.told && transfer.astray())) {
      transfer.told = said([&] { events_.stuck(transfer.operation()); }) || transfer.told;
      transfer.tell_at = now + kReportAgain; // the lane may have had no memory for it
    }
    next = std::min(next, transfer.tell_at);
  }
  return next;
}

void HostPlane::missLeft(uint64_t blocked) {
  if (broken_ || head_ == queue_.size()) {
    return;
  }
  for (int peer = 0; peer < view_.size; ++peer) {
    if ((blocked >> peer & 1) != 0) {
      broken_ = said([&] { events_.notice(peerLeftUs(peer, *queue_[head_].operation(), identity_)); });
      return;
    }
  }
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

void HostPlane::report() noexcept {
  try {
    events_.notice(ownTrouble(std::current_exception(), identity_));
  } catch (...) { // no memory even to say so: the deadline ends what waits
  }
}

} // namespace pycomm
