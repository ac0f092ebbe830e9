// Faults of the network, and the connections of a dead process.
#include <algorithm>

#include "proof/sim/network.h"

namespace pycomm::sim {

void Network::block(int from, int to, TimePoint until) {
  TimePoint& blocked = blockedUntil(from, to);
  blocked = std::max(blocked, until);
}

bool Network::resetConnections(int from, int to) {
  bool any = false;
  for (size_t i = 0; i < connections_.size(); ++i) {
    const int fd = first_fd_ + static_cast<int>(i) * 2;
    const End& here = end(fd);
    if (here.rank != from || here.peer != to || !here.connected || here.closed || here.reset || end(fd + 1).closed) {
      continue;
    }
    any = true;
    for (const int side : {fd, fd + 1}) {
      const TimePoint instant = arrival(end(side ^ 1).rank, end(side).rank);
      if (instant != TimePoint::max()) {
        timeline_.at(instant, [this, side] { becomeReset(side); });
      }
    }
  }
  return any;
}

void Network::closeAllOf(int rank) {
  dead_[static_cast<size_t>(rank)] = true;
  for (size_t i = 0; i < connections_.size(); ++i) {
    const int first = first_fd_ + static_cast<int>(i) * 2;
    for (const int fd : {first, first + 1}) {
      if (end(fd).rank == rank) {
        close(fd);
      }
    }
  }
}

} // namespace pycomm::sim
