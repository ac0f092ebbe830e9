// What the data plane's links are made of: a connection, or several that take a rank's interfaces by turns.
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fault_point.h"
#include "engine/data_plane.h"
#include "engine/failure_text.h"
#include "transport/greeted_link.h"
#include "transport/striped_link.h"

namespace pycomm {

OutPort& DataPlane::portTo(int peer) {
  std::unique_ptr<OutPort>& port = out_[static_cast<size_t>(peer)];
  if (port != nullptr && port->broken && port->only_asks) { // it broke when nothing needed it
    shared_out_.erase(std::remove(shared_out_.begin(), shared_out_.end(), port.get()), shared_out_.end());
    dirty_.erase(std::remove(dirty_.begin(), dirty_.end(), port.get()), dirty_.end());
    port = nullptr;
  }
  if (port == nullptr) {
    try {
      std::unique_ptr<SharedLink> through_memory = startShared(peer);
      SharedLink* shared = through_memory.get();
      port = std::make_unique<OutPort>(*this, peer, shared != nullptr ? std::move(through_memory) : startLink(peer));
      port->shared = shared;
    } catch (const Error& error) {
      if (error.record().code != ErrorCode::ConnectFailed) {
        throw;
      }
      throw Error(peerGone(peer, error.record(), identity_)); // adds who and where
    }
    port->waits_for_room = true;
    if (port->shared != nullptr) {
      shared_out_.push_back(port.get());
    } else if (options_.connect) {
      writeHello(*port);
    }
    watch(*port, writeEvents(*port, true));
  }
  return *port;
}

std::unique_ptr<Link> DataPlane::startLink(int peer) {
  if (options_.connect) {
    return options_.connect(peer);
  }
  if (identity_.streams > 1) {
    return startStreams(peer);
  }
  return std::make_unique<GreetedLink>(
      identity_.local_address, identity_.addresses[static_cast<size_t>(peer)], identity_.hello(LinkPurpose::Bulk));
}

// A simulator's links carry the Hello themselves; others are greeted when they connect.
void DataPlane::writeHello(OutPort& port) {
  PYCOMM_FAULT_POINT("hello.send");
  const std::string bytes = encodeHello(identity_.hello(LinkPurpose::Bulk));
  OutFrame frame;
  std::memcpy(&frame.header, bytes.data(), sizeof frame.header);
  frame.staging = staging_.take(bytes.size() - sizeof frame.header);
  std::memcpy(frame.staging.view().ptr, bytes.data() + sizeof frame.header, frame.staging.view().nbytes);
  frame.payload = frame.staging.view();
  port.channel.push(std::move(frame));
}

const std::string& DataPlane::interfaceOf(int stream) const noexcept {
  const size_t path = static_cast<size_t>(stream) % (identity_.further.size() + 1);
  return path == 0 ? identity_.interface_name : identity_.further[path - 1].interface_name;
}

std::unique_ptr<Link> DataPlane::startStreams(int peer) const {
  std::vector<StripedLink::Part> parts;
  for (int stream = 0; stream < identity_.streams; ++stream) {
    const size_t path = static_cast<size_t>(stream) % (identity_.further.size() + 1);
    const SocketAddress& local = path == 0 ? identity_.local_address : identity_.further[path - 1].local_address;
    const auto& addresses = path == 0 ? identity_.addresses : identity_.further[path - 1].addresses;
    Hello hello = identity_.hello(LinkPurpose::Bulk);
    hello.stream = static_cast<uint8_t>(stream);
    StripedLink::Part part;
    part.interface_name = interfaceOf(stream);
    try {
      part.link = std::make_unique<GreetedLink>(local, addresses[static_cast<size_t>(peer)], hello);
    } catch (const Error& error) {
      ErrorRecord record = error.record();
      record.summary += ", on " + part.interface_name;
      throw Error(record);
    }
    parts.push_back(std::move(part));
  }
  return std::make_unique<StripedLink>(std::move(parts), StripedLink::State::Connecting);
}

void DataPlane::adopt(int peer, std::unique_ptr<Link> link, int stream) {
  guarded(peer, [&] {
    std::unique_ptr<InPort>& port = in_[static_cast<size_t>(peer)];
    if (failure_ || closing_ || port != nullptr || stream >= identity_.streams) {
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
        parts.push_back({std::move(one), interfaceOf(static_cast<int>(parts.size()))});
      }
      arriving_.erase(peer);
      link = std::make_unique<StripedLink>(std::move(parts), StripedLink::State::Connected);
    }
    readFrom(peer, std::move(link), nullptr);
  });
}

void DataPlane::adoptShared(int peer, std::unique_ptr<Link> link) {
  guarded(peer, [&] {
    if (failure_ || closing_ || in_[static_cast<size_t>(peer)] != nullptr) {
      return;
    }
    std::unique_ptr<SharedLink> shared = acceptShared(peer, std::move(link));
    SharedLink* const same = shared.get();
    readFrom(peer, std::move(shared), same);
  });
}

void DataPlane::readFrom(int peer, std::unique_ptr<Link> link, SharedLink* shared) {
  std::unique_ptr<InPort>& port = in_[static_cast<size_t>(peer)];
  port = std::make_unique<InPort>(*this, peer, std::move(link), *this, options_.read_buffer_nbytes);
  port->shared = shared;
  if (shared != nullptr) {
    shared_in_.push_back(port.get());
  }
  watch(*port);
  readPort(*port);
}

// The loop watches the connection that the link goes on with.
void DataPlane::watch(OutPort& port, uint32_t events) {
  const int fd = port.link->writeFd();
  if (fd == port.watched && events == port.watched_events) {
    return;
  }
  if (fd != port.watched) {
    unwatch(port.watched);
  }
  lane_.watch(fd, events, port);
  port.watched = fd;
  port.watched_events = events;
}

void DataPlane::watch(InPort& port) {
  const int fd = port.link->readFd();
  if (fd != port.watched && !port.ended) {
    unwatch(port.watched);
    lane_.watch(fd, EPOLLIN, port);
    port.watched = fd;
  }
}

void DataPlane::unwatch(int& watched) noexcept {
  if (watched >= 0) {
    lane_.unwatch(std::exchange(watched, -1));
  }
}

} // namespace pycomm
