#include "host_walk/walked_host.h"

#include "host_walk/walk.h"

#include "engine/host/host_plane.cc"
#include "engine/host/host_transfer.cc"

namespace pycomm {

// No rank is stopped in the walk, so each one ends its step while the others wait for that.
bool walkedDetach(SharedHeap& /*heap*/, BufferView /*part*/) noexcept {
  testing::Walk::current().wrong("a tensor is taken away from a rank that goes on");
  return true;
}

// There is no thread but the ranks' own.

void HostWorker::wake(const std::function<void()>& /*failed*/) {}

bool HostWorker::run(std::function<void()> /*task*/) {
  return false;
}

void HostWorker::stop() {}

} // namespace pycomm
