#include "engine/host/host_rounds.h"

#include <algorithm>

#include "base/fault_point.h"
#include "schedule/partition.h"

namespace pycomm {
namespace {

/// The elements of a full round: of the tensor, or of one part.
int64_t roundNumel(const Descriptor& descriptor, int size) {
  const size_t parts = descriptor.kind == Collective::ReduceScatter ? static_cast<size_t>(size) : 1;
  return static_cast<int64_t>(kHostStageNbytes / parts / elementSize(descriptor.dtype));
}

} // namespace

HostRounds::HostRounds(const HostOperation& op) {
  const bool many = op.kind == Collective::ReduceScatter; // gives a part to every rank
  const int64_t gives = op.numel * (many ? op.view.size : 1);
  if (op.nbytesOf(gives) > kHostInlineNbytes) {
    round_numel_ = roundNumel(op.request().descriptor, op.view.size);
    count_ = static_cast<uint64_t>((op.numel + round_numel_ - 1) / round_numel_);
  }
}

std::shared_ptr<PieceFlow> HostRounds::piecesOf(const Descriptor& descriptor, int size) {
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

HostRounds::AdvanceResult HostRounds::advance(const HostOperation& op, uint64_t& blocked) {
  // First what others wait for.
  if (mayReduce(op, blocked)) {
    reduce(op);
  } else if (mayCollect(op, blocked)) {
    collect(op);
    if (collected_ == count_) {
      return AdvanceResult::Done;
    }
  } else if (mayStage(op, blocked)) {
    stage(op);
  } else {
    return AdvanceResult::Blocked;
  }
  return AdvanceResult::Moved;
}

int64_t HostRounds::firstOf(uint64_t round) const noexcept {
  return static_cast<int64_t>(round) * round_numel_;
}

int64_t HostRounds::countOf(const HostOperation& op, uint64_t round) const noexcept {
  return std::min(round_numel_, op.numel - firstOf(round));
}

bool HostRounds::mayStage(const HostOperation& op, uint64_t& blocked) const noexcept {
  if (staged_ == count_) {
    return false;
  }
  const PieceFlow* const pieces = op.request().extras().pieces.get();
  if (pieces != nullptr && pieces->arrived() < pieces->neededInRound(staged_)) {
    return false; // the thread that releases it wakes this one
  }
  if (staged_ - collected_ == kHostStages) {
    return false; // this rank reads its own stage as well
  }
  const uint64_t round = base_ + staged_; // its stage was last read for round - kHostStages
  return round < kHostStages || op.view.allHave(&HostProgress::collected, round - kHostStages + 1, blocked);
}

bool HostRounds::mayReduce(const HostOperation& op, uint64_t& blocked) const noexcept {
  if (reduced_ == staged_) {
    return false;
  }
  const bool sums = op.kind == Collective::AllReduce || op.kind == Collective::ReduceScatter;
  return !sums || op.view.allHave(&HostProgress::staged, base_ + reduced_ + 1, blocked);
}

bool HostRounds::mayCollect(const HostOperation& op, uint64_t& blocked) const noexcept {
  if (collected_ == reduced_) {
    return false;
  }
  const uint64_t count = base_ + collected_ + 1;
  if (op.kind == Collective::AllReduce) {
    return op.view.allHave(&HostProgress::reduced, count, blocked);
  }
  if (op.kind == Collective::AllGather) {
    return op.view.allHave(&HostProgress::staged, count, blocked);
  }
  const int root = op.request().descriptor.root;
  if (op.kind == Collective::Broadcast && !op.isRoot() &&
      op.view.progress(root).staged.load(std::memory_order_seq_cst) < count) {
    blocked |= hostBit(root);
    return false;
  }
  return true;
}

void HostRounds::stage(const HostOperation& op) {
  PYCOMM_FAULT_POINT("host.stage");
  const Operation::Request& request = op.request();
  const int rank = op.view.rank;
  const int64_t count = countOf(op, staged_);
  const size_t at = op.nbytesOf(firstOf(staged_));
  std::byte* stage = op.view.stage(rank, base_ + staged_);
  if (op.kind == Collective::AllReduce) {
    const Run own = splitBalanced({0, count}, op.view.size, rank);
    const int64_t after = own.offset + own.numel;
    const auto part = [&](int64_t offset, int64_t numel) {
      const size_t skip = op.nbytesOf(offset);
      op.give(stage + skip, request.input.ptr + at + skip, numel);
    };
    if (op.scales) {
      part(0, count);
    } else {
      part(0, own.offset);
      part(after, count - after);
    }
  } else if (op.kind == Collective::ReduceScatter) {
    for (int part = 0; part < op.view.size; ++part) {
      if (part != rank || op.scales) {
        op.give(stage + op.nbytesOf(part * round_numel_), op.inputPart(part) + at, count);
      }
    }
  } else if (op.kind == Collective::AllGather || op.isRoot()) {
    HostOperation::copy(stage, request.input.ptr + at, op.nbytesOf(count));
  }
  ++staged_;
  op.view.progress(rank).staged.store(base_ + staged_, std::memory_order_seq_cst); // after the stage
}

// `own`: where this rank's operand lies, if not in its stage. `offset`: of the operands in the stages.
void HostRounds::fold(const HostOperation& op, std::byte* to, const std::byte* own, size_t offset, int64_t numel)
    const {
  PYCOMM_FAULT_POINT("reduce.step");
  HostOperation::Sources sources;
  for (int rank = 0; rank < op.view.size; ++rank) {
    sources[static_cast<size_t>(rank)] = op.view.stage(rank, base_ + reduced_) + offset;
  }
  if (own != nullptr) {
    sources[static_cast<size_t>(op.view.rank)] = own;
  }
  op.fold(to, sources, numel);
}

void HostRounds::reduce(const HostOperation& op) {
  const Operation::Request& request = op.request();
  const int rank = op.view.rank;
  const int64_t count = countOf(op, reduced_);
  const size_t at = op.nbytesOf(firstOf(reduced_));
  if (op.kind == Collective::AllReduce) {
    const Run own = splitBalanced({0, count}, op.view.size, rank);
    const size_t skip = op.nbytesOf(own.offset);
    std::byte* output = request.output.ptr + at + skip;
    if (own.numel > 0) {
      fold(op, output, op.scales ? nullptr : request.input.ptr + at + skip, skip, own.numel);
      HostOperation::copy(op.view.stage(rank, base_ + reduced_) + skip, output, op.nbytesOf(own.numel));
    }
  } else if (op.kind == Collective::ReduceScatter) {
    fold(
        op,
        request.output.ptr + at,
        op.scales ? nullptr : op.inputPart(rank) + at,
        op.nbytesOf(rank * round_numel_),
        count);
  }
  ++reduced_;
  op.view.progress(rank).reduced.store(base_ + reduced_, std::memory_order_seq_cst); // after the slice in the stage
}

void HostRounds::collect(const HostOperation& op) {
  PYCOMM_FAULT_POINT("host.collect");
  const Operation::Request& request = op.request();
  const HostView& view = op.view;
  const int64_t count = countOf(op, collected_);
  const size_t at = op.nbytesOf(firstOf(collected_));
  const uint64_t round = base_ + collected_;
  const size_t nbytes = op.nbytesOf(count);
  if (op.kind == Collective::AllReduce) {
    for (int next = 1; next < view.size;
         ++next) { // each begins at another's, so that not all read the same memory at once
      const int owner = (view.rank + next) % view.size;
      const Run slice = splitBalanced({0, count}, view.size, owner);
      const size_t skip = op.nbytesOf(slice.offset);
      HostOperation::copy(request.output.ptr + at + skip, view.stage(owner, round) + skip, op.nbytesOf(slice.numel));
    }
  } else if (op.kind == Collective::AllGather) {
    HostOperation::copy(op.outputPart(view.rank) + at, request.input.ptr + at, nbytes);
    for (int next = 1; next < view.size; ++next) {
      const int owner = (view.rank + next) % view.size;
      HostOperation::copy(op.outputPart(owner) + at, view.stage(owner, round), nbytes);
    }
  } else if (op.kind == Collective::Broadcast && !op.isRoot()) {
    HostOperation::copy(request.output.ptr + at, view.stage(request.descriptor.root, round), nbytes);
  }
  if (PieceFlow* const pieces = request.extras().pieces.get()) {
    pieces->roundEnded(collected_);
  }
  ++collected_;
  Operation& operation = *op.operation;
  operation.shared().bytes_done.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed);
  operation.mark().received(operation.shared().bytes_done.load(std::memory_order_relaxed));
  // After the last read of the others' stages: they are written again once all have stored this.
  view.progress(view.rank).collected.store(base_ + collected_, std::memory_order_seq_cst);
}

} // namespace pycomm
