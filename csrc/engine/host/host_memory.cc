#include "engine/host/host_memory.h"

#include <utility>

namespace pycomm {

HostMemory::HostMemory(std::shared_ptr<const SharedArena> arena, HostHeaps heaps, int rank, int size)
    : arena_(std::move(arena)),
      heaps_(std::move(heaps)),
      view_{arena_->at(0), heaps_.own == nullptr ? nullptr : heaps_.ranges.data(), rank, size} {}

void HostMemory::commitStage() {
  if (!staged_) {
    const size_t begin = HostView::stageOffset(view_.size, view_.rank);
    arena_->commit(begin, HostView::stageOffset(view_.size, view_.rank + 1) - begin);
    staged_ = true;
  }
}

bool HostMemory::takeAway(const HostInPlace::Published& published) const noexcept {
  bool taken = true;
  if (published.output.ptr != nullptr) {
    taken = heaps_.own->detach(published.output.ptr, published.output.nbytes);
  }
  if (published.input.ptr != nullptr && published.input.ptr != published.output.ptr) {
    taken = heaps_.own->detach(published.input.ptr, published.input.nbytes) && taken;
  }
  return taken;
}

} // namespace pycomm
