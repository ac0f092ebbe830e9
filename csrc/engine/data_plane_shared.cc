// Links to ranks of the same host that go through shared memory.
#include <sys/epoll.h>

#include <utility>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/data_plane.h"
#include "transport/greeted_link.h"

namespace pycomm {

void DataPlane::shareRings(HostRings rings) {
  rings_ = std::move(rings);
  within_host_ = WithinHost::Undecided;
}

void DataPlane::useRings(bool all_have_them) {
  within_host_ = all_have_them ? WithinHost::Rings : WithinHost::Tcp;
  guarded(-1, [&] {
    for (auto& [peer, frame] : std::exchange(early_, {})) {
      push(peer, std::move(frame));
    }
  });
}

// Null where there is no memory for it, or an earlier link has used it: then bytes to this peer go by TCP.
std::unique_ptr<SharedLink> DataPlane::startShared(int peer) {
  if (within_host_ != WithinHost::Rings || !rings_->holds(peer)) {
    return nullptr;
  }
  try {
    PYCOMM_FAULT_POINT("ring.commit");
    rings_->commit(identity_.rank, peer);
  } catch (const Error& error) {
    within_host_ = WithinHost::Tcp; // said once
    log(LogLevel::Info,
        "group " + identity_.name + ": what rank " + std::to_string(identity_.rank) +
            " sends within its host goes by TCP from now on, but for what collectives share: " +
            error.record().summary);
    return nullptr;
  }
  if (!ring_links_.insert(peer).second) {
    return nullptr; // see portTo(): the first one broke
  }
  Hello hello = identity_.hello(LinkPurpose::Bulk);
  hello.shared = true;
  return std::make_unique<SharedLink>(
      std::make_unique<GreetedLink>(identity_.local_address, identity_.addresses[static_cast<size_t>(peer)], hello),
      SharedLink::Rings{rings_->arena, rings_->between(identity_.rank, peer), std::nullopt},
      SharedLink::State::Connecting);
}

std::unique_ptr<SharedLink> DataPlane::acceptShared(int peer, std::unique_ptr<Link> bell) const {
  if (!rings_ || !rings_->holds(peer) || peer == identity_.rank) {
    throw Error(
        ErrorCode::ProtocolViolation,
        "rank " + std::to_string(peer) + " would send through memory that it does not share with this rank");
  }
  return std::make_unique<SharedLink>(
      std::move(bell), SharedLink::Rings{rings_->arena, std::nullopt, rings_->between(peer, identity_.rank)});
}

// What the loop watches an outgoing link for.
uint32_t DataPlane::writeEvents(const OutPort& port, bool waits) const noexcept {
  if (port.shared == nullptr) {
    return waits ? static_cast<uint32_t>(port.link->roomEvent()) : 0U;
  }
  // Always: the peer's end must be heard, and its bell not pile up.
  return port.reader_gone ? 0U : static_cast<uint32_t>(port.shared->roomEvent());
}

bool DataPlane::pollShared() {
  bool moved = false;
  for (size_t i = 0; i < shared_in_.size(); ++i) { // reading may open another one
    InPort& port = *shared_in_[i];
    if (!port.ended && port.shared->canRead()) {
      guarded(port.peer, [&] { readPort(port); });
      moved = true;
    }
  }
  for (size_t i = 0; i < shared_out_.size(); ++i) {
    OutPort& port = *shared_out_[i];
    if (port.waits_for_room && port.connected && !port.broken && port.shared->canWrite()) {
      guarded(port.peer, [&] { flush(port); });
      moved = true;
    }
  }
  return moved;
}

bool DataPlane::restShared() noexcept {
  for (InPort* port : shared_in_) {
    if (!port->ended && !port->shared->readSleeps()) {
      return false;
    }
  }
  for (OutPort* port : shared_out_) {
    if (port->waits_for_room && port->connected && !port->broken && !port->shared->writeSleeps()) {
      return false;
    }
  }
  return true;
}

} // namespace pycomm
