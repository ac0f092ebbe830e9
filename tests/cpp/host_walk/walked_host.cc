#include "host_walk/walked_host.h"

#include "engine/host/host_bell.cc"
#include "engine/host/host_in_place.cc"
#include "engine/host/host_layout.cc"
#include "engine/host/host_operation.cc"
#include "engine/host/host_plane.cc"
#include "engine/host/host_queue.cc"
#include "engine/host/host_rounds.cc"
#include "engine/host/host_transfer.cc"

namespace pycomm {

// The scene has committed all. There is no thread but the ranks' own.

HostMemory::HostMemory(std::shared_ptr<const SharedArena> arena, HostHeaps heaps, int rank, int size)
    : arena_(std::move(arena)),
      heaps_(std::move(heaps)),
      view_{arena_->at(0), heaps_.own == nullptr ? nullptr : heaps_.ranges.data(), rank, size} {}

void HostMemory::commitStage() {}

// The worst case: there was no memory to take anything away, and the others go on reading and writing there.
bool HostMemory::takeAway(const HostInPlace::Published& /*published*/) const noexcept {
  return true;
}

void HostWorker::wake() {}

bool HostWorker::run(std::function<void()> /*errand*/) {
  return false;
}

void HostWorker::stop() {}

} // namespace pycomm
