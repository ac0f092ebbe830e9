#include "engine/host/host_memory.h"

namespace pycomm {

void HostMemory::commitStage() {
  if (!staged_) {
    const size_t begin = HostView::stageOffset(view_.size, view_.rank);
    arena_->commit(begin, HostView::stageOffset(view_.size, view_.rank + 1) - begin, SharedHeap::atOnce());
    staged_ = true;
  }
}

bool HostMemory::takeAway(BufferView part) const noexcept {
  return heaps_.own->detach(part.ptr, part.nbytes);
}

} // namespace pycomm
