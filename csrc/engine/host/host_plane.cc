#include "engine/host/host_plane.h"

#include <chrono>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

constexpr int kPollsBeforeYield = 32;
constexpr size_t kCompactAt = 256;
constexpr size_t kKeptNbytes = 64 << 10; // of an empty list; a burst of more gives its memory back

inline void pauseCore() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

int64_t bytesOf(const Descriptor& descriptor) {
  return descriptor.kind == Collective::Barrier
      ? 0
      : descriptor.numel * static_cast<int64_t>(elementSize(descriptor.dtype));
}

template <typename T>
void clear(std::vector<T>& list) noexcept {
  list.clear();
  if (list.capacity() * sizeof(T) > kKeptNbytes) {
    std::vector<T>().swap(list);
  }
}

/// False if there is no memory to report it: then the next sleep, a second later at the most, is for reporting it again.
template <typename Report>
bool reported(const Report& report) noexcept {
  try {
    report();
    return true;
  } catch (...) {
    return false;
  }
}

} // namespace

HostPlane::HostPlane(
    const GroupIdentity& identity,
    std::shared_ptr<const SharedArena> arena,
    HostHeaps heaps,
    Config config,
    Events events)
    : identity_(identity),
      config_(std::move(config)),
      events_(std::move(events)),
      memory_(identity, config_.ranks, std::move(arena), std::move(heaps)),
      bell_(memory_.view()),
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

// ---- any thread

bool HostPlane::post(
    const std::function<std::shared_ptr<Operation>()>& make,
    bool waits,
    std::shared_ptr<Operation>& made) {
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    made = make();
    if (closed_) {
      return false;
    }
    put(made);
  }
  static_cast<void>(PYCOMM_FAULT("host.posted"));
  bell_.ringSelf(); // another thread of this process may run operations, and sleep
  if (!waits) {
    wakeWorker();
  }
  return true;
}

void HostPlane::put(const std::shared_ptr<Operation>& made) {
  Operation::Shared& shared = made->makeShared();
  if (made->request().id.sequence <= tell_up_to_.load(std::memory_order_relaxed)) {
    tellEnd(*made);
  }
  posted_.push_back(made); // the last that takes memory: a ticket that nobody enters would hold up all that come after
  shared.ticket = ++last_ticket_;
  shared.bytes_total = bytesOf(made->request().descriptor);
  recent_[last_ticket_ % recent_.size()] = made;
  pending_.fetch_add(1, std::memory_order_seq_cst);
  any_posted_.store(true, std::memory_order_seq_cst);
}

void HostPlane::noticeException() const noexcept {
  try {
    events_.noticed(recordOfThrown(std::current_exception(), identity_));
  } catch (...) { // no memory even to say so: the deadline ends what waits
  }
}

void HostPlane::tellEnd(Operation& operation) const {
  const Operation::Request& request = operation.request();
  // This outlives its operations: close() ends them.
  operation.onDone([this, id = request.id, descriptor = request.descriptor] { events_.ended(id, descriptor); });
}

std::vector<std::shared_ptr<Operation>> HostPlane::recent() const {
  const std::lock_guard<std::mutex> lock(inbox_mutex_);
  std::vector<std::shared_ptr<Operation>> operations;
  const uint64_t kept = std::min<uint64_t>(last_ticket_, recent_.size());
  for (uint64_t ticket = last_ticket_ - kept + 1; ticket <= last_ticket_; ++ticket) {
    operations.push_back(recent_[ticket % recent_.size()]);
  }
  return operations;
}

void HostPlane::release(Operation& operation) noexcept {
  operation.shared().held.store(false, std::memory_order_seq_cst);
  bell_.ringSelf();
}

bool HostPlane::drive(const Operation& operation, Deadline deadline) {
  {
    const std::unique_lock<std::mutex> lock(run_mutex_, std::try_to_lock);
    if (ending_.load(std::memory_order_seq_cst)) {
      return false;
    }
    if (!lock.owns_lock()) {
      wakeWorker(); // who has it may be in poll(), which looks at nothing when it lets go
      return false;
    }
    run([&] { return operation.done(); }, deadline, config_.spin_us);
  }
  if (ending_.load(std::memory_order_seq_cst)) {
    return false; // the thread that ends the plane ends the operation
  }
  if (pending() != 0) { // also what was posted while this thread was leaving
    wakeWorker();
  }
  return true;
}

void HostPlane::poll() noexcept {
  const std::unique_lock<std::mutex> lock(run_mutex_, std::try_to_lock);
  if (ending_.load(std::memory_order_seq_cst)) {
    return;
  }
  if (!lock.owns_lock()) {
    wakeWorker(); // the caller may not come back before its operation is entered, and see drive()
    return;
  }
  uint64_t blocked = 0;
  (void)step(blocked);
}

void HostPlane::wakeWorker() {
  worker_.wake([this] { noticeException(); }); // not the caller's: the operation is posted
}

void HostPlane::died(int peer) noexcept {
  if (const int on_host = memory_.onHost(peer); on_host >= 0) {
    dead_.fetch_or(hostBit(on_host), std::memory_order_seq_cst);
  }
}

// Ranks run operations in order. So this one waits for what the oldest waits for that has not ended here: until that is entered, for ranks
// that may read its slots still; then for ranks that have not entered it, one that went astray among them, or have gone less far in it.
HostPlane::WaitsFor HostPlane::waitsFor(const Operation& operation) const noexcept {
  const HostView& view = memory_.view();
  const auto read = [](const HostWord<uint64_t>& word) -> uint64_t { return word.load(std::memory_order_seq_cst); };
  const uint64_t ticket = std::min(operation.shared().ticket, read(memory_.own().done) + 1);
  const auto id_of = [&](int rank) { return view.slot(rank, ticket).op_id.load(std::memory_order_relaxed); };
  const auto has_slot = [&](int rank) { return (read(view.slot(rank, ticket).ticket) & ~kHostWithdrawn) == ticket; };
  const auto has_entered = [&](int rank) { return has_slot(rank) && id_of(rank) == id_of(view.rank); };
  const bool entered = has_slot(view.rank);
  const auto how_far = [&](int rank) {
    const HostProgress& progress = view.progress(rank);
    return entered ? read(progress.staged) + read(progress.reduced) + read(progress.collected) : read(progress.done);
  };
  WaitsFor found;
  uint64_t least = entered ? how_far(view.rank) : ticket - std::min(ticket, kHostSlots);
  for (int rank = 0; rank < view.size; ++rank) {
    if (rank == view.rank || read(view.progress(rank).done) >= ticket) {
      continue;
    }
    if (entered && !has_entered(rank)) {
      found.not_entered |= hostBit(rank);
    } else if (how_far(rank) < least) {
      least = how_far(rank);
      found.behind = memory_.inGroup(rank);
    }
  }
  return found;
}

std::vector<int> HostPlane::inGroup(uint64_t ranks) const {
  std::vector<int> in_group;
  for (int rank = 0; rank < memory_.view().size; ++rank) {
    if ((ranks & hostBit(rank)) != 0) {
      in_group.push_back(memory_.inGroup(rank));
    }
  }
  return in_group;
}

// ---- the thread that holds run_mutex_

bool HostPlane::work() noexcept {
  {
    // Never spins: the program computes beside it. Waits for a driver to leave; what that left behind is done here.
    const std::lock_guard<std::mutex> lock(run_mutex_);
    run([&] { return pending() == 0; }, Deadline::never(), 0);
    static_cast<void>(PYCOMM_FAULT("host.rest"));
  }
  // A caller that posted while this thread was leaving, and could not drive, waits for this thread.
  return pending() != 0 && !ending_.load(std::memory_order_seq_cst);
}

template <typename Done>
void HostPlane::run(const Done& done, Deadline deadline, int spin_us) {
  const int polls_before_yield = config_.crowded ? 1 : kPollsBeforeYield;
  int polls = 0;
  TimePoint spin_until{};
  while (!done() && !ending_.load(std::memory_order_seq_cst)) {
    uint64_t blocked = 0;
    if (step(blocked)) {
      polls = 0;
      if (deadline.expired()) { // a long operation must not keep its caller from looking for Ctrl-C
        return;
      }
      continue;
    }
    if (spin_us > 0) {
      if (++polls % polls_before_yield != 0) {
        pauseCore();
        continue;
      }
      const TimePoint now = Clock::now();
      if (polls == polls_before_yield) {
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
    polls = 0;
  }
}

void HostPlane::sleep(Deadline deadline) noexcept {
  reportTrouble();
  uint64_t blocked = 0;
  if (step(blocked)) {
    return;
  }
  const uint32_t rung = bell_.expect(blocked);
  const uint64_t left = haveLeft();
  uint64_t still = 0;
  const bool moved = step(still);
  if (!moved && (still & left) != 0) {
    reportLeft(still & left); // it left before, and has not gone on since
  }
  if (!moved && still == blocked && !ending_.load(std::memory_order_seq_cst)) {
    const TimePoint now = Clock::now();
    TimePoint until = std::min(now + std::chrono::milliseconds(kLongestSleepMs), deadline.instant());
    until = std::min(until, reportStuck(now));
    const auto pause = std::chrono::duration_cast<std::chrono::microseconds>(until - now);
    if (pause.count() > 0) {
      bell_.sleep(rung, pause);
    }
  }
  bell_.ignore();
}

bool HostPlane::step(uint64_t& blocked) noexcept {
  if (stopped_) {
    return false;
  }
  bool moved = false;
  try {
    if (any_posted_.load(std::memory_order_seq_cst)) {
      takePosted();
    }
    enter(blocked, moved);
    advance(blocked, moved);
  } catch (...) {
    stopped_ = true;
    trouble_ = std::current_exception();
    reportTrouble();
    return false;
  }
  return moved;
}

void HostPlane::takePosted() {
  const std::lock_guard<std::mutex> lock(inbox_mutex_);
  any_posted_.store(false, std::memory_order_seq_cst);
  for (std::shared_ptr<Operation>& operation : posted_) {
    PYCOMM_FAULT_POINT("operation.post");
    const TimePoint issued = operation->issuedAt();
    const Deadline deadline = operation->request().deadline;
    const uint64_t ticket = operation->shared().ticket;
    operation->mark().running(issued, operation->shared().bytes_total);
    const TimePoint report_at = // early enough for the others' answers
        deadline.isNever() ? TimePoint::max() : issued + (deadline.instant() - issued) / 4 * 3;
    queue_.emplace_back(memory_, std::move(operation), ticket, report_at);
  }
  clear(posted_);
}

void HostPlane::enter(uint64_t& blocked, bool& moved) {
  while (entered_ < queue_.size() && !ending_.load(std::memory_order_seq_cst) &&
         queue_[entered_].transfer.mayEnter(blocked)) {
    HostTransfer& transfer = queue_[entered_].transfer;
    if (transfer.large()) {
      memory_.commitStages();
    }
    transfer.enter();
    bell_.ringOthers();
    moves_ += entered_ == head_ ? 1 : 0;
    ++entered_;
    moved = true;
  }
}

void HostPlane::advance(uint64_t& blocked, bool& moved) {
  while (head_ < entered_) {
    HostTransfer& transfer = queue_[head_].transfer;
    const bool was_astray = transfer.astray();
    const HostTransfer::AdvanceResult result =
        transfer.advance(rounds_, ending_.load(std::memory_order_seq_cst), blocked);
    if (result == HostTransfer::AdvanceResult::Blocked) {
      moves_ += transfer.astray() != was_astray ? 1 : 0;
      break;
    }
    moved = true;
    ++moves_;
    if (result == HostTransfer::AdvanceResult::Moved) {
      if (transfer.large()) {
        bell_.ringOthers();
      }
      return; // who drives looks whether it is to stop
    }
    finish(queue_[head_]);
    ++head_;
  }
  dropEnded();
}

void HostPlane::dropEnded() {
  if (head_ == queue_.size()) {
    clear(queue_);
    head_ = entered_ = 0;
  } else if (head_ >= kCompactAt) {
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(head_));
    entered_ -= head_;
    head_ = 0;
  }
}

void HostPlane::finish(const Entry& entry) {
  PYCOMM_FAULT_POINT("operation.finish");
  Operation& operation = *entry.transfer.operation();
  // After the last read of the others' slots: they are written again once all have stored this.
  memory_.own().done.store(entry.transfer.ticket(), std::memory_order_seq_cst);
  bell_.ringOthers();
  operation.mark().received(operation.shared().bytes_total);
  pending_.fetch_sub(1, std::memory_order_seq_cst);
  operation.finish(std::nullopt);
}

// When the oldest operation, which has moved since the last call, is to be reported.
TimePoint HostPlane::stuckAt(TimePoint now) const noexcept {
  if (head_ == entered_) {
    return TimePoint::
        max(); // none runs: this rank waits for its own input, or for slots of operations that have ended here
  }
  const HostTransfer& oldest = queue_[head_].transfer;
  if (oldest.astray()) {
    return now;
  }
  Clock::duration patience = std::chrono::milliseconds(config_.stuck_after_ms);
  const Deadline deadline = oldest.operation()->request().deadline;
  if (!deadline.isNever()) { // early enough for the others' answers
    patience = std::min(patience, (deadline.instant() - oldest.operation()->issuedAt()) / 4);
  }
  return now + patience;
}

TimePoint HostPlane::reportStuck(TimePoint now) noexcept {
  if (std::exchange(looked_, moves_) != moves_) {
    stuck_at_ = stuckAt(now);
  }
  TimePoint next = TimePoint::max();
  for (size_t i = head_; i < queue_.size(); ++i) {
    Entry& entry = queue_[i];
    if (entry.report_at <= now || (i == head_ && stuck_at_ <= now)) {
      static_cast<void>(reported([&] { events_.stuck(entry.transfer.operation(), entry.transfer.lacking()); }));
      entry.report_at = now + kSayAgain; // the ranks that lack may be others then; or there was no memory for it
      stuck_at_ = i == head_ ? TimePoint::max() : stuck_at_;
    }
    next = std::min(next, entry.report_at);
  }
  return std::min(next, stuck_at_);
}

void HostPlane::reportTrouble() noexcept {
  if (trouble_ && reported([&] { events_.noticed(recordOfThrown(trouble_, identity_)); })) {
    trouble_ = nullptr;
  }
}

uint64_t HostPlane::haveLeft() const noexcept {
  const HostView& view = memory_.view();
  uint64_t left = 0;
  for (int peer = 0; peer < view.size; ++peer) {
    if (peer != view.rank && view.progress(peer).left.load(std::memory_order_seq_cst) == kLeftInOrder) {
      left |= hostBit(peer);
    }
  }
  return left;
}

void HostPlane::reportLeft(uint64_t ranks) noexcept {
  const Operation* const waiting = running();
  if (waiting == nullptr) {
    return;
  }
  for (int peer = 0; peer < memory_.view().size; ++peer) {
    if ((ranks & hostBit(peer)) != 0) {
      stopped_ = reported([&] { events_.noticed(peerLeftUs(memory_.inGroup(peer), *waiting, identity_)); });
      return;
    }
  }
}

const Operation* HostPlane::running() const noexcept {
  return stopped_ || head_ == queue_.size() ? nullptr : queue_[head_].transfer.operation().get();
}

// ---- the end

void HostPlane::fail(const ErrorRecord& cause, const OldestEnds& told, const std::function<void()>& ended) noexcept {
  ending_.store(true, std::memory_order_seq_cst);
  bell_.ringSelf(); // the thread that runs operations leaves, after one step at the most
  const auto end = [this](const ErrorRecord& why, const auto& oldest, const auto& then) {
    {
      const std::lock_guard<std::mutex> lock(run_mutex_);
      finishAll();
      memory_.own().left.store(kGaveUp, std::memory_order_seq_cst); // before operands are let go of
      withdrawAll();
      endAll(why, oldest);
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
  bell_.ringSelf();
  worker_.stop(); // first: a failure that came before ends all with its cause there
  const std::lock_guard<std::mutex> lock(run_mutex_);
  HostWord<uint32_t>& left = memory_.own().left;
  if (left.load(std::memory_order_seq_cst) != kGaveUp) {
    finishAll();
    const Operation* const under_way = running();
    if (under_way != nullptr) {
      try {
        events_.noticed(leftInTheMiddle(*under_way, identity_));
      } catch (const std::bad_alloc&) { // the others find that this rank has left
      }
    }
    withdrawAll();
    left.store(kLeftInOrder, std::memory_order_seq_cst);
    bell_.ringOthers();
  }
  endAll(reason, nullptr);
}

void HostPlane::finishAll() noexcept {
  uint64_t blocked = 0;
  while (step(blocked)) {
  }
}

void HostPlane::withdrawAll() const noexcept {
  for (size_t i = head_; i < entered_; ++i) {
    queue_[i].transfer.withdraw();
  }
}

void HostPlane::endAll(const ErrorRecord& cause, const OldestEnds& told) noexcept {
  stopped_ = true;
  takeAwayAll();
  std::vector<std::shared_ptr<Operation>> posted;
  {
    const std::lock_guard<std::mutex> lock(inbox_mutex_);
    closed_ = true;
    posted.swap(posted_);
  }
  std::vector<Entry> queued;
  queued.swap(queue_);
  const size_t first = std::exchange(head_, 0);
  entered_ = 0;
  bool oldest = true;
  const auto end = [&](Operation& operation) {
    ErrorRecord record = recordInAnyCase(identity_, [&] { return errorOf(operation, cause, identity_); });
    record.bytes_done = operation.shared().bytes_done.load(std::memory_order_relaxed);
    record.bytes_total = operation.shared().bytes_total;
    record.phase = record.phase.known() ? record.phase : ErrorPhase::Transfer;
    try {
      if (std::exchange(oldest, false) && told) {
        told(record, operation.issuedAt());
      }
    } catch (...) { // no memory to keep it: the group's cause itself is known
    }
    pending_.fetch_sub(1, std::memory_order_seq_cst);
    operation.finish(std::move(record));
  };
  for (size_t i = first; i < queued.size(); ++i) {
    end(*queued[i].transfer.operation());
  }
  for (const std::shared_ptr<Operation>& operation : posted) {
    if (operation != nullptr) {
      end(*operation);
    }
  }
}

BufferView HostPlane::writtenBy(int peer) const noexcept {
  if ((dead_.load(std::memory_order_seq_cst) & hostBit(peer)) != 0) {
    return {};
  }
  for (size_t i = head_; i < entered_; ++i) {
    const BufferView part = queue_[i].transfer.writtenBy(peer);
    if (part.nbytes > 0) {
      return part;
    }
  }
  return {};
}

void HostPlane::takeAwayAll() const noexcept {
  int pauses = 0; // of all peers together: one that is stopped never ends its step
  for (int peer = 0; peer < memory_.view().size; ++peer) {
    if (peer == memory_.view().rank) {
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

void HostPlane::takeAway(int peer, BufferView part) const noexcept {
  const bool taken = memory_.takeAway(part);
  try {
    const std::string what = identity_.rankText(memory_.inGroup(peer)) +
        " stopped in the middle of a write into a tensor of " + identity_.rankText(identity_.rank) + " (" +
        identity_.text() + ")";
    log(LogLevel::Warn,
        taken ? what + ": from now on, operations copy that tensor; allocate a new one to avoid this"
              : what + ", and there is no memory to protect the tensor: if that rank continues, it may still write " +
                std::to_string(part.nbytes >> 10) + " KiB there");
  } catch (const std::bad_alloc&) { // nor for that line
  }
}

} // namespace pycomm
