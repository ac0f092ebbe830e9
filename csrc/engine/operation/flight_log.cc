#include "engine/operation/flight_log.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace pycomm {
namespace {

// How many operations under way a newer one passes over before it takes the next slot all the same.
constexpr int kPassOver = 16;

// Slot::life: 56 bits of ticket, 8 of state.
constexpr int kStateBits = 8;
constexpr uint64_t lifeOf(uint64_t ticket, OperationState state) noexcept {
  return ticket << kStateBits | static_cast<uint64_t>(state);
}
constexpr uint64_t ticketIn(uint64_t life) noexcept {
  return life >> kStateBits;
}
constexpr OperationState stateIn(uint64_t life) noexcept {
  return static_cast<OperationState>(life & 0xff);
}
// That of a slot while it is given to another operation.
constexpr uint64_t kWriting = ~uint64_t{0};

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

int64_t nanoseconds(TimePoint at) noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
}

uint64_t pair(uint32_t low, uint32_t high) noexcept {
  return static_cast<uint64_t>(high) << 32 | low;
}
uint32_t low(uint64_t both) noexcept {
  return static_cast<uint32_t>(both);
}
uint32_t high(uint64_t both) noexcept {
  return static_cast<uint32_t>(both >> 32);
}

uint32_t callingThread() noexcept {
  // A system call the first time; the number stays a thread's own, in a child of fork() only that of the parent's thread.
  thread_local const auto number = static_cast<uint32_t>(::syscall(SYS_gettid));
  return number;
}

bool isOver(OperationState state) noexcept {
  return state == OperationState::Done || state == OperationState::Failed;
}

bool byTicket(const FlightLog::Entry& a, const FlightLog::Entry& b) {
  return a.ticket < b.ticket;
}

} // namespace

const char* operationStateName(OperationState state) noexcept {
  switch (state) {
    case OperationState::Queued:
      return "queued";
    case OperationState::Running:
      return "running";
    case OperationState::Done:
      return "done";
    case OperationState::Failed:
      return "failed";
  }
  return "unknown";
}

const char* groupPhaseName(GroupPhase phase) noexcept {
  switch (phase) {
    case GroupPhase::Rendezvous:
      return "rendezvous";
    case GroupPhase::Connect:
      return "connect";
    case GroupPhase::Ready:
      return "ready";
    case GroupPhase::Failed:
      return "failed";
    case GroupPhase::Closed:
      return "closed";
  }
  return "unknown";
}

std::shared_ptr<FlightLog> FlightLog::open(Subject subject) {
  std::shared_ptr<FlightLog> log(new FlightLog(std::move(subject)));
  log->reached(GroupPhase::Rendezvous);
  return log;
}

FlightLog::FlightLog(Subject subject)
    : subject_(std::move(subject)),
      memory_(std::calloc(subject_.slots + 1, sizeof(Slot))),
      slots_(aligned(memory_.get())),
      slot_count_(slots_ == nullptr ? 0 : subject_.slots) {} // without memory for a record the group works all the same

FlightLog::Slot* FlightLog::aligned(void* memory) noexcept {
  size_t room = 2 * sizeof(Slot);
  return memory == nullptr ? nullptr : static_cast<Slot*>(std::align(alignof(Slot), sizeof(Slot), memory, room));
}

FlightLog::Mark FlightLog::issued(
    const std::shared_ptr<FlightLog>& log,
    const OperationId& id,
    const Descriptor& descriptor,
    TimePoint now) noexcept {
  if (log->slot_count_ == 0) {
    return {};
  }
  uint64_t ticket = 0;
  Slot* slot = nullptr;
  bool claimed = false;
  for (int passed = 0; passed <= kPassOver && !claimed; ++passed) {
    ticket = log->next_.fetch_add(1, kRelaxed) + 1;
    slot = log->slots_ + (ticket - 1) % log->slot_count_;
    uint64_t before = slot->life.load(kRelaxed);
    const bool free = before == 0 || isOver(stateIn(before)) || passed == kPassOver;
    // An exchange, so that two writers that have come round to the same slot cannot both have it. Every store below is a release,
    // so that a reader which finds one of them also finds the slot closed, or given to another ticket.
    claimed = before != kWriting && free &&
        slot->life.compare_exchange_strong(before, kWriting, std::memory_order_acq_rel, kRelaxed);
  }
  if (!claimed) { // others write in every slot that was tried
    return {};
  }
  slot->id.store(id.id, kRelease);
  slot->sequence.store(id.sequence, kRelease);
  slot->numel.store(descriptor.numel, kRelease);
  slot->kinds.store(
      pair(
          static_cast<uint32_t>(descriptor.kind) | static_cast<uint32_t>(descriptor.dtype) << 8 |
              static_cast<uint32_t>(descriptor.reduce_op) << 16 | static_cast<uint32_t>(descriptor.wireByte()) << 24,
          static_cast<uint32_t>(descriptor.algorithm)),
      kRelease);
  slot->root_and_tag.store(pair(static_cast<uint32_t>(descriptor.root), descriptor.tag), kRelease);
  slot->digest_and_thread.store(pair(descriptor.digest, callingThread()), kRelease);
  slot->outcome.store(0, kRelease);
  slot->issued_ns.store(nanoseconds(now), kRelease);
  slot->started_ns.store(0, kRelease);
  slot->first_byte_ns.store(0, kRelease);
  slot->ended_ns.store(0, kRelease);
  slot->bytes_done.store(0, kRelease);
  slot->bytes_total.store(0, kRelease);
  slot->life.store(lifeOf(ticket, OperationState::Queued), kRelease);
  return {std::shared_ptr<Slot>(log, slot), ticket};
}

bool FlightLog::Mark::owns() const noexcept {
  return slot_ != nullptr && ticketIn(slot_->life.load(kRelaxed)) == ticket_;
}

void FlightLog::Mark::become(OperationState state) const noexcept {
  uint64_t life = slot_->life.load(kRelaxed);
  while (ticketIn(life) == ticket_ &&
         !slot_->life.compare_exchange_weak(life, lifeOf(ticket_, state), kRelease, kRelaxed)) {
  }
}

void FlightLog::Mark::from(int sender) const noexcept {
  if (owns()) {
    const auto tag = static_cast<uint32_t>(slot_->root_and_tag.load(kRelaxed) >> 32);
    slot_->root_and_tag.store(pair(static_cast<uint32_t>(sender), tag), kRelaxed);
  }
}

void FlightLog::Mark::running(TimePoint now, int64_t bytes_total) const noexcept {
  if (owns()) {
    slot_->started_ns.store(nanoseconds(now), kRelaxed);
    slot_->bytes_total.store(bytes_total, kRelaxed);
    become(OperationState::Running);
  }
}

void FlightLog::Mark::arriving(TimePoint now) const noexcept {
  if (owns() && slot_->first_byte_ns.load(kRelaxed) == 0) {
    slot_->first_byte_ns.store(nanoseconds(now), kRelaxed);
  }
}

void FlightLog::Mark::received(int64_t bytes_done) const noexcept {
  if (owns()) {
    slot_->bytes_done.store(bytes_done, kRelaxed);
    if (slot_->first_byte_ns.load(kRelaxed) == 0) { // it had come before the operation was issued here
      slot_->first_byte_ns.store(slot_->started_ns.load(kRelaxed), kRelaxed);
    }
  }
}

void FlightLog::Mark::ended(const std::optional<ErrorRecord>& error) const noexcept {
  if (owns()) {
    slot_->ended_ns.store(nanoseconds(Clock::now()), kRelaxed);
    if (error) {
      slot_->outcome.store(pair(static_cast<uint32_t>(error->code), static_cast<uint32_t>(error->peer)), kRelaxed);
    }
    become(error ? OperationState::Failed : OperationState::Done);
  }
}

void FlightLog::reached(GroupPhase phase) noexcept {
  int64_t never = 0;
  phase_ns_[static_cast<size_t>(phase)].compare_exchange_strong(never, nanoseconds(Clock::now()), kRelaxed);
}

void FlightLog::failed(const ErrorRecord& record) {
  reached(GroupPhase::Failed);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_is_final_) {
    failure_ = record;
    failure_is_final_ = true;
  }
}

void FlightLog::failing(const ErrorRecord& so_far) {
  reached(GroupPhase::Failed);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_is_final_) {
    failure_ = so_far;
  }
}

void FlightLog::met(std::vector<std::string> hosts, uint64_t run) {
  reached(GroupPhase::Connect);
  const std::lock_guard<std::mutex> lock(mutex_);
  hosts_ = std::move(hosts);
  run_ = run;
}

bool FlightLog::readSlot(const Slot& slot, Entry& entry) noexcept {
  // Each load stays before the next one, so the last tells whether all others are of one operation.
  const uint64_t life = slot.life.load(kAcquire);
  if (life == 0 || life == kWriting) {
    return false;
  }
  entry.ticket = ticketIn(life);
  entry.state = stateIn(life);
  entry.id.id = slot.id.load(kAcquire);
  entry.id.sequence = slot.sequence.load(kAcquire);
  const uint64_t kinds = slot.kinds.load(kAcquire);
  Descriptor& descriptor = entry.descriptor;
  descriptor.kind = static_cast<Collective>(kinds & 0xff);
  descriptor.dtype = static_cast<DType>(kinds >> 8 & 0xff);
  descriptor.reduce_op = static_cast<ReduceOp>(kinds >> 16 & 0xff);
  descriptor.setWireByte(static_cast<uint8_t>(kinds >> 24 & 0xff));
  descriptor.algorithm = static_cast<Algorithm>(high(kinds));
  descriptor.numel = slot.numel.load(kAcquire);
  const uint64_t root_and_tag = slot.root_and_tag.load(kAcquire);
  descriptor.root = static_cast<int32_t>(low(root_and_tag));
  descriptor.tag = high(root_and_tag);
  const uint64_t digest_and_thread = slot.digest_and_thread.load(kAcquire);
  descriptor.digest = low(digest_and_thread);
  entry.thread = static_cast<int>(high(digest_and_thread));
  const uint64_t outcome = slot.outcome.load(kAcquire);
  if (entry.state == OperationState::Failed) {
    entry.code = static_cast<ErrorCode>(low(outcome));
    entry.blamed = static_cast<int>(high(outcome));
  }
  entry.issued_ns = slot.issued_ns.load(kAcquire);
  entry.started_ns = slot.started_ns.load(kAcquire);
  entry.first_byte_ns = slot.first_byte_ns.load(kAcquire);
  entry.ended_ns = isOver(entry.state) ? slot.ended_ns.load(kAcquire) : 0;
  entry.bytes_done = slot.bytes_done.load(kAcquire);
  entry.bytes_total = slot.bytes_total.load(kAcquire);
  // Given to another operation meanwhile: then what was read is of two.
  return ticketIn(slot.life.load(kAcquire)) == entry.ticket;
}

FlightLog::Snapshot FlightLog::read() const {
  Snapshot snapshot;
  const uint64_t tickets = next_.load(kRelaxed);
  const size_t used = static_cast<size_t>(std::min<uint64_t>(tickets, slot_count_));
  snapshot.entries.reserve(used);
  for (size_t i = 0; i < used; ++i) {
    Entry entry;
    if (readSlot(slots_[i], entry)) {
      snapshot.entries.push_back(entry);
    }
  }
  std::sort(snapshot.entries.begin(), snapshot.entries.end(), byTicket);
  snapshot.complete = tickets == snapshot.entries.size();
  readRest(snapshot);
  return snapshot;
}

FlightLog::Snapshot FlightLog::readBrief(size_t pending, size_t ended) const {
  Snapshot snapshot;
  const uint64_t tickets = next_.load(kRelaxed);
  const size_t used = static_cast<size_t>(std::min<uint64_t>(tickets, slot_count_));
  std::vector<Entry> waiting; // a heap whose front is the newest
  std::vector<Entry> over; // a heap whose front is the oldest
  std::optional<Entry> newest;
  const auto keep = [](std::vector<Entry>& heap, const Entry& entry, size_t most, const auto& order) {
    if (most > 0) {
      heap.push_back(entry);
      std::push_heap(heap.begin(), heap.end(), order);
      if (heap.size() > most) {
        std::pop_heap(heap.begin(), heap.end(), order);
        heap.pop_back();
      }
    }
  };
  const auto later = [](const Entry& a, const Entry& b) { return a.ticket > b.ticket; };
  for (size_t i = 0; i < used; ++i) {
    Entry entry;
    if (!readSlot(slots_[i], entry)) {
      continue;
    }
    if (entry.id.sequence >= 0 && (!newest || newest->ticket < entry.ticket)) {
      newest = entry;
    }
    if (isOver(entry.state)) {
      keep(over, entry, ended, later);
    } else {
      keep(waiting, entry, pending, byTicket);
    }
  }
  snapshot.entries = std::move(waiting);
  snapshot.entries.insert(snapshot.entries.end(), over.begin(), over.end());
  const auto is_newest = [&](const Entry& entry) { return entry.ticket == newest->ticket; };
  if (newest && std::none_of(snapshot.entries.begin(), snapshot.entries.end(), is_newest)) {
    snapshot.entries.push_back(*newest);
  }
  std::sort(snapshot.entries.begin(), snapshot.entries.end(), byTicket);
  snapshot.complete = tickets == snapshot.entries.size();
  readRest(snapshot);
  return snapshot;
}

void FlightLog::readRest(Snapshot& snapshot) const {
  for (size_t phase = 0; phase < kGroupPhases; ++phase) {
    snapshot.phase_ns[phase] = phase_ns_[phase].load(kRelaxed);
  }
  snapshot.title = subject_.title == nullptr ? "" : subject_.title->get();
  const std::lock_guard<std::mutex> lock(mutex_);
  snapshot.hosts = hosts_;
  snapshot.run = run_;
  snapshot.failure = failure_;
}

} // namespace pycomm
