#include "engine/host/host_transfer.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "engine/report/mismatch.h"
#include "numeric/reduce.h"

namespace pycomm {
namespace {

constexpr int64_t kStepNbytes = 1 << 20; // between two looks whether to stop; a stopped rank writes no more
constexpr int64_t kBlockNbytes =
    16 << 10; // of all ranks together it stays in the first caches between being made and being written

/// The elements of a full round: of the tensor, or of one part.
int64_t roundNumelOf(const Descriptor& descriptor, int size) {
  const size_t parts = descriptor.kind == Collective::ReduceScatter ? static_cast<size_t>(size) : 1;
  return static_cast<int64_t>(kHostStageNbytes / parts / elementSize(descriptor.dtype));
}

/// Does nothing if both are the same memory.
void copyBytes(std::byte* to, const std::byte* from, size_t nbytes) noexcept {
  if (nbytes > 0 && to != from) {
    std::memcpy(to, from, nbytes);
  }
}

} // namespace

HostTransfer::HostTransfer(const HostMemory& memory, std::shared_ptr<Operation> operation, uint64_t ticket)
    : memory_(&memory), operation_(std::move(operation)), ticket_(ticket) {
  const Descriptor& descriptor = request().descriptor;
  kind_ = descriptor.kind;
  element_nbytes_ = elementSize(descriptor.dtype);
  numel_ = kind_ == Collective::Barrier ? 0 : descriptor.numel;
  root_ = kind_ == Collective::Broadcast ? memory.onHost(descriptor.root) : -1;
  scales_ = descriptor.reduce_op == ReduceOp::PremulSum;
  if (nbytesOf(inputNumel()) > kHostInlineNbytes) {
    round_numel_ = roundNumelOf(descriptor, view().size);
    rounds_ = static_cast<uint64_t>((numel_ + round_numel_ - 1) / round_numel_);
  }
}

std::shared_ptr<PieceFlow> HostTransfer::piecesOf(const Descriptor& descriptor, int size) {
  const size_t element_nbytes = elementSize(descriptor.dtype);
  PieceFlow::Rounds rounds;
  rounds.part_nbytes = static_cast<size_t>(descriptor.numel) * element_nbytes;
  rounds.round_nbytes = static_cast<size_t>(roundNumelOf(descriptor, size)) * element_nbytes;
  rounds.input_parts = descriptor.kind == Collective::ReduceScatter ? static_cast<size_t>(size) : 1;
  rounds.output_parts = descriptor.kind == Collective::AllGather ? static_cast<size_t>(size) : 1;
  return PieceFlow::ofRounds(rounds);
}

int64_t HostTransfer::inputNumel() const noexcept {
  return numel_ * (kind_ == Collective::ReduceScatter ? view().size : 1);
}

const std::byte* HostTransfer::inputPart(int of) const noexcept {
  return request().extras().input_parts.empty() ? request().input.ptr + nbytesOf(of * numel_)
                                                : request().extras().input_parts[static_cast<size_t>(of)].ptr;
}

std::byte* HostTransfer::outputPart(int of) const noexcept {
  return request().extras().output_parts.empty() ? request().output.ptr + nbytesOf(of * numel_)
                                                 : request().extras().output_parts[static_cast<size_t>(of)].ptr;
}

void HostTransfer::give(std::byte* to, const std::byte* from, int64_t elements) const {
  if (scales_) {
    scale(request().descriptor.dtype, to, from, static_cast<size_t>(elements), request().extras().premul_factor);
  } else {
    copyBytes(to, from, nbytesOf(elements));
  }
}

void HostTransfer::fold(std::byte* to, const Sources& sources, int64_t elements) const {
  const Descriptor& descriptor = request().descriptor;
  reduceMany(
      descriptor.dtype,
      descriptor.reduce_op,
      to,
      sources.data(),
      static_cast<size_t>(view().size),
      static_cast<size_t>(elements),
      descriptor.reduce_op == ReduceOp::Avg ? view().size : 1);
}

// ---- descriptors

bool HostTransfer::mayEnter(uint64_t& blocked) const noexcept {
  if (operation_->shared().held.load(std::memory_order_seq_cst)) {
    return false; // the thread that releases it wakes this one
  }
  if (ticket_ <= kHostSlots) {
    return true;
  }
  const uint64_t before = ticket_ - kHostSlots;
  return memory_->own().done.load(std::memory_order_relaxed) >= before &&
      view().allHave(&HostProgress::done, before, blocked);
}

void HostTransfer::enter() {
  PYCOMM_FAULT_POINT("host.enter");
  HostSlot& slot = view().slot(view().rank, ticket_);
  slot.header = FrameHeader();
  slot.op_id.store(request().id.id, std::memory_order_relaxed);
  request().descriptor.writeTo(slot.header);
  slot.input_place = slot.output_place = 0;
  if (large()) {
    publishPlaces(slot);
  } else {
    givePayload();
  }
  slot.ticket.store(ticket_, std::memory_order_seq_cst); // after all that belongs to it
}

void HostTransfer::withdraw() const noexcept {
  view().slot(view().rank, ticket_).ticket.store(ticket_ | kHostWithdrawn, std::memory_order_seq_cst);
}

uint64_t HostTransfer::lacking() const noexcept {
  uint64_t ranks = 0;
  for (int rank = 0; rank < view().size; ++rank) {
    const HostSlot& slot = view().slot(rank, ticket_);
    const bool entered = slot.ticket.load(std::memory_order_seq_cst) == ticket_ && // then the slot stays as it is
        slot.op_id.load(std::memory_order_relaxed) == request().id.id;
    ranks |= rank == view().rank || entered ? 0 : hostBit(rank);
  }
  return ranks;
}

HostTransfer::AdvanceResult HostTransfer::match(uint64_t& blocked) {
  for (; matched_ < view().size; ++matched_) {
    const HostSlot& slot = view().slot(matched_, ticket_);
    if (slot.ticket.load(std::memory_order_seq_cst) != ticket_) {
      blocked |= hostBit(matched_);
      return AdvanceResult::Blocked;
    }
    if (slot.op_id.load(std::memory_order_relaxed) != request().id.id) {
      astray_ = true;
      blocked |= hostBit(matched_);
      return AdvanceResult::Blocked;
    }
    const Descriptor theirs = Descriptor::readFrom(slot.header);
    if (theirs != request().descriptor) {
      throw Error(
          disagreement(memory_->identity(), request().descriptor, memory_->inGroup(matched_), theirs, request().id));
    }
  }
  for (int rank = 0; rank < view().size; ++rank) { // one that was compared early may have withdrawn since
    if (view().slot(rank, ticket_).ticket.load(std::memory_order_seq_cst) != ticket_) {
      matched_ = rank;
      blocked |= hostBit(rank);
      return AdvanceResult::Blocked;
    }
  }
  return AdvanceResult::Moved;
}

HostTransfer::AdvanceResult HostTransfer::matched(uint64_t& rounds) {
  if (!large()) {
    finishSmall();
    return AdvanceResult::Done;
  }
  const bool in_place = reachOperands();
  phase_ = in_place ? Phase::InPlace : Phase::InRounds;
  base_ = rounds;
  rounds += in_place ? 1 : rounds_;
  operation_->mark().arriving(Clock::now());
  return AdvanceResult::Moved;
}

HostTransfer::AdvanceResult HostTransfer::advance(uint64_t& rounds, bool ending, uint64_t& blocked) {
  switch (phase_) {
    case Phase::InRounds:
      return advanceRounds(blocked);
    case Phase::InPlace:
    case Phase::InPlaceMade:
      return advanceInPlace(ending, blocked);
    case Phase::Matching:
      break;
  }
  const AdvanceResult matching = match(blocked);
  return matching == AdvanceResult::Moved ? matched(rounds) : matching;
}

// ---- small operations

void HostTransfer::givePayload() const {
  if (kind_ == Collective::Broadcast && !isRoot()) {
    return;
  }
  std::byte* payload = view().payload(view().rank, ticket_);
  if (kind_ == Collective::ReduceScatter) {
    for (int part = 0; part < view().size; ++part) {
      give(payload + nbytesOf(part * numel_), inputPart(part), numel_);
    }
  } else {
    give(payload, request().input.ptr, numel_);
  }
}

void HostTransfer::foldPayloads(size_t offset) const {
  PYCOMM_FAULT_POINT("reduce.step");
  Sources sources;
  for (int rank = 0; rank < view().size; ++rank) {
    sources[static_cast<size_t>(rank)] = view().payload(rank, ticket_) + offset;
  }
  fold(request().output.ptr, sources, numel_);
}

void HostTransfer::finishSmall() const {
  const size_t nbytes = nbytesOf(numel_);
  if (numel_ == 0) {
    return;
  }
  switch (kind_) {
    case Collective::AllReduce:
      foldPayloads(0);
      break;
    case Collective::ReduceScatter:
      foldPayloads(static_cast<size_t>(view().rank) * nbytes);
      break;
    case Collective::AllGather:
      for (int rank = 0; rank < view().size; ++rank) {
        copyBytes(outputPart(rank), view().payload(rank, ticket_), nbytes);
      }
      break;
    case Collective::Broadcast:
      if (!isRoot()) {
        copyBytes(request().output.ptr, view().payload(root_, ticket_), nbytes);
      }
      break;
    case Collective::Barrier:
    case Collective::Reduce:
    case Collective::AllToAll:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::Send:
    case Collective::Recv:
      break;
  }
}

// ---- in rounds

HostTransfer::AdvanceResult HostTransfer::advanceRounds(uint64_t& blocked) {
  // First what others wait for.
  if (mayReduce(blocked)) {
    reduce();
  } else if (mayCollect(blocked)) {
    collect();
    if (collected_ == rounds_) {
      return AdvanceResult::Done;
    }
  } else if (mayStage(blocked)) {
    stage();
  } else {
    return AdvanceResult::Blocked;
  }
  return AdvanceResult::Moved;
}

int64_t HostTransfer::firstOf(uint64_t round) const noexcept {
  return static_cast<int64_t>(round) * round_numel_;
}

int64_t HostTransfer::countOf(uint64_t round) const noexcept {
  return std::min(round_numel_, numel_ - firstOf(round));
}

bool HostTransfer::mayStage(uint64_t& blocked) const noexcept {
  if (staged_ == rounds_) {
    return false;
  }
  const PieceFlow* const pieces = request().extras().pieces.get();
  if (pieces != nullptr && pieces->arrived() < pieces->neededInRound(staged_)) {
    return false; // the thread that releases it wakes this one
  }
  if (staged_ - collected_ == kHostStages) {
    return false; // this rank reads its own stage as well
  }
  const uint64_t round = base_ + staged_; // its stage was last read for round - kHostStages
  return round < kHostStages || view().allHave(&HostProgress::collected, round - kHostStages + 1, blocked);
}

bool HostTransfer::mayReduce(uint64_t& blocked) const noexcept {
  if (reduced_ == staged_) {
    return false;
  }
  const bool sums = kind_ == Collective::AllReduce || kind_ == Collective::ReduceScatter;
  return !sums || view().allHave(&HostProgress::staged, base_ + reduced_ + 1, blocked);
}

bool HostTransfer::mayCollect(uint64_t& blocked) const noexcept {
  if (collected_ == reduced_) {
    return false;
  }
  const uint64_t count = base_ + collected_ + 1;
  if (kind_ == Collective::AllReduce) {
    return view().allHave(&HostProgress::reduced, count, blocked);
  }
  if (kind_ == Collective::AllGather) {
    return view().allHave(&HostProgress::staged, count, blocked);
  }
  if (kind_ == Collective::Broadcast && !isRoot() &&
      view().progress(root_).staged.load(std::memory_order_seq_cst) < count) {
    blocked |= hostBit(root_);
    return false;
  }
  return true;
}

void HostTransfer::stage() {
  PYCOMM_FAULT_POINT("host.stage");
  const int rank = view().rank;
  const int64_t count = countOf(staged_);
  const size_t at = nbytesOf(firstOf(staged_));
  std::byte* stage = view().stage(rank, base_ + staged_);
  if (kind_ == Collective::AllReduce) {
    const Run own = splitBalanced({0, count}, view().size, rank);
    const int64_t after = own.offset + own.numel;
    const auto part = [&](int64_t offset, int64_t numel) {
      const size_t skip = nbytesOf(offset);
      give(stage + skip, request().input.ptr + at + skip, numel);
    };
    if (scales_) {
      part(0, count);
    } else {
      part(0, own.offset);
      part(after, count - after);
    }
  } else if (kind_ == Collective::ReduceScatter) {
    for (int part = 0; part < view().size; ++part) {
      if (part != rank || scales_) {
        give(stage + nbytesOf(part * round_numel_), inputPart(part) + at, count);
      }
    }
  } else if (kind_ == Collective::AllGather || isRoot()) {
    copyBytes(stage, request().input.ptr + at, nbytesOf(count));
  }
  ++staged_;
  memory_->own().staged.store(base_ + staged_, std::memory_order_seq_cst); // after the stage
}

// `own`: where this rank's operand lies, if not in its stage. `offset`: of the operands in the stages.
void HostTransfer::foldStages(std::byte* to, const std::byte* own, size_t offset, int64_t elements) const {
  PYCOMM_FAULT_POINT("reduce.step");
  Sources sources;
  for (int rank = 0; rank < view().size; ++rank) {
    sources[static_cast<size_t>(rank)] = view().stage(rank, base_ + reduced_) + offset;
  }
  if (own != nullptr) {
    sources[static_cast<size_t>(view().rank)] = own;
  }
  fold(to, sources, elements);
}

void HostTransfer::reduce() {
  const int rank = view().rank;
  const int64_t count = countOf(reduced_);
  const size_t at = nbytesOf(firstOf(reduced_));
  if (kind_ == Collective::AllReduce) {
    const Run own = splitBalanced({0, count}, view().size, rank);
    const size_t skip = nbytesOf(own.offset);
    std::byte* output = request().output.ptr + at + skip;
    if (own.numel > 0) {
      foldStages(output, scales_ ? nullptr : request().input.ptr + at + skip, skip, own.numel);
      copyBytes(view().stage(rank, base_ + reduced_) + skip, output, nbytesOf(own.numel));
    }
  } else if (kind_ == Collective::ReduceScatter) {
    foldStages(
        request().output.ptr + at, scales_ ? nullptr : inputPart(rank) + at, nbytesOf(rank * round_numel_), count);
  }
  ++reduced_;
  memory_->own().reduced.store(base_ + reduced_, std::memory_order_seq_cst); // after the slice in the stage
}

void HostTransfer::collect() {
  PYCOMM_FAULT_POINT("host.collect");
  const int size = view().size;
  const int64_t count = countOf(collected_);
  const size_t at = nbytesOf(firstOf(collected_));
  const uint64_t round = base_ + collected_;
  const size_t nbytes = nbytesOf(count);
  // Each rank begins at another's stage, so that not all read the same memory at once.
  if (kind_ == Collective::AllReduce) {
    for (int next = 1; next < size; ++next) {
      const int owner = (view().rank + next) % size;
      const Run slice = splitBalanced({0, count}, size, owner);
      const size_t skip = nbytesOf(slice.offset);
      copyBytes(request().output.ptr + at + skip, view().stage(owner, round) + skip, nbytesOf(slice.numel));
    }
  } else if (kind_ == Collective::AllGather) {
    copyBytes(outputPart(view().rank) + at, request().input.ptr + at, nbytes);
    for (int next = 1; next < size; ++next) {
      const int owner = (view().rank + next) % size;
      copyBytes(outputPart(owner) + at, view().stage(owner, round), nbytes);
    }
  } else if (kind_ == Collective::Broadcast && !isRoot()) {
    copyBytes(request().output.ptr + at, view().stage(root_, round), nbytes);
  }
  if (PieceFlow* const pieces = request().extras().pieces.get()) {
    pieces->roundEnded(collected_);
  }
  ++collected_;
  Operation::Shared& shared = operation_->shared();
  shared.bytes_done.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed);
  operation_->mark().received(shared.bytes_done.load(std::memory_order_relaxed));
  // After the last read of the others' stages: they are written again once all have stored this.
  memory_->own().collected.store(base_ + collected_, std::memory_order_seq_cst);
}

// ---- in place

// Into this rank's slot, before it enters.
void HostTransfer::publishPlaces(HostSlot& slot) const {
  const SharedHeap* const heap = memory_->heap();
  const Operation::Request::Extras& extras = request().extras();
  if (heap == nullptr || !extras.input_parts.empty() || extras.pieces != nullptr) { // whose bytes come later
    return;
  }
  const bool sends = kind_ != Collective::Broadcast || isRoot();
  const auto input = sends ? heap->placeOf(request().input.ptr, nbytesOf(inputNumel())) : std::nullopt;
  slot.input_place = input ? *input + 1 : 0;
  const auto output =
      kind_ == Collective::AllReduce ? heap->placeOf(request().output.ptr, nbytesOf(numel_)) : std::nullopt;
  slot.output_place = output ? *output + 1 : 0;
}

// After the ranks' descriptors were compared: whether each rank reaches all the operands that it needs. All ranks find the same.
bool HostTransfer::reachOperands() {
  if (scales_) { // others' operands are not to be altered, and have no place to be scaled in
    return false;
  }
  operands_.resize(static_cast<size_t>(view().size));
  for (int rank = 0; rank < view().size; ++rank) {
    if (kind_ == Collective::Broadcast && rank != root_) {
      continue;
    }
    const HostSlot& slot = view().slot(rank, ticket_);
    Operands& operands = operands_[static_cast<size_t>(rank)];
    operands.input = inHeap(rank, slot.input_place, nbytesOf(inputNumel()));
    operands.output = inHeap(rank, slot.output_place, nbytesOf(numel_));
    if (operands.input == nullptr || (kind_ == Collective::AllReduce && operands.output == nullptr)) {
      return false;
    }
  }
  return true;
}

// Where `nbytes` lie here at a place that a rank has written into its slot; null if it has written none.
// Throws Error(ProtocolViolation) if they do not lie in its heap.
std::byte* HostTransfer::inHeap(int of, uint64_t place, size_t nbytes) const {
  if (memory_->heap() == nullptr || place == 0) {
    return nullptr;
  }
  const BufferView heap = memory_->heapOf(of);
  if (nbytes > heap.nbytes || place - 1 > heap.nbytes - nbytes) {
    ErrorRecord record;
    record.code = ErrorCode::ProtocolViolation;
    record.peer = memory_->identity().job.of(memory_->inGroup(of));
    record.summary = "Rank " + std::to_string(record.peer) + " says that an operand of " + std::to_string(nbytes) +
        " bytes lies at " + std::to_string(place - 1) + " of its heap, which has " + std::to_string(heap.nbytes) +
        " bytes.";
    record.hint = "look for native code that writes out of bounds in that process, or set PYCOMM_TRANSPORT=tcp";
    throw Error(record);
  }
  return heap.ptr + (place - 1);
}

int64_t HostTransfer::stepNumel() const noexcept {
  return std::max<int64_t>(kStepNbytes / static_cast<int64_t>(element_nbytes_), 1);
}

// The elements that this rank makes, or reads.
Run HostTransfer::workInPlace() const noexcept {
  if (kind_ == Collective::AllReduce) {
    return splitBalanced({0, numel_}, view().size, view().rank);
  }
  if (kind_ == Collective::AllGather) {
    return {0, numel_ * view().size};
  }
  return {0, isRoot() ? 0 : numel_};
}

void HostTransfer::allReduceInPlace(int64_t first, int64_t elements) const {
  const int size = view().size;
  Sources sources;
  const int64_t block = std::max<int64_t>(kBlockNbytes / size / static_cast<int64_t>(element_nbytes_), 64);
  for (int64_t done = 0; done < elements; done += block) {
    const int64_t count = std::min(block, elements - done);
    const size_t at = nbytesOf(first + done);
    for (int rank = 0; rank < size; ++rank) {
      sources[static_cast<size_t>(rank)] = operands_[static_cast<size_t>(rank)].input + at;
    }
    std::byte* own = request().output.ptr + at;
    fold(own, sources, count);
    for (int next = 1; next < size; ++next) {
      std::memcpy(operands_[static_cast<size_t>((view().rank + next) % size)].output + at, own, nbytesOf(count));
    }
  }
}

// `first` and `elements` count those of all parts that this rank reads, its own part first.
void HostTransfer::readInPlace(int64_t first, int64_t elements) const {
  const int size = view().size;
  const int rank = view().rank;
  if (kind_ == Collective::ReduceScatter) {
    Sources sources;
    const size_t at = nbytesOf(first);
    for (int from = 0; from < size; ++from) {
      sources[static_cast<size_t>(from)] = operands_[static_cast<size_t>(from)].input + nbytesOf(rank * numel_) + at;
    }
    fold(request().output.ptr + at, sources, elements);
    return;
  }
  while (elements > 0) {
    const int64_t within = first % numel_;
    const int64_t count = std::min(elements, numel_ - within);
    const bool one = kind_ == Collective::Broadcast;
    const int owner = one ? root_ : static_cast<int>((rank + first / numel_) % size);
    const size_t at = nbytesOf(within);
    copyBytes(
        (one ? request().output.ptr : outputPart(owner)) + at,
        operands_[static_cast<size_t>(owner)].input + at,
        nbytesOf(count));
    first += count;
    elements -= count;
  }
}

// A rank that gave up before it had ended this operation has its operands for itself again. A rank that was stopped in the meantime may
// have read other values there. It must not take them for a result, and it learns the cause before long. A rank that gives up sets `left`
// before it lets go of its operands. So if `left` is not set by now, this rank has read nothing but operands.
bool HostTransfer::operandsLasted(uint64_t& blocked) const noexcept {
  for (int rank = 0; rank < view().size; ++rank) {
    const HostProgress& progress = view().progress(rank);
    if (rank != view().rank && progress.left.load(std::memory_order_seq_cst) != 0 &&
        progress.done.load(std::memory_order_seq_cst) < ticket_) {
      blocked |= hostBit(rank);
      return false;
    }
  }
  return true;
}

// A rank runs its operations in the order of their tickets, so `done` says which one it is in.
BufferView HostTransfer::writtenBy(int peer) const noexcept {
  const HostProgress& progress = view().progress(peer);
  const uint64_t writes = progress.writes.load(std::memory_order_seq_cst);
  if (writes == 0 || writes > static_cast<uint64_t>(numel_) ||
      progress.done.load(std::memory_order_seq_cst) + 1 != ticket_ ||
      view().slot(view().rank, ticket_).output_place == 0) {
    return {};
  }
  const auto first = static_cast<int64_t>(writes - 1);
  return {request().output.ptr + nbytesOf(first), nbytesOf(std::min(stepNumel(), numel_ - first))};
}

HostTransfer::AdvanceResult HostTransfer::advanceInPlace(bool ending, uint64_t& blocked) {
  HostProgress& own = memory_->own();
  const Run work = workInPlace();
  if (position_ < work.numel) {
    if (ending) {
      return AdvanceResult::Blocked;
    }
    PYCOMM_FAULT_POINT("reduce.step");
    // First says what it will write, then looks whether a rank has given up. That rank first sets `left`, then looks who writes. So one of
    // the two sees the other: either nothing is written here, or that rank knows what is.
    if (kind_ == Collective::AllReduce) {
      own.writes.store(1 + static_cast<uint64_t>(work.offset + position_), std::memory_order_seq_cst);
    }
    if (!operandsLasted(blocked)) {
      own.writes.store(0, std::memory_order_seq_cst);
      return AdvanceResult::Blocked;
    }
    static_cast<void>(PYCOMM_FAULT("host.write"));
    const int64_t count = std::min(stepNumel(), work.numel - position_);
    if (kind_ == Collective::AllReduce) {
      allReduceInPlace(work.offset + position_, count);
      own.writes.store(0, std::memory_order_seq_cst);
    } else {
      readInPlace(position_, count);
    }
    position_ += count;
    operation_->shared().bytes_done.fetch_add(count * static_cast<int64_t>(element_nbytes_), std::memory_order_relaxed);
    return AdvanceResult::Moved;
  }
  if (phase_ == Phase::InPlace) {
    phase_ = Phase::InPlaceMade;
    own.reduced.store(base_ + 1, std::memory_order_seq_cst); // after the last byte that this rank reads or writes
    return AdvanceResult::Moved;
  }
  // Its operands are its own again once nobody reads or writes them.
  if (!view().allHave(&HostProgress::reduced, base_ + 1, blocked)) {
    return AdvanceResult::Blocked;
  }
  if (!operandsLasted(blocked)) {
    return AdvanceResult::Blocked;
  }
  own.collected.store(base_ + 1, std::memory_order_seq_cst);
  return AdvanceResult::Done;
}

} // namespace pycomm
