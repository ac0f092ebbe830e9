// Bulk links: how they are opened, by this rank and by others.
#include <algorithm>
#include <cstring>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/links/peer_links.h"
#include "engine/report/failure_text.h"
#include "transport/striped_link.h"

namespace pycomm {

OutPort& PeerLinks::portTo(int peer) {
  std::unique_ptr<OutPort>& port = out_[static_cast<size_t>(peer)];
  if (port != nullptr && port->state() == OutPort::State::Broken && !port->needed) { // it broke when nothing needed it
    forget(peer);
  }
  if (port != nullptr) {
    return *port;
  }
  PortOwner& self = *this;
  try {
    std::unique_ptr<SharedLink> through_memory = startShared(peer);
    SharedLink* shared = through_memory.get();
    port = std::make_unique<OutPort>(self, peer, shared != nullptr ? std::move(through_memory) : startLink(peer));
    port->shared = shared;
  } catch (const Error& error) {
    if (error.record().code != ErrorCode::ConnectFailed) {
      throw;
    }
    throw Error(peerGone(peer, error.record(), identity_)); // adds who and where
  }
  if (port->shared != nullptr) {
    shared_out_.push_back(port.get());
  } else if (options_.connect) {
    writeHello(*port);
  }
  try {
    watch(*port);
  } catch (...) { // what is queued on a link that nobody watches never leaves
    forget(peer);
    throw;
  }
  return *port;
}

std::unique_ptr<Link> PeerLinks::startLink(int peer) {
  if (options_.connect) {
    return options_.connect(peer);
  }
  return connector_.startBulk(peer);
}

// A simulator's links carry the Hello themselves; others are greeted when they connect.
void PeerLinks::writeHello(OutPort& port) {
  PYCOMM_FAULT_POINT("hello.send");
  const std::string bytes = encodeHello(identity_.hello(LinkPurpose::Bulk));
  OutFrame frame;
  std::memcpy(static_cast<void*>(&frame.header), bytes.data(), sizeof frame.header);
  frame.staging = staging_.take(bytes.size() - sizeof frame.header);
  std::memcpy(frame.staging.view().ptr, bytes.data() + sizeof frame.header, frame.staging.view().nbytes);
  frame.payload = frame.staging.view();
  port.channel.push(std::move(frame));
}

// Null if there is no memory for it, or an earlier link has used it: then bytes to this peer go by TCP.
std::unique_ptr<SharedLink> PeerLinks::startShared(int peer) {
  if (within_host_ != WithinHost::Rings || !rings_->holds(peer)) {
    return nullptr;
  }
  try {
    PYCOMM_FAULT_POINT("ring.commit");
    rings_->commit(identity_.rank, peer);
  } catch (const Error& error) {
    within_host_ = WithinHost::Tcp; // logged once
    log(LogLevel::Info,
        "group " + identity_.name + ": what rank " + std::to_string(identity_.rank) +
            " sends within its host goes by TCP from now on, but for what collectives share: " +
            error.record().summary);
    return nullptr;
  }
  if (!ring_links_.insert(peer).second) {
    return nullptr; // see portTo(): the first one broke
  }
  return std::make_unique<SharedLink>(
      connector_.startBell(peer),
      SharedLink::Rings{rings_->arena, rings_->between(identity_.rank, peer), std::nullopt},
      SharedLink::State::Connecting);
}

void PeerLinks::shareRings(HostRings rings) {
  rings_ = std::move(rings);
  within_host_ = WithinHost::Undecided;
}

void PeerLinks::useRings(bool all_have_them) {
  within_host_ = all_have_them ? WithinHost::Rings : WithinHost::Tcp;
  for (Undecided& each : std::exchange(undecided_, {})) {
    queue(each.peer, std::move(each.frame), each.needed);
  }
}

void PeerLinks::forget(int peer) noexcept {
  std::unique_ptr<OutPort>& port = out_[static_cast<size_t>(peer)];
  shared_out_.erase(std::remove(shared_out_.begin(), shared_out_.end(), port.get()), shared_out_.end());
  to_flush_.erase(std::remove(to_flush_.begin(), to_flush_.end(), port.get()), to_flush_.end());
  port = nullptr;
}

void PeerLinks::adopt(int peer, std::unique_ptr<Link> link, int stream) {
  if (isOpened(peer) || stream >= identity_.streams) {
    return; // a second connection of one rank is no peer of ours: drop it
  }
  if (identity_.streams > 1) {
    std::vector<std::unique_ptr<Link>>& streams = arriving_[peer];
    streams.resize(static_cast<size_t>(identity_.streams));
    if (streams[static_cast<size_t>(stream)] == nullptr) {
      streams[static_cast<size_t>(stream)] = std::move(link);
    }
    if (std::find(streams.begin(), streams.end(), nullptr) != streams.end()) {
      return;
    }
    std::vector<StripedLink::Part> parts;
    for (std::unique_ptr<Link>& one : streams) {
      parts.push_back({std::move(one), identity_.interfaceOf(static_cast<int>(parts.size()))});
    }
    arriving_.erase(peer);
    link = std::make_unique<StripedLink>(std::move(parts), StripedLink::State::Connected);
  }
  readFrom(peer, std::move(link), nullptr);
}

void PeerLinks::adoptShared(int peer, std::unique_ptr<Link> bell) {
  if (isOpened(peer)) {
    return;
  }
  if (!rings_ || !rings_->holds(peer) || peer == identity_.rank) {
    throw Error(
        ErrorCode::ProtocolViolation,
        "rank " + std::to_string(peer) + " would send through memory that it does not share with this rank");
  }
  auto link = std::make_unique<SharedLink>(
      std::move(bell), SharedLink::Rings{rings_->arena, std::nullopt, rings_->between(peer, identity_.rank)});
  SharedLink* const shared = link.get();
  readFrom(peer, std::move(link), shared);
}

void PeerLinks::readFrom(int peer, std::unique_ptr<Link> link, SharedLink* shared) {
  std::unique_ptr<InPort>& port = in_[static_cast<size_t>(peer)];
  PortOwner& self = *this;
  port = std::make_unique<InPort>(self, peer, std::move(link), owner_, options_.read_buffer_nbytes);
  port->shared = shared;
  if (shared != nullptr) {
    shared_in_.push_back(port.get());
  }
  watch(*port);
  read(*port);
}

} // namespace pycomm
