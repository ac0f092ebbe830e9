#include "engine/host/host_plane.h"

#include <algorithm>
#include <new>
#include <thread>
#include <utility>

#include "base/fault_point.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// A bound on one sleep, so that a lost wake-up (a bug) shows as a delay and not as a hang.
constexpr int kLongestParkMs = 1000;
constexpr int kLooksBeforeYield = 32;

inline void pauseCore() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

/// The rank (a bit) whose process has ended, and so writes nothing any more. A connection that was reset proves no end.
uint64_t diedFirst(const ErrorRecord& cause, const GroupIdentity& identity) noexcept {
  const int peer = identity.job.inGroup(cause.peer); // records have numbers of the job
  const bool died = cause.code == ErrorCode::PeerDead && cause.phase != ErrorPhase::Reset && identity.isRank(peer);
  return died ? hostBit(peer) : 0;
}

} // namespace

HostPlane::HostPlane(
    GroupIdentity identity,
    std::shared_ptr<const SharedArena> arena,
    HostHeaps heaps,
    Config config,
    Events events)
    : identity_(std::move(identity)),
      config_(config),
      events_(std::move(events)),
      memory_(std::move(arena), std::move(heaps), identity_),
      bell_(memory_.view()),
      worker_([this] { return work(); }),
      queue_(HostQueue::Parts{identity_, memory_, bell_, inbox_, events_, ending_}, config_.tell_after_ms) {}

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
  const auto accept = [this](Operation& operation) {
    if (operation.request().id.sequence <= tell_up_to_.load(std::memory_order_relaxed)) {
      tellEnd(operation);
    }
  };
  // The id may be taken: the others would wait for this rank, and its next operation would not be theirs.
  const auto failed = [this] { events_.noticeException(identity_); };
  if (!inbox_.post(make, made, std::cref(accept), std::cref(failed))) {
    return false;
  }
  static_cast<void>(PYCOMM_FAULT("host.posted"));
  bell_.ringSelf(); // another thread of this process may run operations, and sleep
  if (!waits) {
    wakeWorker();
  }
  return true;
}

void HostPlane::tellEnd(Operation& operation) const {
  const Operation::Request& request = operation.request();
  // This outlives its operations: close() ends them.
  operation.onDone([this, id = request.id, descriptor = request.descriptor] { events_.ended(id, descriptor); });
}

void HostPlane::release(Operation& operation) noexcept {
  operation.shared().held.store(false, std::memory_order_seq_cst);
  bell_.ringSelf();
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
  worker_.wake([this] { events_.noticeException(identity_); }); // not the caller's: the operation is posted
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
    if (queue_.step(blocked)) {
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

void HostPlane::sleep(Deadline deadline) noexcept {
  uint64_t blocked = 0;
  if (queue_.step(blocked)) {
    return;
  }
  const uint32_t rung = bell_.expect(blocked);
  const uint64_t left = haveLeft();
  uint64_t still = 0;
  const bool moved = queue_.step(still);
  if (!moved && (still & left) != 0) {
    queue_.reportLeft(still & left); // it left before, and has not gone on since
  }
  if (!moved && still == blocked && !ending_.load(std::memory_order_seq_cst)) {
    const TimePoint now = Clock::now();
    TimePoint until = std::min(now + std::chrono::milliseconds(kLongestParkMs), deadline.instant());
    until = std::min(until, queue_.reportStuck(now));
    const auto pause = std::chrono::duration_cast<std::chrono::microseconds>(until - now);
    if (pause.count() > 0) {
      bell_.sleep(rung, pause);
    }
  }
  bell_.ignore();
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

HostPlane::WaitsFor HostPlane::waitsFor(const Operation& operation) const noexcept {
  const HostView& view = memory_.view();
  WaitsFor found;
  const uint64_t ticket = operation.shared().ticket;
  for (int rank = 0; rank < view.size; ++rank) {
    const bool ended = view.progress(rank).done.load(std::memory_order_seq_cst) >= ticket;
    if (rank == view.rank || ended) {
      continue;
    }
    const HostSlot& slot = view.slot(rank, ticket);
    const bool entered = (slot.ticket.load(std::memory_order_seq_cst) & ~kHostWithdrawn) == ticket;
    int& first = entered ? found.behind : found.not_entered;
    first = first < 0 ? rank : first;
  }
  return found;
}

void HostPlane::fail(
    const ErrorRecord& cause,
    const std::function<void(const ErrorRecord&)>& told,
    const std::function<void()>& ended) noexcept {
  ending_.store(true, std::memory_order_seq_cst);
  bell_.ringSelf(); // the thread that runs operations leaves, after one step at the most
  const auto end = [this](const ErrorRecord& why, const auto& oldest, const auto& then) {
    {
      const HostView& view = memory_.view();
      const std::lock_guard<std::mutex> lock(run_mutex_);
      queue_.finishAll();
      queue_.stop();
      view.progress(view.rank).left.store(kGaveUp, std::memory_order_seq_cst); // before operands are let go of
      queue_.withdrawAll();
      queue_.takeAwayAll(diedFirst(why, identity_));
      queue_.endAll([&](const Operation& operation) { return errorOf(operation, why, identity_); }, oldest);
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
  HostWord<uint32_t>& left = memory_.view().progress(identity_.rank).left;
  if (left.load(std::memory_order_seq_cst) != kGaveUp) {
    queue_.finishAll();
    const Operation* const under_way = queue_.running();
    if (under_way != nullptr) {
      try {
        events_.notice(leftInTheMiddle(*under_way, identity_));
      } catch (const std::bad_alloc&) { // the others find that this rank has left
      }
    }
    queue_.withdrawAll();
    left.store(kLeftInOrder, std::memory_order_seq_cst);
    bell_.ringOthers();
  }
  queue_.stop();
  queue_.takeAwayAll(0);
  queue_.endAll([&](const Operation& operation) { return errorOf(operation, reason, identity_); }, nullptr);
}

} // namespace pycomm
