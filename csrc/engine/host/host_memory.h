#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "base/buffer_view.h"
#include "engine/host/host_word.h"
#include "engine/operation/group_identity.h"
#include "transport/frame_header.h"
#include "transport/memory/futex.h"
#include "transport/memory/shared_arena.h"
#include "transport/memory/shared_heap.h"

namespace pycomm {

// The memory that the ranks of a group share on one host. It begins zeroed; every field has one writer, a rank, but for the bells.
// Nothing in it is ever a pointer: each process has the memory at an address of its own.
//
// This folder counts the ranks of the host: 0, 1, …, in the order of the group. A number that comes from the rest of the engine or
// goes there is a rank of the group: HostMemory::inGroup() and onHost() convert.

/// How far one rank is. All counters only rise. A counter is stored after everything that it promises (and so after the bytes that
/// others may now read), with sequential consistency, which includes release; a reader that loads it with sequential consistency,
/// which includes acquire, sees those bytes. Why not release and acquire alone: see HostBell.
struct alignas(256) HostProgress {
  HostWord<uint64_t> done; ///< tickets that are over here: this rank reads nothing of them any more
  // Of large operations. In rounds each kind raises all three in each round, also where it has nothing to do. In place is one round.
  HostWord<uint64_t> staged; ///< in rounds: its part lies in its stage; in place: not raised
  HostWord<uint64_t> reduced; ///< in rounds: its slice of a sum is made; in place: it touches no operand any more
  HostWord<uint64_t> collected; ///< in rounds: it has read all stages; in place: nobody touches its operands any more
  HostWord<uint32_t> left; ///< 0, kLeftInOrder or kGaveUp: of what is not done here, it keeps nothing ready any more
  HostWord<uint64_t> writes; ///< 1 + the first element of the step that it writes into all ranks' outputs; 0: none
  alignas(64)
      HostWord<uint64_t> waits_for; ///< it sleeps, or is about to, until one of these ranks (bits) goes on; 0: awake
  HostWord<uint32_t> bell; ///< a futex: a rank that makes progress rings it
};
static_assert(sizeof(HostProgress) == 256 && std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

/// One rank's entry for one operation: its descriptor and, if small, its payload.
struct alignas(64) HostSlot {
  HostWord<uint64_t> ticket; ///< stored last: everything below belongs to this ticket
  /// The operation's. Orders nothing, so it is no HostWord; but the data loop may read it while the slot is written for another ticket.
  std::atomic<uint64_t> op_id;
  FrameHeader header; ///< the descriptor, as a frame on the wire has it
  uint64_t input_place; ///< 1 + where the input lies in the rank's SharedHeap; 0: others cannot reach it
  uint64_t output_place; ///< the same of the output, which others may then write
};
static_assert(sizeof(HostSlot) == 128, "the payload begins on a cache line");

inline constexpr uint32_t kLeftInOrder = 1; ///< it has closed: who still waits for it reports that
inline constexpr uint32_t kGaveUp = 2; ///< its group has failed: the others learn why, and do not report it
inline constexpr uint64_t kHostWithdrawn = uint64_t{1} << 63; ///< in HostSlot::ticket: entered, and given up since
inline constexpr int kMaxHostRanks = 64; ///< bits of HostProgress::waits_for

/// A rank in HostProgress::waits_for.
[[nodiscard]] constexpr uint64_t hostBit(int rank) noexcept {
  return uint64_t{1} << rank;
}

/// Where all of this lies, as one rank sees it.
struct HostView {
  std::byte* base = nullptr;
  int rank = 0;
  int size = 1;

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

/// How a rank that waits for others sleeps, and how they wake it: each rank has a futex in the shared memory, its bell.
///
///   const uint32_t rung = bell.expect(blocked);   // these ranks ring from now on
///   if (nothing has moved since) bell.sleep(rung, pause);
///   bell.ignore();
///
/// No wake-up is lost: this rank stores for whom it waits (1, in expect), reads the bell, then checks once more whether it can go on (2). A
/// peer stores its counter (3), then checks who waits (4, in ringOthers), and rings if it is this one. All four are sequentially consistent,
/// so they have one order: if (4) came before (1), then (3) came before (2), and the check finds it. If (4) came after (1), the peer rings:
/// either before the bell was read, then (3) came before (2) as well; or after it, then the kernel finds another value than was read and
/// does not let this thread sleep. Release and acquire alone would let a processor do (4) before (3) is seen.
///
/// Thread: any for the ring functions; expect(), sleep() and ignore() are for the thread that runs the plane.
class HostBell {
 public:
  explicit HostBell(const HostView& view) : view_(view) {}

  /// Wakes the ranks that sleep until this rank goes on.
  void ringOthers() const noexcept {
    for (int peer = 0; peer < view_.size; ++peer) {
      HostProgress& progress = view_.progress(peer);
      if (peer != view_.rank && (progress.waits_for.load(std::memory_order_seq_cst) >> view_.rank & 1) != 0) {
        ring(progress);
      }
    }
  }
  /// Wakes the thread of this process that sleeps, if one does.
  void ringSelf() const noexcept {
    HostProgress& progress = view_.progress(view_.rank);
    if (progress.waits_for.load(std::memory_order_seq_cst) != 0) {
      ring(progress);
    }
  }

  /// Asks these ranks (bits), and this process's threads, to ring. Returns what sleep() needs.
  [[nodiscard]] uint32_t expect(uint64_t ranks) const noexcept {
    HostProgress& progress = view_.progress(view_.rank);
    progress.waits_for.store(ranks | hostBit(view_.rank), std::memory_order_seq_cst);
    return progress.bell.load(std::memory_order_seq_cst);
  }
  /// Sleeps until the bell is rung, or was since expect() returned `rung`, or the time is up.
  void sleep(uint32_t rung, std::chrono::microseconds pause) const noexcept {
    futexWait(view_.progress(view_.rank).bell, rung, pause.count());
  }
  /// Nobody needs to ring any more.
  void ignore() const noexcept {
    view_.progress(view_.rank).waits_for.store(0, std::memory_order_seq_cst);
  }

 private:
  static void ring(HostProgress& progress) noexcept {
    progress.bell.fetch_add(1, std::memory_order_seq_cst);
    futexWake(progress.bell);
  }

  const HostView view_;
};

/// The memory that tensors lie in which the ranks reach in place.
struct HostHeaps {
  std::shared_ptr<SharedHeap> own; ///< null: there are none
  std::vector<std::shared_ptr<const SharedArena>> mapped; ///< of the others, by rank of the host
  std::vector<BufferView> ranges; ///< where each is mapped here, by rank of the host
};

/// All memory that one rank shares with the others of its host, and who they are.
class HostMemory {
 public:
  /// `in_group`: the group's ranks on this host, ascending, this one among them; empty: all of the group. `arena` begins with
  /// HostView::totalNbytes(their number) for this; the first HostView::commonNbytes() of them exist. The identity outlives this.
  HostMemory(
      const GroupIdentity& identity,
      std::vector<int> in_group,
      std::shared_ptr<const SharedArena> arena,
      HostHeaps heaps)
      : identity_(identity),
        in_group_(in_group.empty() ? all(identity.size) : std::move(in_group)),
        arena_(std::move(arena)),
        heaps_(std::move(heaps)),
        view_{arena_->at(0), onHost(identity.rank), static_cast<int>(in_group_.size())} {}
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  [[nodiscard]] const HostView& view() const noexcept {
    return view_;
  }
  [[nodiscard]] HostProgress& own() const noexcept {
    return view_.progress(view_.rank);
  }
  [[nodiscard]] const GroupIdentity& identity() const noexcept {
    return identity_;
  }
  /// The rank of the group that is this rank of the host.
  [[nodiscard]] int inGroup(int rank) const noexcept {
    return in_group_[static_cast<size_t>(rank)];
  }
  /// The other way; -1 for a rank that is on another host.
  [[nodiscard]] int onHost(int in_group) const noexcept {
    const auto found = std::lower_bound(in_group_.begin(), in_group_.end(), in_group);
    return found == in_group_.end() || *found != in_group ? -1 : static_cast<int>(found - in_group_.begin());
  }

  /// This rank's heap, of which peers reach tensors; null if the ranks do not reach each other's.
  [[nodiscard]] const SharedHeap* heap() const noexcept {
    return heaps_.own.get();
  }
  /// A rank's whole heap, as mapped here; only if there is heap().
  [[nodiscard]] BufferView heapOf(int rank) const noexcept {
    return heaps_.ranges[static_cast<size_t>(rank)];
  }
  /// Moves a part of a tensor of this rank's heap to pages that no peer reaches. Returns false if memory is short. Thread: as the next.
  [[nodiscard]] bool takeAway(BufferView part) const noexcept {
    return hostDetach(*heaps_.own, part);
  }
  /// Commits this rank's stages, once. Throws what SharedArena::commit() throws. Thread: the one that runs operations.
  void commitStages() {
    if (!staged_) {
      const size_t begin = HostView::stageOffset(view_.size, view_.rank);
      hostCommit(*arena_, begin, HostView::stageOffset(view_.size, view_.rank + 1) - begin);
      staged_ = true;
    }
  }

 private:
  [[nodiscard]] static std::vector<int> all(int size) {
    std::vector<int> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  const GroupIdentity& identity_;
  const std::vector<int> in_group_; ///< by rank of the host
  const std::shared_ptr<const SharedArena> arena_;
  const HostHeaps heaps_;
  const HostView view_;
  bool staged_ = false; ///< this rank's stages are committed
};

} // namespace pycomm
