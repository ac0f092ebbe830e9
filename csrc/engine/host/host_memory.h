#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "base/buffer_view.h"
#include "engine/host/host_layout.h"
#include "engine/operation/group_identity.h"
#include "transport/memory/shared_arena.h"
#include "transport/memory/shared_heap.h"

namespace pycomm {

/// The memory that tensors lie in which the ranks of a group reach in place.
struct HostHeaps {
  std::shared_ptr<SharedHeap> own; ///< null: there are none
  std::vector<std::shared_ptr<const SharedArena>> mapped; ///< of the others, by rank
  std::vector<BufferView> ranges; ///< where each is mapped here, by rank
};

/// All memory that one rank of a HostPlane shares with the others, and this rank's part of it: its stage, which has pages only once
/// a large operation needs them, and its heap.
class HostMemory {
 public:
  /// `arena` begins with HostView::totalNbytes(size) for this; the first HostView::commonNbytes(size) of them exist.
  HostMemory(std::shared_ptr<const SharedArena> arena, HostHeaps heaps, const GroupIdentity& identity)
      : arena_(std::move(arena)),
        heaps_(std::move(heaps)),
        view_{
            arena_->at(0),
            heaps_.own == nullptr ? nullptr : heaps_.ranges.data(),
            identity.rank,
            identity.size,
            &identity.job} {}
  HostMemory(const HostMemory&) = delete; ///< the view points into it
  HostMemory& operator=(const HostMemory&) = delete;

  [[nodiscard]] const HostView& view() const noexcept {
    return view_;
  }
  /// Null if the ranks do not reach each other's tensors.
  [[nodiscard]] const SharedHeap* heap() const noexcept {
    return heaps_.own.get();
  }
  /// Commits this rank's stage, once. Throws what SharedArena::commit() throws. With the plane's run_mutex_ held.
  void commitStage();
  /// Moves a part of a tensor of this rank's heap to pages that no peer reaches. Returns false if memory is short. With the plane's
  /// run_mutex_ held.
  [[nodiscard]] bool takeAway(BufferView part) const noexcept;

 private:
  const std::shared_ptr<const SharedArena> arena_;
  const HostHeaps heaps_;
  const HostView view_;
  bool staged_ = false; ///< this rank's stage is committed
};

} // namespace pycomm
