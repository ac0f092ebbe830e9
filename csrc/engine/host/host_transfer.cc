#include "engine/host/host_transfer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/fault_point.h"
#include "numeric/reduce.h"
#include "schedule/partition.h"

namespace pycomm {
namespace {

constexpr uint64_t bit(int rank) noexcept {
  return uint64_t{1} << rank;
}

void copyBytes(std::byte* to, const std::byte* from, size_t nbytes) {
  if (nbytes > 0 && to != from) {
    std::memcpy(to, from, nbytes);
  }
}

/// The elements of a full round: of the tensor, or of one part.
int64_t roundNumel(const Descriptor& descriptor, int size) {
  const size_t parts = descriptor.kind == Collective::ReduceScatter ? static_cast<size_t>(size) : 1;
  return static_cast<int64_t>(kHostStageNbytes / parts / elementSize(descriptor.dtype));
}

} // namespace

HostTransfer::HostTransfer(
    const HostView& view,
    const SharedHeap* heap,
    std::shared_ptr<Operation> operation,
    uint64_t ticket)
    : view_(view), heap_(heap), operation_(std::move(operation)), ticket_(ticket) {
  const Descriptor& descriptor = operation_->request().descriptor;
  kind_ = descriptor.kind;
  element_nbytes_ = elementSize(descriptor.dtype);
  numel_ = kind_ == Collective::Barrier ? 0 : descriptor.numel;
  scales_ = descriptor.reduce_op == ReduceOp::PremulSum;
  const bool many = kind_ == Collective::ReduceScatter; // gives a part to every rank
  const int64_t gives = numel_ * (many ? view_.size : 1);
  if (static_cast<size_t>(gives) * element_nbytes_ > kHostInlineNbytes) {
    round_numel_ = roundNumel(descriptor, view_.size);
    rounds_ = static_cast<uint64_t>((numel_ + round_numel_ - 1) / round_numel_);
  }
}

std::shared_ptr<PieceFlow> HostTransfer::piecesOf(const Descriptor& descriptor, int size) {
  const size_t element_nbytes = elementSize(descriptor.dtype);
  const size_t part_nbytes = static_cast<size_t>(descriptor.numel) * element_nbytes;
  if (descriptor.kind == Collective::Barrier || part_nbytes <= kHostInlineNbytes) {
    return nullptr;
  }
  PieceFlow::Rounds rounds;
  rounds.part_nbytes = part_nbytes;
  rounds.round_nbytes = static_cast<size_t>(roundNumel(descriptor, size)) * element_nbytes;
  rounds.input_parts = descriptor.kind == Collective::ReduceScatter ? static_cast<size_t>(size) : 1;
  rounds.output_parts = descriptor.kind == Collective::AllGather ? static_cast<size_t>(size) : 1;
  return PieceFlow::ofRounds(rounds);
}

bool HostTransfer::mayEnter(uint64_t& blocked) const noexcept {
  if (operation_->shared().held.load(std::memory_order_seq_cst)) {
    return false; // the thread that releases it wakes this one
  }
  if (ticket_ <= kHostSlots) {
    return true;
  }
  const uint64_t before = ticket_ - kHostSlots;
  return view_.progress(view_.rank).done.load(std::memory_order_relaxed) >= before &&
      allHave(&HostProgress::done, before, blocked);
}

void HostTransfer::enter() {
  PYCOMM_FAULT_POINT("host.enter");
  const Operation::Request& request = operation_->request();
  HostSlot& slot = view_.slot(view_.rank, ticket_);
  slot.header = FrameHeader();
  slot.header.op_id = request.id.id;
  request.descriptor.writeTo(slot.header);
  if (rounds_ == 0 && (kind_ != Collective::Broadcast || request.descriptor.root == view_.rank)) {
    std::byte* payload = view_.payload(view_.rank, ticket_);
    if (kind_ == Collective::ReduceScatter) {
      for (int part = 0; part < view_.size; ++part) {
        give(payload + static_cast<size_t>(part * numel_) * element_nbytes_, inputPart(part), numel_);
      }
    } else {
      give(payload, request.input.ptr, numel_);
    }
  }
  publish(slot);
  slot.ticket.store(ticket_, std::memory_order_seq_cst); // after all that belongs to it
}

void HostTransfer::withdraw() const noexcept {
  view_.slot(view_.rank, ticket_).ticket.store(ticket_ | kHostWithdrawn, std::memory_order_seq_cst);
}

HostTransfer::Progress HostTransfer::match(uint64_t& blocked) {
  for (; matched_ < view_.size; ++matched_) {
    const HostSlot& slot = view_.slot(matched_, ticket_);
    if (slot.ticket.load(std::memory_order_seq_cst) != ticket_) {
      blocked |= bit(matched_);
      return Progress::Blocked;
    }
    if (slot.header.op_id != operation_->request().id.id) {
      astray_ = true;
      blocked |= bit(matched_);
      return Progress::Blocked;
    }
    if (Descriptor::readFrom(slot.header) != operation_->request().descriptor) {
      return Progress::Differs;
    }
  }
  for (int rank = 0; rank < view_.size; ++rank) { // one that was compared early may have withdrawn since
    if (view_.slot(rank, ticket_).ticket.load(std::memory_order_seq_cst) != ticket_) {
      matched_ = rank;
      blocked |= bit(rank);
      return Progress::Blocked;
    }
  }
  return Progress::Moved;
}

bool HostTransfer::allHave(std::atomic<uint64_t> HostProgress::* counter, uint64_t count, uint64_t& blocked)
    const noexcept {
  for (int rank = 0; rank < view_.size; ++rank) {
    if (rank != view_.rank && (view_.progress(rank).*counter).load(std::memory_order_seq_cst) < count) {
      blocked |= bit(rank);
      return false;
    }
  }
  return true;
}

const std::byte* HostTransfer::inputPart(int of) const noexcept {
  const Operation::Request& request = operation_->request();
  return request.extras().input_parts.empty() ? request.input.ptr + static_cast<size_t>(of * numel_) * element_nbytes_
                                              : request.extras().input_parts[static_cast<size_t>(of)].ptr;
}

std::byte* HostTransfer::outputPart(int of) const noexcept {
  const Operation::Request& request = operation_->request();
  return request.extras().output_parts.empty() ? request.output.ptr + static_cast<size_t>(of * numel_) * element_nbytes_
                                               : request.extras().output_parts[static_cast<size_t>(of)].ptr;
}

void HostTransfer::give(std::byte* to, const std::byte* from, int64_t numel) const {
  const Operation::Request& request = operation_->request();
  if (scales_) {
    scale(request.descriptor.dtype, to, from, static_cast<size_t>(numel), request.extras().premul_factor);
  } else {
    copyBytes(to, from, static_cast<size_t>(numel) * element_nbytes_);
  }
}

// `own`: where this rank's operand lies, if not in its stage.
void HostTransfer::fold(std::byte* to, const std::byte* own, size_t offset_in_stage, int64_t numel) const {
  PYCOMM_FAULT_POINT("reduce.step");
  std::array<const void*, kMaxHostRanks> sources;
  for (int rank = 0; rank < view_.size; ++rank) {
    const std::byte* from = rounds_ == 0 ? view_.payload(rank, ticket_) : view_.stage(rank, base_ + reduced_);
    sources[static_cast<size_t>(rank)] = from + offset_in_stage;
  }
  if (own != nullptr) {
    sources[static_cast<size_t>(view_.rank)] = own;
  }
  const Descriptor& descriptor = operation_->request().descriptor;
  reduceMany(
      descriptor.dtype,
      descriptor.reduce_op,
      to,
      sources.data(),
      static_cast<size_t>(view_.size),
      static_cast<size_t>(numel),
      descriptor.reduce_op == ReduceOp::Avg ? view_.size : 1);
}

void HostTransfer::finishSmall() const {
  const Operation::Request& request = operation_->request();
  const size_t nbytes = static_cast<size_t>(numel_) * element_nbytes_;
  if (numel_ == 0) {
    return;
  }
  switch (kind_) {
    case Collective::AllReduce:
      fold(request.output.ptr, nullptr, 0, numel_);
      break;
    case Collective::ReduceScatter:
      fold(request.output.ptr, nullptr, static_cast<size_t>(view_.rank) * nbytes, numel_);
      break;
    case Collective::AllGather:
      for (int rank = 0; rank < view_.size; ++rank) {
        copyBytes(outputPart(rank), view_.payload(rank, ticket_), nbytes);
      }
      break;
    case Collective::Broadcast:
      if (request.descriptor.root != view_.rank) {
        copyBytes(request.output.ptr, view_.payload(request.descriptor.root, ticket_), nbytes);
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

HostTransfer::Progress HostTransfer::advance(uint64_t& rounds, uint64_t& blocked) {
  if (matched_ < view_.size) {
    const Progress matching = match(blocked);
    if (matching != Progress::Moved) {
      return matching;
    }
    base_ = rounds;
    if (rounds_ == 0) {
      finishSmall();
      return Progress::Done;
    }
    in_place_ = reachOperands();
    rounds += in_place_ ? 1 : rounds_;
    operation_->mark().arriving(Clock::now());
    return Progress::Moved;
  }
  if (in_place_) {
    return advanceInPlace(blocked);
  }
  // First what others wait for.
  if (mayReduce(blocked)) {
    reduce();
  } else if (mayCollect(blocked)) {
    collect();
    if (collected_ == rounds_) {
      return Progress::Done;
    }
  } else if (mayStage(blocked)) {
    stage();
  } else {
    return Progress::Blocked;
  }
  return Progress::Moved;
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
  const PieceFlow* const pieces = operation_->request().extras().pieces.get();
  if (pieces != nullptr && pieces->arrived() < pieces->neededInRound(staged_)) {
    return false; // the thread that releases it wakes this one
  }
  const uint64_t round = base_ + staged_; // its stage was last read for round - kHostStages
  return round < kHostStages || allHave(&HostProgress::collected, round - kHostStages + 1, blocked);
}

bool HostTransfer::mayReduce(uint64_t& blocked) const noexcept {
  if (reduced_ == staged_) {
    return false;
  }
  const bool sums = kind_ == Collective::AllReduce || kind_ == Collective::ReduceScatter;
  return !sums || allHave(&HostProgress::staged, base_ + reduced_ + 1, blocked);
}

bool HostTransfer::mayCollect(uint64_t& blocked) const noexcept {
  if (collected_ == reduced_) {
    return false;
  }
  const uint64_t count = base_ + collected_ + 1;
  if (kind_ == Collective::AllReduce) {
    return allHave(&HostProgress::reduced, count, blocked);
  }
  if (kind_ == Collective::AllGather) {
    return allHave(&HostProgress::staged, count, blocked);
  }
  const int root = operation_->request().descriptor.root;
  if (kind_ == Collective::Broadcast && root != view_.rank &&
      view_.progress(root).staged.load(std::memory_order_seq_cst) < count) {
    blocked |= bit(root);
    return false;
  }
  return true;
}

void HostTransfer::stage() {
  PYCOMM_FAULT_POINT("host.stage");
  const Operation::Request& request = operation_->request();
  const int64_t first = firstOf(staged_);
  const int64_t count = countOf(staged_);
  const size_t at = static_cast<size_t>(first) * element_nbytes_;
  std::byte* stage = view_.stage(view_.rank, base_ + staged_);
  if (kind_ == Collective::AllReduce) {
    const Run own = splitBalanced({0, count}, view_.size, view_.rank);
    const int64_t after = own.offset + own.numel;
    const auto part = [&](int64_t offset, int64_t numel) {
      const size_t skip = static_cast<size_t>(offset) * element_nbytes_;
      give(stage + skip, request.input.ptr + at + skip, numel);
    };
    if (scales_) {
      part(0, count);
    } else {
      part(0, own.offset);
      part(after, count - after);
    }
  } else if (kind_ == Collective::ReduceScatter) {
    for (int part = 0; part < view_.size; ++part) {
      if (part != view_.rank || scales_) {
        give(stage + static_cast<size_t>(part * round_numel_) * element_nbytes_, inputPart(part) + at, count);
      }
    }
  } else if (kind_ == Collective::AllGather || request.descriptor.root == view_.rank) {
    copyBytes(stage, request.input.ptr + at, static_cast<size_t>(count) * element_nbytes_);
  }
  ++staged_;
  view_.progress(view_.rank).staged.store(base_ + staged_, std::memory_order_seq_cst); // after the stage
}

void HostTransfer::reduce() {
  const Operation::Request& request = operation_->request();
  const int64_t count = countOf(reduced_);
  const size_t at = static_cast<size_t>(firstOf(reduced_)) * element_nbytes_;
  if (kind_ == Collective::AllReduce) {
    const Run own = splitBalanced({0, count}, view_.size, view_.rank);
    const size_t skip = static_cast<size_t>(own.offset) * element_nbytes_;
    std::byte* output = request.output.ptr + at + skip;
    if (own.numel > 0) {
      fold(output, scales_ ? nullptr : request.input.ptr + at + skip, skip, own.numel);
      copyBytes(
          view_.stage(view_.rank, base_ + reduced_) + skip, output, static_cast<size_t>(own.numel) * element_nbytes_);
    }
  } else if (kind_ == Collective::ReduceScatter) {
    fold(
        request.output.ptr + at,
        scales_ ? nullptr : inputPart(view_.rank) + at,
        static_cast<size_t>(view_.rank * round_numel_) * element_nbytes_,
        count);
  }
  ++reduced_;
  view_.progress(view_.rank).reduced.store(base_ + reduced_, std::memory_order_seq_cst); // after the slice in the stage
}

void HostTransfer::collect() {
  PYCOMM_FAULT_POINT("host.collect");
  const Operation::Request& request = operation_->request();
  const int64_t count = countOf(collected_);
  const size_t at = static_cast<size_t>(firstOf(collected_)) * element_nbytes_;
  const uint64_t round = base_ + collected_;
  const size_t nbytes = static_cast<size_t>(count) * element_nbytes_;
  if (kind_ == Collective::AllReduce) {
    for (int next = 1; next < view_.size;
         ++next) { // each begins at another's, so that not all read the same memory at once
      const int owner = (view_.rank + next) % view_.size;
      const Run slice = splitBalanced({0, count}, view_.size, owner);
      const size_t skip = static_cast<size_t>(slice.offset) * element_nbytes_;
      copyBytes(
          request.output.ptr + at + skip,
          view_.stage(owner, round) + skip,
          static_cast<size_t>(slice.numel) * element_nbytes_);
    }
  } else if (kind_ == Collective::AllGather) {
    copyBytes(outputPart(view_.rank) + at, request.input.ptr + at, nbytes);
    for (int next = 1; next < view_.size; ++next) {
      const int owner = (view_.rank + next) % view_.size;
      copyBytes(outputPart(owner) + at, view_.stage(owner, round), nbytes);
    }
  } else if (kind_ == Collective::Broadcast && request.descriptor.root != view_.rank) {
    copyBytes(request.output.ptr + at, view_.stage(request.descriptor.root, round), nbytes);
  }
  if (PieceFlow* const pieces = operation_->request().extras().pieces.get()) {
    pieces->roundEnded(collected_);
  }
  ++collected_;
  operation_->shared().bytes_done.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed);
  operation_->mark().received(operation_->shared().bytes_done.load(std::memory_order_relaxed));
  // After the last read of the others' stages: they are written again once all have stored this.
  view_.progress(view_.rank).collected.store(base_ + collected_, std::memory_order_seq_cst);
}

} // namespace pycomm
