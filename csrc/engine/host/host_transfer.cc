#include "engine/host/host_transfer.h"

#include "base/fault_point.h"

namespace pycomm {

bool HostTransfer::mayEnter(uint64_t& blocked) const noexcept {
  if (op_.operation->shared().held.load(std::memory_order_seq_cst)) {
    return false; // the thread that releases it wakes this one
  }
  if (op_.ticket <= kHostSlots) {
    return true;
  }
  const HostView& view = op_.view;
  const uint64_t before = op_.ticket - kHostSlots;
  return view.progress(view.rank).done.load(std::memory_order_relaxed) >= before &&
      view.allHave(&HostProgress::done, before, blocked);
}

void HostTransfer::enter() {
  PYCOMM_FAULT_POINT("host.enter");
  const Operation::Request& request = op_.request();
  HostSlot& slot = op_.view.slot(op_.view.rank, op_.ticket);
  slot.header = FrameHeader();
  slot.header.op_id = request.id.id;
  request.descriptor.writeTo(slot.header);
  if (!large()) {
    givePayload();
  }
  in_place_.publish(op_, large() ? heap_ : nullptr, slot);
  slot.ticket.store(op_.ticket, std::memory_order_seq_cst); // after all that belongs to it
}

void HostTransfer::givePayload() const {
  if (op_.kind == Collective::Broadcast && !op_.isRoot()) {
    return;
  }
  std::byte* payload = op_.view.payload(op_.view.rank, op_.ticket);
  if (op_.kind == Collective::ReduceScatter) {
    for (int part = 0; part < op_.view.size; ++part) {
      op_.give(payload + op_.nbytesOf(part * op_.numel), op_.inputPart(part), op_.numel);
    }
  } else {
    op_.give(payload, op_.request().input.ptr, op_.numel);
  }
}

void HostTransfer::withdraw() const noexcept {
  op_.view.slot(op_.view.rank, op_.ticket).ticket.store(op_.ticket | kHostWithdrawn, std::memory_order_seq_cst);
}

uint64_t HostTransfer::lacking() const noexcept {
  uint64_t ranks = 0;
  for (int rank = 0; rank < op_.view.size; ++rank) {
    const HostSlot& slot = op_.view.slot(rank, op_.ticket);
    const bool entered = slot.ticket.load(std::memory_order_seq_cst) == op_.ticket && // then the slot stays as it is
        slot.header.op_id == op_.request().id.id;
    ranks |= rank == op_.view.rank || entered ? 0 : hostBit(rank);
  }
  return ranks;
}

HostTransfer::AdvanceResult HostTransfer::match(uint64_t& blocked) {
  for (; matched_ < op_.view.size; ++matched_) {
    const HostSlot& slot = op_.view.slot(matched_, op_.ticket);
    if (slot.ticket.load(std::memory_order_seq_cst) != op_.ticket) {
      blocked |= hostBit(matched_);
      return AdvanceResult::Blocked;
    }
    if (slot.header.op_id != op_.request().id.id) {
      astray_ = true;
      blocked |= hostBit(matched_);
      return AdvanceResult::Blocked;
    }
    if (Descriptor::readFrom(slot.header) != op_.request().descriptor) {
      return AdvanceResult::Differs;
    }
  }
  for (int rank = 0; rank < op_.view.size; ++rank) { // one that was compared early may have withdrawn since
    if (op_.view.slot(rank, op_.ticket).ticket.load(std::memory_order_seq_cst) != op_.ticket) {
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
  if (in_place_.reach(op_)) {
    phase_ = Phase::InPlace;
    in_place_.begin(rounds);
    rounds += 1;
  } else {
    phase_ = Phase::InRounds;
    rounds_.begin(rounds);
    rounds += rounds_.count();
  }
  op_.operation->mark().arriving(Clock::now());
  return AdvanceResult::Moved;
}

HostTransfer::AdvanceResult HostTransfer::advance(uint64_t& rounds, bool ending, uint64_t& blocked) {
  switch (phase_) {
    case Phase::InRounds:
      return rounds_.advance(op_, blocked);
    case Phase::InPlace:
      return in_place_.advance(op_, ending, blocked);
    case Phase::Matching:
      break;
  }
  const AdvanceResult matching = match(blocked);
  return matching == AdvanceResult::Moved ? matched(rounds) : matching;
}

void HostTransfer::foldPayloads(size_t offset) const {
  PYCOMM_FAULT_POINT("reduce.step");
  HostOperation::Sources sources;
  for (int rank = 0; rank < op_.view.size; ++rank) {
    sources[static_cast<size_t>(rank)] = op_.view.payload(rank, op_.ticket) + offset;
  }
  op_.fold(op_.request().output.ptr, sources, op_.numel);
}

void HostTransfer::finishSmall() const {
  const Operation::Request& request = op_.request();
  const size_t nbytes = op_.nbytesOf(op_.numel);
  if (op_.numel == 0) {
    return;
  }
  switch (op_.kind) {
    case Collective::AllReduce:
      foldPayloads(0);
      break;
    case Collective::ReduceScatter:
      foldPayloads(static_cast<size_t>(op_.view.rank) * nbytes);
      break;
    case Collective::AllGather:
      for (int rank = 0; rank < op_.view.size; ++rank) {
        HostOperation::copy(op_.outputPart(rank), op_.view.payload(rank, op_.ticket), nbytes);
      }
      break;
    case Collective::Broadcast:
      if (!op_.isRoot()) {
        HostOperation::copy(request.output.ptr, op_.view.payload(request.descriptor.root, op_.ticket), nbytes);
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

} // namespace pycomm
