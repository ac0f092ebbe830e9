#include "host_walk/scene.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <new>
#include <string_view>

namespace pycomm {
namespace testing {
namespace {

constexpr float kOverwritten = -77777;
constexpr double kFactor = 0.5;
constexpr uint64_t kStateSeed = 0x51ED270B2E1F9A3D;

float valueOf(int rank, size_t act, size_t i) {
  return static_cast<float>(1 + i + 512 * static_cast<size_t>(rank) + 2048 * act);
}

/// The scene's ranks are not all of their group: its numbers in the group are others than on the host.
int inGroup(int rank) {
  return rank < 0 ? rank : 2 * rank + 1;
}

uint64_t bit(size_t act) {
  return uint64_t{1} << act;
}

/// For all that the rank does from here on, what it has seen in this call does not matter. Not if ranks sleep: before that one compares what it
/// saw in two steps.
void forget(std::string_view where) {
  const HostScene& scene = HostScene::current();
  Walk& walk = Walk::current();
  if (!scene.plot().sleeps) {
    walk.knowsOnly(mixed(scene.stateOf(walk.rank()), where.data(), where.size()));
  }
}

/// Whether the order of accesses to this word is walked through.
bool counts(const HostScene::Word& word) {
  const Plot& plot = HostScene::current().plot();
  return (!word.wakes || plot.sleeps) && (!word.slot || plot.enters);
}

} // namespace

// A walk has one order of all accesses. The engine must ask processors for that, too, but where a rank loads what it alone stores.
void weaker(const void* word, bool loads) {
  const HostScene::Word which = HostScene::current().wordAt(word);
  if (!loads || which.bell || which.owner != Walk::current().rank()) {
    Walk::current().wrong(std::string(which.name) + " is used with a weaker order than sequential consistency");
  }
}

void beforeLoad(const void* word) {
  HostScene::current().touched() = false;
  const HostScene::Word which = HostScene::current().wordAt(word);
  if (which.written) { // the next peer, or the same once more
    forget(std::to_string(which.owner));
  }
  if (counts(which)) {
    Walk::current().pauseToLoad(word, which.name, which.wakes && which.owner != Walk::current().rank());
  }
}

void loads(const void* word) {
  HostScene::current().touched() = false;
  Walk::current().loads(word);
}

void afterLoad(const void* word, uint64_t value) {
  const HostScene::Word which = HostScene::current().wordAt(word);
  if (which.bell) {
    HostScene::current().readBell(static_cast<uint32_t>(value));
  } else if (which.owner != Walk::current().rank() && !which.wakes) {
    Walk::current().saw(value);
  }
  if (which.slot && which.owner != Walk::current().rank() && HostScene::current().plot().size == 2) {
    Walk::current().pause("reads a slot"); // what it finds there has no fault point of its own
  }
}

bool isCounter(const void* word) {
  return HostScene::current().wordAt(word).counter;
}

void beforeStore(const void* word, uint64_t is, uint64_t will_be) {
  const HostScene::Word which = HostScene::current().wordAt(word);
  if (which.counter && will_be < is) {
    Walk::current().wrong(
        std::string(which.name) + " falls from " + std::to_string(is) + " to " + std::to_string(will_be));
  }
  if (which.left) {
    forget(which.name);
  }
  if (std::exchange(HostScene::current().touched(), false) && which.of_round) {
    Walk::current().stores(word);
  } else if (counts(which)) {
    Walk::current().pauseToStore(word, which.name, which.wakes && which.owner != Walk::current().rank());
  }
}

void afterStore(const void* word) {
  const HostScene::Word which = HostScene::current().wordAt(word);
  if (which.wakes && !which.bell) {
    HostScene::current().expects();
  }
  Walk::current().wrote();
}

void lacks(const WalkedWord<uint64_t>& word, uint64_t bound) {
  HostScene::current().lacks(word, bound);
}

// What a rank does with bytes and the counter of rounds that it stores at once after that are one step. Between the two the others do what they
// could do before: none of them writes those bytes, and one that reads what is not announced yet would have read the wrong bytes before.
void beforeBytes(const char* site) {
  HostScene& scene = HostScene::current();
  scene.touched() = false;
  if (scene.touchesBytes(site)) {
    forget(site);
    Walk::current().pause(site);
    scene.touched() = true;
  }
}

HostScene* HostScene::current_ = nullptr;

HostScene::HostScene(Plot plot)
    : plot_(std::move(plot)),
      arena_(std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(plot_.size)))) {
  current_ = this;
  arena_->commit(0, HostView::totalNbytes(plot_.size));
  for (int rank = 0; rank < plot_.size; ++rank) {
    heaps_.push_back(std::make_shared<SharedHeap>(SharedArena::create(4 << 20)));
    ranges_.push_back(heaps_.back()->range());
    for (const Act& act : plot_.acts) {
      const auto make = [&](size_t numel) {
        if (act.in_place) {
          return static_cast<float*>(heaps_.back()->allocate(numel * sizeof(float)));
        }
        return ordinary_.emplace_back(std::max<size_t>(numel, 1)).data();
      };
      Tensors tensors;
      tensors.input = make(inputNumel(act));
      const bool one = act.kind == Collective::AllReduce || act.kind == Collective::Broadcast;
      tensors.output = one ? tensors.input : make(outputNumel(act));
      tensors_.push_back(tensors);
    }
  }
}

int64_t HostScene::numelOf(const Act& act) const noexcept {
  if (act.kind == Collective::Barrier) {
    return 0;
  }
  const size_t parts = act.kind == Collective::ReduceScatter ? static_cast<size_t>(plot_.size) : 1;
  const auto round = static_cast<int64_t>(kHostStageNbytes / sizeof(float) / parts);
  return act.rounds == 0 ? 3 : static_cast<int64_t>(act.rounds) * round - 2; // a crooked end
}

size_t HostScene::inputNumel(const Act& act) const noexcept {
  const size_t parts = act.kind == Collective::ReduceScatter ? static_cast<size_t>(plot_.size) : 1;
  return static_cast<size_t>(numelOf(act)) * parts;
}

size_t HostScene::outputNumel(const Act& act) const noexcept {
  const size_t parts = act.kind == Collective::AllGather ? static_cast<size_t>(plot_.size) : 1;
  return static_cast<size_t>(numelOf(act)) * parts;
}

float HostScene::expected(size_t act, int rank, size_t i) const {
  const Act& what = plot_.acts[act];
  const auto numel = static_cast<size_t>(numelOf(what));
  if (what.kind == Collective::Broadcast) {
    return valueOf(what.root, act, i);
  }
  if (what.kind == Collective::AllGather) {
    return valueOf(static_cast<int>(i / numel), act, i % numel);
  }
  const size_t at = what.kind == Collective::ReduceScatter ? static_cast<size_t>(rank) * numel + i : i;
  float sum = 0;
  for (int peer = 0; peer < plot_.size; ++peer) {
    sum += valueOf(peer, act, at);
  }
  if (what.op == ReduceOp::Avg) {
    return sum / static_cast<float>(plot_.size);
  }
  return what.op == ReduceOp::PremulSum ? sum * static_cast<float>(kFactor) : sum;
}

HostScene::Word HostScene::wordAt(const void* word) const {
  struct Field {
    size_t offset;
    Word word;
  };
  static constexpr Field kFields[] = {
      {offsetof(HostProgress, done), {.name = "done", .counter = true}},
      {offsetof(HostProgress, staged), {.name = "staged", .counter = true, .of_round = true}},
      {offsetof(HostProgress, reduced), {.name = "reduced", .counter = true, .of_round = true}},
      {offsetof(HostProgress, collected), {.name = "collected", .counter = true, .of_round = true}},
      {offsetof(HostProgress, left), {.name = "left", .left = true}},
      {offsetof(HostProgress, writes), {.name = "writes", .written = true}},
      {offsetof(HostProgress, waits_for), {.name = "waits_for", .wakes = true}},
      {offsetof(HostProgress, bell), {.name = "bell", .wakes = true, .bell = true}},
  };
  const auto at = static_cast<size_t>(static_cast<const std::byte*>(word) - arena_->at(0));
  Word found{.name = "ticket", .slot = true};
  if (at < static_cast<size_t>(plot_.size) * sizeof(HostProgress)) {
    const auto is = [&](const Field& field) { return field.offset == at % sizeof(HostProgress); };
    found = std::find_if(std::begin(kFields), std::end(kFields), is)->word;
    found.owner = static_cast<int>(at / sizeof(HostProgress));
  } else {
    found.owner = static_cast<int>((at - HostView::slotsOffset(plot_.size)) / HostView::kSlotNbytes / kHostSlots);
  }
  return found;
}

void HostScene::reset() {
  const auto size = static_cast<size_t>(plot_.size);
  std::memset(arena_->at(0), 0, size * sizeof(HostProgress));
  std::memset(arena_->at(HostView::slotsOffset(plot_.size)), 0, size * kHostSlots * HostView::kSlotNbytes);
  const size_t stages = HostView::stageOffset(plot_.size, 0);
  std::memset(arena_->at(stages), 0, HostView::totalNbytes(plot_.size) - stages);
  selves_.assign(size, {});
  touched_ = false;
  for (int rank = 0; rank < plot_.size; ++rank) {
    for (size_t act = 0; act < plot_.acts.size(); ++act) {
      const Tensors& tensors = tensorsOf(rank, act);
      std::fill_n(tensors.output, outputNumel(plot_.acts[act]), 0.0F);
      for (size_t i = 0; i < inputNumel(plot_.acts[act]); ++i) {
        tensors.input[i] = valueOf(rank, act, i);
      }
    }
  }
}

Operation::Request HostScene::requestOf(size_t act, int rank) {
  const Act& what = plot_.acts[act];
  const Tensors& tensors = tensorsOf(rank, act);
  Operation::Request request;
  request.id.id = 100 + act;
  request.descriptor.kind = what.kind;
  request.descriptor.dtype = DType::Float32;
  request.descriptor.reduce_op = what.op;
  request.descriptor.numel = numelOf(what) - (rank == plot_.differs ? 1 : 0);
  request.descriptor.root = inGroup(what.root);
  request.descriptor.algorithm = Algorithm::SharedMemory;
  request.extras().premul_factor = kFactor;
  request.input = {reinterpret_cast<std::byte*>(tensors.input), inputNumel(what) * sizeof(float)};
  request.output = {reinterpret_cast<std::byte*>(tensors.output), outputNumel(what) * sizeof(float)};
  return request;
}

// A member that is added to one of the next three classes does not compile until it is named here: without those that make a state, two states
// would be taken for one. The rest is the same throughout a walk, follows from these, or only says when an operation is reported as stuck.
uint64_t HostScene::stateOf(int rank) const {
  const auto& [identity, config, events, memory, bell, worker, ending, dead, pending, any_posted, tell_up_to, inbox_mutex, posted, last_ticket, recent, closed, run_mutex, queue, head, entered, rounds, moves, looked, stuck_at, stopped, trouble] =
      *selves_[static_cast<size_t>(rank)].plane;
  // Not from zero, which is what a rank that has posted only has, and mixing zeros would leave it so.
  uint64_t state = mixed(kStateSeed, rounds);
  state = mixed(state, head << 32 | entered << 16 | queue.size());
  state = mixed(state, static_cast<uint64_t>(stopped) | static_cast<uint64_t>(ending.load()) << 1);
  const auto& operations = selves_[static_cast<size_t>(rank)].operations;
  const auto done = std::count_if(operations.begin(), operations.end(), [](const auto& each) { return each->done(); });
  state = mixed(state, static_cast<uint64_t>(done) << 1 | static_cast<uint64_t>(any_posted.load()));
  for (size_t i = head; i < queue.size(); ++i) {
    const auto& [its_memory, operation, ticket, kind, element_nbytes, numel, root, scales, phase, astray, matched, base, its_rounds, round_numel, staged, reduced, collected, operands, position] =
        queue[i].transfer;
    state = mixed(state, static_cast<uint64_t>(phase) << 8 | static_cast<uint64_t>(matched));
    state = mixed(state, ticket << 1 | static_cast<uint64_t>(astray));
    state = mixed(state, base << 48 | staged << 32 | reduced << 16 | collected);
    state = mixed(state, static_cast<uint64_t>(position));
  }
  return state;
}

// Of a bell only that matters: whether it was rung since the rank that may sleep read it.
uint64_t HostScene::progressOf(int rank) const {
  const auto& [done, staged, reduced, collected, left, writes, waits_for, bell] =
      HostView{arena_->at(0), rank, plot_.size}.progress(rank);
  const std::optional<uint32_t>& rung = selves_[static_cast<size_t>(rank)].rung;
  uint64_t hash = mixed(1, done.peek() << 48 | staged.peek() << 32 | reduced.peek() << 16 | collected.peek());
  hash = mixed(hash, writes.peek() << 2 | left.peek());
  hash = mixed(hash, waits_for.peek());
  return mixed(hash, static_cast<uint64_t>(rung && *rung != bell.peek()));
}

// Not where a rank only posts or waits, or is about to load or store a word: that is a pause of its own.
bool HostScene::touchesBytes(const char* site) const {
  const auto is = [&](const char* name) { return std::strcmp(site, name) == 0; };
  const HostPlane* const plane = selves_[static_cast<size_t>(Walk::current().rank())].plane;
  const bool runs = plane != nullptr && plane->head_ < plane->queue_.size();
  const HostTransfer* const transfer = runs ? &plane->queue_[plane->head_].transfer : nullptr;
  const bool one_gives = runs && transfer->kind_ == Collective::Broadcast;
  if (is("host.stage")) {
    return !one_gives || transfer->isRoot();
  }
  if (is("host.collect")) {
    return one_gives ? !transfer->isRoot() : transfer->kind_ != Collective::ReduceScatter;
  }
  if (is("reduce.step")) {
    return transfer->phase_ != HostTransfer::Phase::InPlace;
  }
  const bool none = is("operation.post") || is("host.posted") || is("operation.finish") || is("host.pause");
  return is("host.enter") ? plot_.enters : !none;
}

void HostScene::expects() noexcept {
  Self& self = selves_[static_cast<size_t>(Walk::current().rank())];
  self.rung.reset();
  self.lacks.clear();
}

void HostScene::readBell(uint32_t rung) noexcept {
  Self& self = selves_[static_cast<size_t>(Walk::current().rank())];
  self.rung = self.rung.value_or(rung);
}

void HostScene::lacks(const WalkedWord<uint64_t>& counter, uint64_t bound) {
  if (plot_.sleeps) {
    selves_[static_cast<size_t>(Walk::current().rank())].lacks.push_back({&counter, bound});
  }
}

uint64_t HostScene::hash() const {
  const auto size = static_cast<size_t>(plot_.size);
  uint64_t hash = 1;
  for (int rank = 0; rank < plot_.size; ++rank) {
    hash = mixed(hash, progressOf(rank));
  }
  const size_t slots = HostView::slotsOffset(plot_.size);
  hash = mixed(hash, arena_->at(slots), size * kHostSlots * HostView::kSlotNbytes);
  const size_t stages = HostView::stageOffset(plot_.size, 0);
  hash = mixed(hash, arena_->at(stages), HostView::totalNbytes(plot_.size) - stages);
  for (size_t rank = 0; rank < size; ++rank) {
    for (size_t act = 0; act < plot_.acts.size(); ++act) {
      const Tensors& tensors = tensors_[rank * plot_.acts.size() + act];
      hash = mixed(hash, tensors.input, inputNumel(plot_.acts[act]) * sizeof(float));
      hash = mixed(hash, tensors.output, outputNumel(plot_.acts[act]) * sizeof(float));
    }
    const Self& self = selves_[rank];
    hash = mixed(hash, self.ended << 2 | static_cast<uint64_t>(self.left) << 1 | static_cast<uint64_t>(self.noticed));
    hash = mixed(hash, static_cast<uint64_t>(self.fails));
    hash = mixed(hash, self.ended_well << 32 | self.must_end_well << 16 | self.must_fail);
  }
  return hash;
}

bool HostScene::groupFails(int rank) const noexcept {
  return selves_[static_cast<size_t>(rank)].noticed ||
      std::any_of(selves_.begin(), selves_.end(), [](const Self& self) { return self.left; });
}

int HostScene::waysOf(int rank) const noexcept {
  if (groupFails(rank)) {
    return 2; // on, or fail
  }
  const int leaves = plot_.sleeps ? 2 : 3; // in good order, or fails: that wakes nobody
  return rank == plot_.leaver ? leaves : 1;
}

// At those that have ended since. The tensors are the rank's own again.
void HostScene::look(int rank) {
  Self& self = selves_[static_cast<size_t>(rank)];
  for (; self.ended < self.operations.size() && self.operations[self.ended]->done(); ++self.ended) {
    const size_t act = self.ended;
    const Tensors& tensors = tensorsOf(rank, act);
    const std::string name = "operation " + std::to_string(act);
    const auto error = self.operations[act]->error();
    if (!error) {
      self.ended_well |= bit(act);
      for (size_t i = 0; i < outputNumel(plot_.acts[act]); ++i) {
        if (std::abs(tensors.output[i] - expected(act, rank, i)) > 0.01F) {
          Walk::current().wrong(
              name + " has " + std::to_string(tensors.output[i]) + " at " + std::to_string(i) + ", not " +
              std::to_string(expected(act, rank, i)));
          break;
        }
      }
      if ((self.must_fail & bit(act)) != 0) {
        Walk::current().wrong(name + " ended well, and had failed on another rank before it was matched here");
      }
    } else if ((self.must_end_well & bit(act)) != 0) {
      Walk::current().wrong(name + " failed, and had ended well on another rank");
    } else if (plot_.leaver < 0 && plot_.differs < 0) {
      Walk::current().wrong(name + " failed: " + error->text());
    }
    if (plot_.differs >= 0) {
      for (size_t i = 0; i < outputNumel(plot_.acts[act]); ++i) {
        const bool one = tensors.input == tensors.output;
        if (tensors.output[i] != (one ? valueOf(rank, act, i) : 0.0F)) {
          Walk::current().wrong(name + " was written to, and the ranks differ");
          break;
        }
      }
    }
    std::fill_n(tensors.input, inputNumel(plot_.acts[act]), kOverwritten);
    std::fill_n(tensors.output, outputNumel(plot_.acts[act]), kOverwritten);
  }
}

void HostScene::leave(int rank, bool fails) {
  Self& self = selves_[static_cast<size_t>(rank)];
  self.left = true;
  self.fails = fails;
  Walk::current().wrote(); // the others have another way now
  uint64_t failed = 0; // on a rank that left before: no others need end that well
  for (size_t other = 0; other < selves_.size(); ++other) {
    self.must_end_well |= selves_[other].ended_well;
    failed |= static_cast<int>(other) != rank && selves_[other].left ? ~selves_[other].ended_well : 0;
  }
  self.must_end_well &= ~failed;
  ErrorRecord cause;
  cause.code = fails ? ErrorCode::Aborted : ErrorCode::ShutDown;
  if (fails) {
    self.plane->fail(cause, nullptr, nullptr);
  } else {
    self.plane->close(cause);
  }
  look(rank);
  for (int other = 0; other < plot_.size; ++other) {
    Self& its = selves_[static_cast<size_t>(other)];
    if (other == rank || its.plane == nullptr) {
      continue;
    }
    const HostPlane& plane = *its.plane;
    bool runs = plane.head_ < plane.queue_.size(); // the first that has not ended
    for (size_t act = 0; act < plot_.acts.size(); ++act) {
      if (its.operations[act]->done()) {
        continue;
      }
      // One that it runs: has it yet to look once more whether all have entered?
      if (!std::exchange(runs, false) || plane.queue_[plane.head_].transfer.matched_ < plot_.size) {
        its.must_fail |= ~self.ended_well & bit(act);
      }
    }
  }
}

// The one that is waited for wakes who waits, and not a third one, later: else ranks would wake one after another.
void HostScene::checkNobodySleepsFor(int rank) const {
  for (int other = 0; plot_.sleeps && other < plot_.size; ++other) { // else it waits only for the end of a write
    const HostPlane* const plane = selves_[static_cast<size_t>(other)].plane;
    if (plane == nullptr || !Walk::current().sleeps(other)) {
      continue;
    }
    for (const auto& [counter, bound] : selves_[static_cast<size_t>(other)].lacks) {
      if (wordAt(counter).owner == rank && counter->peek() >= bound) {
        Walk::current().wrong("has done what rank " + std::to_string(other) + " sleeps for, and did not wake it");
      }
    }
    if (plane->head_ == plane->entered_) {
      continue;
    }
    const HostTransfer& oldest = plane->queue_[plane->head_].transfer;
    if (oldest.phase_ == HostTransfer::Phase::Matching && oldest.matched_ == rank &&
        oldest.view().slot(rank, oldest.ticket()).ticket.peek() == oldest.ticket()) {
      Walk::current().wrong("has entered what rank " + std::to_string(other) + " sleeps for, and did not wake it");
    }
  }
}

// A slot that is not entered, or not whole, must not be read: what it says may look like another operation's.
void HostScene::checkNotAstray(int rank) const {
  const HostPlane& plane = *selves_[static_cast<size_t>(rank)].plane;
  if (plane.head_ < plane.queue_.size() && plane.queue_[plane.head_].transfer.astray()) {
    Walk::current().wrong("finds another operation in a slot, and there is none");
  }
}

void HostScene::body(int rank) {
  Walk& walk = Walk::current();
  Self& self = selves_[static_cast<size_t>(rank)];
  GroupIdentity identity;
  identity.rank = inGroup(rank);
  identity.size = inGroup(plot_.size);
  identity.hosts.resize(static_cast<size_t>(identity.size));
  HostHeaps heaps{heaps_[static_cast<size_t>(rank)], {}, ranges_};
  HostPlane::Events events;
  events.noticed = [&](const ErrorRecord& record) {
    self.noticed = true;
    if (plot_.differs < 0 && plot_.leaver < 0) {
      walk.wrong("noticed: " + record.text());
    }
  };
  events.stuck = [](const std::shared_ptr<Operation>&, uint64_t) {};
  events.ended = [](const OperationId&, const Descriptor&) {};
  HostPlane::Config config;
  for (int each = 0; each < plot_.size; ++each) {
    config.ranks.push_back(inGroup(each));
  }
  config.stuck_after_ms = 1000 * 1000; // never: to report that an operation is stuck takes loads that change nothing
  HostPlane plane(identity, arena_, std::move(heaps), config, std::move(events));
  self.plane = &plane;
  for (size_t act = 0; act < plot_.acts.size(); ++act) {
    std::shared_ptr<Operation> made;
    (void)plane.post([&] { return std::make_shared<Operation>(requestOf(act, rank)); }, true, made);
    self.operations.push_back(std::move(made));
  }
  uint64_t before = 0;
  bool first = true;
  while (self.ended < self.operations.size()) {
    const uint64_t state = stateOf(rank);
    if (!first && state == before) {
      walk.didNothing();
    }
    const int way = walk.choose(waysOf(rank), state);
    if (walk.draining()) {
      break;
    }
    if (way > 0) {
      leave(rank, way == 2 || groupFails(rank));
      break;
    }
    first = false;
    before = state;
    (void)plane.drive(*self.operations[self.ended], Deadline::after(0));
    checkNobodySleepsFor(rank);
    checkNotAstray(rank);
    if (plot_.sleeps && stateOf(rank) == before) {
      plane.sleep(Deadline::never());
      checkNobodySleepsFor(rank);
    }
    look(rank);
  }
  if (!walk.draining()) {
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    plane.close(reason);
  }
  self.plane = nullptr;
}

void HostScene::ended() {
  for (int rank = 0; rank < plot_.size; ++rank) {
    const Self& self = selves_[static_cast<size_t>(rank)];
    for (size_t act = 0; act < self.ended; ++act) {
      const Tensors& tensors = tensorsOf(rank, act);
      const float* const end = tensors.output + outputNumel(plot_.acts[act]);
      if (std::any_of<const float*>(tensors.output, end, [](float value) { return value != kOverwritten; })) {
        Walk::current().wrong(
            "operation " + std::to_string(act) + " of rank " + std::to_string(rank) + " was written to after its end");
      }
    }
  }
}

} // namespace testing

void futexWait(const WalkedWord<uint32_t>& word, uint32_t seen, int64_t /*timeout_us*/) noexcept {
  // If a rank has noticed something, another thread ends its group, and rings.
  if (!testing::HostScene::current().noticed(testing::Walk::current().rank()) &&
      word.load(std::memory_order_seq_cst) == seen) {
    testing::Walk::current().sleep(&word);
  }
}

void walkedPause() noexcept {
  testing::Walk::current().untilOthersWrite();
}

void futexWake(const WalkedWord<uint32_t>& word) noexcept {
  testing::Walk::current().wake(&word);
}

} // namespace pycomm
