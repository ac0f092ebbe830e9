#include "engine/host/host_memory.h"

#include <utility>

namespace pycomm {

HostMemory::HostMemory(std::shared_ptr<const SharedArena> arena, HostHeaps heaps, const GroupIdentity& identity)
    : arena_(std::move(arena)),
      heaps_(std::move(heaps)),
      view_{
          arena_->at(0),
          heaps_.own == nullptr ? nullptr : heaps_.ranges.data(),
          identity.rank,
          identity.size,
          &identity.job} {}

void HostMemory::commitStage() {
  if (!staged_) {
    const size_t begin = HostView::stageOffset(view_.size, view_.rank);
    arena_->commit(begin, HostView::stageOffset(view_.size, view_.rank + 1) - begin);
    staged_ = true;
  }
}

bool HostMemory::takeAway(BufferView part) const noexcept {
  return heaps_.own->detach(part.ptr, part.nbytes);
}

} // namespace pycomm
