// Large operations on operands that all ranks can reach: nothing is staged.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/fault_point.h"
#include "engine/host/host_transfer.h"
#include "numeric/reduce.h"
#include "schedule/partition.h"

namespace pycomm {
namespace {

constexpr int64_t kStepNbytes = 1 << 20; // between two looks whether to stop
constexpr int64_t kBlockNbytes =
    16 << 10; // of all ranks together it stays in the first caches between being made and being written

} // namespace

void HostTransfer::publish(HostSlot& slot) {
  slot.input_place = slot.output_place = 0;
  published_ = {};
  const Operation::Request& request = operation_->request();
  if (heap_ == nullptr || view_.heaps == nullptr || rounds_ == 0 || !request.extras().input_parts.empty() ||
      request.extras().pieces != nullptr) { // whose bytes come later
    return;
  }
  const bool sends = kind_ != Collective::Broadcast || request.descriptor.root == view_.rank;
  const auto parts = static_cast<size_t>(kind_ == Collective::ReduceScatter ? view_.size : 1);
  const size_t nbytes = static_cast<size_t>(numel_) * element_nbytes_;
  const auto input = sends ? heap_->placeOf(request.input.ptr, parts * nbytes) : std::nullopt;
  if (input) {
    published_.input = {request.input.ptr, parts * nbytes};
    slot.input_place = *input + 1;
  }
  const auto output = kind_ == Collective::AllReduce ? heap_->placeOf(request.output.ptr, nbytes) : std::nullopt;
  if (output) {
    published_.output = {request.output.ptr, nbytes};
    slot.output_place = *output + 1;
  }
}

std::byte* HostView::inHeap(int of, uint64_t place, size_t nbytes) const {
  if (heaps == nullptr || place == 0) {
    return nullptr;
  }
  const BufferView& heap = heaps[of];
  if (nbytes > heap.nbytes || place - 1 > heap.nbytes - nbytes) {
    ErrorRecord record;
    record.code = ErrorCode::ProtocolViolation;
    record.peer = of;
    record.summary = "Rank " + std::to_string(of) + " says that an operand of " + std::to_string(nbytes) +
        " bytes lies at " + std::to_string(place - 1) + " of its heap, which has " + std::to_string(heap.nbytes) +
        " bytes.";
    record.hint = "look for native code that writes out of bounds in that process, or set PYCOMM_TRANSPORT=tcp";
    throw Error(record);
  }
  return heap.ptr + (place - 1);
}

// Whether each rank reaches all the operands that it needs, which all ranks see alike.
bool HostTransfer::reachOperands() {
  if (scales_) { // others' operands are not to be altered, and have no place to be scaled in
    return false;
  }
  const size_t nbytes = static_cast<size_t>(numel_) * element_nbytes_;
  const auto parts = static_cast<size_t>(kind_ == Collective::ReduceScatter ? view_.size : 1);
  operands_.resize(static_cast<size_t>(view_.size));
  for (int rank = 0; rank < view_.size; ++rank) {
    if (kind_ == Collective::Broadcast && rank != operation_->request().descriptor.root) {
      continue;
    }
    const HostSlot& slot = view_.slot(rank, ticket_);
    Operands& operands = operands_[static_cast<size_t>(rank)];
    operands.input = view_.inHeap(rank, slot.input_place, parts * nbytes);
    operands.output = view_.inHeap(rank, slot.output_place, nbytes);
    if (operands.input == nullptr || (kind_ == Collective::AllReduce && operands.output == nullptr)) {
      return false;
    }
  }
  return true;
}

void HostTransfer::allReduceInPlace(int64_t first, int64_t numel) const {
  const Descriptor& descriptor = operation_->request().descriptor;
  std::array<const void*, kMaxHostRanks> sources;
  const int64_t block = std::max<int64_t>(kBlockNbytes / view_.size / static_cast<int64_t>(element_nbytes_), 64);
  for (int64_t done = 0; done < numel; done += block) {
    const int64_t count = std::min(block, numel - done);
    const size_t at = static_cast<size_t>(first + done) * element_nbytes_;
    const size_t nbytes = static_cast<size_t>(count) * element_nbytes_;
    for (int rank = 0; rank < view_.size; ++rank) {
      sources[static_cast<size_t>(rank)] = operands_[static_cast<size_t>(rank)].input + at;
    }
    std::byte* own = operation_->request().output.ptr + at;
    reduceMany(
        descriptor.dtype,
        descriptor.reduce_op,
        own,
        sources.data(),
        static_cast<size_t>(view_.size),
        static_cast<size_t>(count),
        descriptor.reduce_op == ReduceOp::Avg ? view_.size : 1);
    for (int next = 1; next < view_.size; ++next) {
      std::memcpy(operands_[static_cast<size_t>((view_.rank + next) % view_.size)].output + at, own, nbytes);
    }
  }
}

// `first` and `numel` count the elements of all parts that this rank reads, its own part first.
void HostTransfer::readInPlace(int64_t first, int64_t numel) const {
  const Operation::Request& request = operation_->request();
  const size_t part_nbytes = static_cast<size_t>(numel_) * element_nbytes_;
  if (kind_ == Collective::ReduceScatter) {
    std::array<const void*, kMaxHostRanks> sources;
    const size_t at = static_cast<size_t>(first) * element_nbytes_;
    for (int rank = 0; rank < view_.size; ++rank) {
      sources[static_cast<size_t>(rank)] =
          operands_[static_cast<size_t>(rank)].input + static_cast<size_t>(view_.rank) * part_nbytes + at;
    }
    reduceMany(
        request.descriptor.dtype,
        request.descriptor.reduce_op,
        request.output.ptr + at,
        sources.data(),
        static_cast<size_t>(view_.size),
        static_cast<size_t>(numel),
        request.descriptor.reduce_op == ReduceOp::Avg ? view_.size : 1);
    return;
  }
  while (numel > 0) {
    const int64_t within = first % numel_;
    const int64_t count = std::min(numel, numel_ - within);
    const bool one = kind_ == Collective::Broadcast;
    const int owner = one ? request.descriptor.root : static_cast<int>((view_.rank + first / numel_) % view_.size);
    const size_t at = static_cast<size_t>(within) * element_nbytes_;
    const std::byte* from = operands_[static_cast<size_t>(owner)].input + at;
    std::byte* to = (one ? request.output.ptr : outputPart(owner)) + at;
    if (from != to) {
      std::memcpy(to, from, static_cast<size_t>(count) * element_nbytes_);
    }
    first += count;
    numel -= count;
  }
}

// A rank that gave up before it had ended this operation has its operands for itself again. So a rank that was stopped in the meantime
// may have read something else there: it must not take that for a result, and hears why before long. Who gives up says so before it
// lets go of its operands; so if it has not said so by now, all that was read here was what it gave.
bool HostTransfer::operandsLasted(uint64_t& blocked) const noexcept {
  for (int rank = 0; rank < view_.size; ++rank) {
    const HostProgress& progress = view_.progress(rank);
    if (rank != view_.rank && progress.left.load(std::memory_order_seq_cst) != 0 &&
        progress.done.load(std::memory_order_seq_cst) < ticket_) {
      blocked |= uint64_t{1} << rank;
      return false;
    }
  }
  return true;
}

HostTransfer::Progress HostTransfer::advanceInPlace(uint64_t& blocked) {
  HostProgress& own = view_.progress(view_.rank);
  Run work{0, numel_};
  if (kind_ == Collective::AllReduce) {
    work = splitBalanced({0, numel_}, view_.size, view_.rank);
  } else if (kind_ == Collective::AllGather) {
    work.numel = numel_ * view_.size;
  } else if (kind_ == Collective::Broadcast && operation_->request().descriptor.root == view_.rank) {
    work.numel = 0;
  }
  if (position_ < work.numel) {
    PYCOMM_FAULT_POINT("reduce.step");
    const int64_t step = std::max<int64_t>(kStepNbytes / static_cast<int64_t>(element_nbytes_), 1);
    const int64_t count = std::min(step, work.numel - position_);
    if (kind_ == Collective::AllReduce) {
      allReduceInPlace(work.offset + position_, count);
    } else {
      readInPlace(position_, count);
    }
    position_ += count;
    operation_->shared().bytes_done.fetch_add(count * static_cast<int64_t>(element_nbytes_), std::memory_order_relaxed);
    return Progress::Moved;
  }
  if (reduced_ == 0) {
    staged_ = reduced_ = 1;
    own.staged.store(base_ + 1, std::memory_order_seq_cst);
    own.reduced.store(base_ + 1, std::memory_order_seq_cst); // after the last byte that this rank reads or writes
    return Progress::Moved;
  }
  // Its operands are its own again once nobody reads or writes them.
  if (!allHave(&HostProgress::reduced, base_ + 1, blocked)) {
    return Progress::Blocked;
  }
  if (!operandsLasted(blocked)) {
    return Progress::Blocked;
  }
  own.collected.store(base_ + 1, std::memory_order_seq_cst);
  return Progress::Done;
}

} // namespace pycomm
