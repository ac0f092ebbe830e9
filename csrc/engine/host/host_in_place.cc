#include "engine/host/host_in_place.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/fault_point.h"
#include "schedule/partition.h"

namespace pycomm {
namespace {

constexpr int64_t kStepNbytes = 1 << 20; // between two looks whether to stop; a stopped rank writes no more
constexpr int64_t kBlockNbytes =
    16 << 10; // of all ranks together it stays in the first caches between being made and being written

/// The bytes of this rank's input, all parts of it.
size_t inputNbytes(const HostOperation& op) {
  const auto parts = static_cast<size_t>(op.kind == Collective::ReduceScatter ? op.view.size : 1);
  return parts * op.nbytesOf(op.numel);
}

int64_t stepNumel(const HostOperation& op) {
  return std::max<int64_t>(kStepNbytes / static_cast<int64_t>(op.element_nbytes), 1);
}

} // namespace

void HostInPlace::publish(const HostOperation& op, const SharedHeap* heap, HostSlot& slot) {
  slot.input_place = slot.output_place = 0;
  const Operation::Request& request = op.request();
  if (heap == nullptr || op.view.heaps == nullptr || !request.extras().input_parts.empty() ||
      request.extras().pieces != nullptr) { // whose bytes come later
    return;
  }
  const bool sends = op.kind != Collective::Broadcast || op.isRoot();
  const size_t nbytes = op.nbytesOf(op.numel);
  const auto input = sends ? heap->placeOf(request.input.ptr, inputNbytes(op)) : std::nullopt;
  slot.input_place = input ? *input + 1 : 0;
  const auto output = op.kind == Collective::AllReduce ? heap->placeOf(request.output.ptr, nbytes) : std::nullopt;
  slot.output_place = output ? *output + 1 : 0;
}

bool HostInPlace::reach(const HostOperation& op) {
  if (op.scales) { // others' operands are not to be altered, and have no place to be scaled in
    return false;
  }
  operands_.resize(static_cast<size_t>(op.view.size));
  for (int rank = 0; rank < op.view.size; ++rank) {
    if (op.kind == Collective::Broadcast && rank != op.request().descriptor.root) {
      continue;
    }
    const HostSlot& slot = op.view.slot(rank, op.ticket);
    Operands& operands = operands_[static_cast<size_t>(rank)];
    operands.input = op.view.inHeap(rank, slot.input_place, inputNbytes(op));
    operands.output = op.view.inHeap(rank, slot.output_place, op.nbytesOf(op.numel));
    if (operands.input == nullptr || (op.kind == Collective::AllReduce && operands.output == nullptr)) {
      return false;
    }
  }
  return true;
}

void HostInPlace::allReduce(const HostOperation& op, int64_t first, int64_t numel) const {
  const int size = op.view.size;
  HostOperation::Sources sources;
  const int64_t block = std::max<int64_t>(kBlockNbytes / size / static_cast<int64_t>(op.element_nbytes), 64);
  for (int64_t done = 0; done < numel; done += block) {
    const int64_t count = std::min(block, numel - done);
    const size_t at = op.nbytesOf(first + done);
    for (int rank = 0; rank < size; ++rank) {
      sources[static_cast<size_t>(rank)] = operands_[static_cast<size_t>(rank)].input + at;
    }
    std::byte* own = op.request().output.ptr + at;
    op.fold(own, sources, count);
    for (int next = 1; next < size; ++next) {
      std::memcpy(operands_[static_cast<size_t>((op.view.rank + next) % size)].output + at, own, op.nbytesOf(count));
    }
  }
}

// `first` and `numel` count the elements of all parts that this rank reads, its own part first.
void HostInPlace::read(const HostOperation& op, int64_t first, int64_t numel) const {
  const Operation::Request& request = op.request();
  const int size = op.view.size;
  const int rank = op.view.rank;
  if (op.kind == Collective::ReduceScatter) {
    HostOperation::Sources sources;
    const size_t at = op.nbytesOf(first);
    for (int from = 0; from < size; ++from) {
      sources[static_cast<size_t>(from)] =
          operands_[static_cast<size_t>(from)].input + op.nbytesOf(rank * op.numel) + at;
    }
    op.fold(request.output.ptr + at, sources, numel);
    return;
  }
  while (numel > 0) {
    const int64_t within = first % op.numel;
    const int64_t count = std::min(numel, op.numel - within);
    const bool one = op.kind == Collective::Broadcast;
    const int owner = one ? request.descriptor.root : static_cast<int>((rank + first / op.numel) % size);
    const size_t at = op.nbytesOf(within);
    const std::byte* from = operands_[static_cast<size_t>(owner)].input + at;
    std::byte* to = (one ? request.output.ptr : op.outputPart(owner)) + at;
    if (from != to) {
      std::memcpy(to, from, op.nbytesOf(count));
    }
    first += count;
    numel -= count;
  }
}

// A rank that gave up before it had ended this operation has its operands for itself again. A rank that was stopped in the meantime may
// have read other values there. It must not take them for a result, and it learns the cause before long. A rank that gives up sets `left`
// before it lets go of its operands. So if `left` is not set by now, this rank has read nothing but operands.
bool HostInPlace::operandsLasted(const HostOperation& op, uint64_t& blocked) noexcept {
  for (int rank = 0; rank < op.view.size; ++rank) {
    const HostProgress& progress = op.view.progress(rank);
    if (rank != op.view.rank && progress.left.load(std::memory_order_seq_cst) != 0 &&
        progress.done.load(std::memory_order_seq_cst) < op.ticket) {
      blocked |= hostBit(rank);
      return false;
    }
  }
  return true;
}

// A rank runs its operations in the order of their tickets, so `done` says which one it is in.
BufferView HostInPlace::writtenBy(const HostOperation& op, int peer) noexcept {
  const HostProgress& progress = op.view.progress(peer);
  const uint64_t writes = progress.writes.load(std::memory_order_seq_cst);
  if (writes == 0 || writes > static_cast<uint64_t>(op.numel) ||
      progress.done.load(std::memory_order_seq_cst) + 1 != op.ticket ||
      op.view.slot(op.view.rank, op.ticket).output_place == 0) {
    return {};
  }
  const auto first = static_cast<int64_t>(writes - 1);
  const int64_t numel = std::min(stepNumel(op), op.numel - first);
  return {op.request().output.ptr + op.nbytesOf(first), op.nbytesOf(numel)};
}

HostInPlace::AdvanceResult HostInPlace::advance(const HostOperation& op, bool ending, uint64_t& blocked) {
  HostProgress& own = op.view.progress(op.view.rank);
  Run work{0, op.numel};
  if (op.kind == Collective::AllReduce) {
    work = splitBalanced({0, op.numel}, op.view.size, op.view.rank);
  } else if (op.kind == Collective::AllGather) {
    work.numel = op.numel * op.view.size;
  } else if (op.kind == Collective::Broadcast && op.isRoot()) {
    work.numel = 0;
  }
  if (position_ < work.numel) {
    if (ending) {
      return AdvanceResult::Blocked;
    }
    PYCOMM_FAULT_POINT("reduce.step");
    // First says what it will write, then looks whether a rank has given up. That rank first sets `left`, then looks who writes. So one of
    // the two sees the other: either nothing is written here, or that rank knows what is.
    if (op.kind == Collective::AllReduce) {
      own.writes.store(1 + static_cast<uint64_t>(work.offset + position_), std::memory_order_seq_cst);
    }
    if (!operandsLasted(op, blocked)) {
      own.writes.store(0, std::memory_order_seq_cst);
      return AdvanceResult::Blocked;
    }
    static_cast<void>(PYCOMM_FAULT("host.write"));
    const int64_t count = std::min(stepNumel(op), work.numel - position_);
    if (op.kind == Collective::AllReduce) {
      allReduce(op, work.offset + position_, count);
      own.writes.store(0, std::memory_order_seq_cst);
    } else {
      read(op, position_, count);
    }
    position_ += count;
    op.operation->shared().bytes_done.fetch_add(
        count * static_cast<int64_t>(op.element_nbytes), std::memory_order_relaxed);
    return AdvanceResult::Moved;
  }
  if (!finished_) {
    finished_ = true;
    own.reduced.store(base_ + 1, std::memory_order_seq_cst); // after the last byte that this rank reads or writes
    return AdvanceResult::Moved;
  }
  // Its operands are its own again once nobody reads or writes them.
  if (!op.view.allHave(&HostProgress::reduced, base_ + 1, blocked)) {
    return AdvanceResult::Blocked;
  }
  if (!operandsLasted(op, blocked)) {
    return AdvanceResult::Blocked;
  }
  own.collected.store(base_ + 1, std::memory_order_seq_cst);
  return AdvanceResult::Done;
}

} // namespace pycomm
