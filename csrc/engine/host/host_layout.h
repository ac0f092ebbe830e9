#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/buffer_view.h"
#include "base/job_ranks.h"
#include "engine/host/host_word.h"
#include "transport/frame_header.h"

namespace pycomm {

// Layout of the memory that the ranks of a group share. It begins zeroed; every field has one writer, a rank, but for the
// bells. Nothing here is ever a pointer: each process has the memory at an address of its own.

/// How far one rank is. All counters only rise. A counter is stored after everything that it promises (and so after the bytes that
/// others may now read), with sequential consistency, which includes release; a reader that loads it with sequential consistency,
/// which includes acquire, sees those bytes. Why not release and acquire alone: see HostBell.
struct alignas(256) HostProgress {
  HostWord<uint64_t> done; ///< tickets that are over here: this rank reads nothing of them any more
  HostWord<uint64_t> staged; ///< rounds of large operations: its part lies in its stage
  HostWord<uint64_t> reduced; ///< its slice of the result lies in its stage
  HostWord<uint64_t> collected; ///< it has read what it needs of the others' stages
  HostWord<uint32_t> left; ///< kLeftInOrder, kGaveUp: of what is not done here, it keeps nothing ready any more
  HostWord<uint64_t> writes; ///< 1 + the first element of the step that it writes into all ranks' outputs; 0: none
  alignas(64)
      HostWord<uint64_t> waits_for; ///< it sleeps, or is about to, until one of these ranks (bits) goes on; 0: awake
  HostWord<uint32_t> bell; ///< a futex: a rank that makes progress rings it
};
static_assert(sizeof(HostProgress) == 256 && std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

/// One rank's entry for one operation: its descriptor and, if small, its payload.
struct alignas(64) HostSlot {
  HostWord<uint64_t> ticket; ///< stored last: everything below belongs to this ticket
  FrameHeader header; ///< the descriptor and the operation's id, as a frame on the wire has them
  uint64_t input_place; ///< 1 + where the input lies in the rank's SharedHeap; 0: others cannot reach it
  uint64_t output_place; ///< the same of the output, which others may then write
};
static_assert(sizeof(HostSlot) == 128, "the payload begins on a cache line");

inline constexpr uint32_t kLeftInOrder = 1;
inline constexpr uint32_t kGaveUp = 2; ///< its group has failed: the others learn why, and nobody is to blame for it
inline constexpr uint64_t kHostWithdrawn = uint64_t{1} << 63; ///< in HostSlot::ticket: entered, and given up since
inline constexpr int kMaxHostRanks = 64; ///< bits of HostProgress::waits_for

/// A rank in HostProgress::waits_for.
[[nodiscard]] constexpr uint64_t hostBit(int rank) noexcept {
  return uint64_t{1} << rank;
}

/// The same memory, as one rank of the group sees it.
struct HostView {
  std::byte* base = nullptr;
  const BufferView* heaps = nullptr; ///< each rank's SharedHeap; null where not all ranks reach all of them
  int rank = 0;
  int size = 1;
  const JobRanks* job = nullptr; ///< what errors call the ranks; null: the same numbers

  [[nodiscard]] HostProgress& progress(int of) const noexcept {
    return *reinterpret_cast<HostProgress*>(base + static_cast<size_t>(of) * sizeof(HostProgress));
  }
  [[nodiscard]] HostSlot& slot(int of, uint64_t ticket) const noexcept {
    const size_t index = static_cast<size_t>(of) * kHostSlots + ticket % kHostSlots;
    return *reinterpret_cast<HostSlot*>(base + slotsOffset(size) + index * kSlotNbytes);
  }
  [[nodiscard]] std::byte* payload(int of, uint64_t ticket) const noexcept {
    return reinterpret_cast<std::byte*>(&slot(of, ticket)) + sizeof(HostSlot);
  }
  [[nodiscard]] std::byte* stage(int of, uint64_t round) const noexcept {
    return base + stageOffset(size, of) + round % kHostStages * kHostStageNbytes;
  }

  /// Whether this counter of every other rank is at least `count`. Else `blocked` gets the bit of the lowest rank whose is not.
  [[nodiscard]] bool allHave(HostWord<uint64_t> HostProgress::* counter, uint64_t count, uint64_t& blocked)
      const noexcept {
    for (int other = 0; other < size; ++other) {
      if (other != rank && (progress(other).*counter).load(std::memory_order_seq_cst) < count) {
        blocked |= hostBit(other);
        return false;
      }
    }
    return true;
  }

  /// Where `nbytes` at a place that a rank has written into its slot lie here; null if it has written none.
  /// Throws Error(ProtocolViolation) if they do not lie in its heap.
  [[nodiscard]] std::byte* inHeap(int of, uint64_t place, size_t nbytes) const;

  static constexpr size_t kSlotNbytes = sizeof(HostSlot) + kHostInlineNbytes;
  static constexpr size_t kPage = 4096;
  [[nodiscard]] static constexpr size_t slotsOffset(int size) noexcept {
    return (static_cast<size_t>(size) * sizeof(HostProgress) + kPage - 1) / kPage * kPage;
  }
  /// What always exists; the rest is committed by each rank for itself when it first has a large operation.
  [[nodiscard]] static constexpr size_t commonNbytes(int size) noexcept {
    const size_t slots = static_cast<size_t>(size) * kHostSlots * kSlotNbytes;
    return (slotsOffset(size) + slots + kPage - 1) / kPage * kPage;
  }
  [[nodiscard]] static constexpr size_t stageOffset(int size, int of) noexcept {
    return commonNbytes(size) + static_cast<size_t>(of) * kHostStages * kHostStageNbytes;
  }
  [[nodiscard]] static constexpr size_t totalNbytes(int size) noexcept {
    return stageOffset(size, size);
  }
};

} // namespace pycomm
