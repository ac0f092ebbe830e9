#include "host_walk/walked_host.h"

#include "host_walk/walk.h"

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

void HostMemory::commitStage() {}

// No rank is stopped in the walk, so each one ends its step while the others wait for that.
bool HostMemory::takeAway(BufferView /*part*/) const noexcept {
  testing::Walk::current().wrong("a tensor is taken away from a rank that goes on");
  return true;
}

void HostWorker::wake(const std::function<void()>& /*failed*/) {}

bool HostWorker::run(std::function<void()> /*errand*/) {
  return false;
}

void HostWorker::stop() {}

} // namespace pycomm
