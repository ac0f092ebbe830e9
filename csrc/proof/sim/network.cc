#include "proof/sim/network.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "proof/sim/sim_link.h"

namespace pycomm::sim {
namespace {
// A retransmission after a blockade.
constexpr Nanos kRetransmission = milliseconds(200);
constexpr Nanos kLinger = milliseconds(20);
} // namespace

Network::Network(Timeline& timeline, Random random, int ranks, const Weather& weather, int first_fd)
    : timeline_(timeline),
      random_(random),
      ranks_(ranks),
      weather_(weather),
      first_fd_(first_fd),
      listeners_(static_cast<size_t>(ranks)),
      blocked_(static_cast<size_t>(ranks) * static_cast<size_t>(ranks)),
      dead_(static_cast<size_t>(ranks), false) {}

int Network::makeConnection(int from, int to, LinkPurpose purpose) {
  auto connection = std::make_unique<Connection>();
  connection->purpose = purpose;
  connection->ends[0].rank = connection->ends[1].peer = from;
  connection->ends[0].peer = connection->ends[1].rank = to;
  for (Pipe& pipe : connection->pipes) {
    // Any kernel accepts a whole Hello at once, and also heartbeats and reports.
    const int64_t least = purpose == LinkPurpose::Control ? 16384 : 256;
    pipe.room = std::max(least, random_.scaled(weather_.room_low, weather_.room_high));
  }
  connections_.push_back(std::move(connection));
  return first_fd_ + static_cast<int>(connections_.size() - 1) * 2;
}

std::unique_ptr<Link> Network::connect(int from, int to) {
  const int fd = makeConnection(from, to, LinkPurpose::Bulk);
  const TimePoint reached = arrival(from, to);
  if (reached != TimePoint::max()) {
    timeline_.at(reached, [this, fd] { finishAccept(fd); });
  }
  return std::make_unique<SimLink>(*this, fd);
}

void Network::finishAccept(int fd) {
  const int from = end(fd).rank;
  const int to = end(fd).peer;
  const TimePoint answered = arrival(to, from);
  const Listener& listener = listeners_[static_cast<size_t>(to)];
  if (!listener || dead_[static_cast<size_t>(to)]) {
    end(fd + 1).closed = true;
    if (answered != TimePoint::max()) {
      timeline_.at(answered, [this, fd] {
        end(fd).refused = true;
        changed(fd);
      });
    }
    return;
  }
  end(fd + 1).connected = true;
  if (answered != TimePoint::max()) {
    timeline_.at(answered, [this, fd] {
      end(fd).connected = true;
      changed(fd);
    });
  }
  listener(std::make_unique<SimLink>(*this, fd + 1));
}

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> Network::pair(int a, int b) {
  const int fd = makeConnection(a, b, LinkPurpose::Control);
  end(fd).connected = end(fd + 1).connected = true;
  return {std::make_unique<SimLink>(*this, fd), std::make_unique<SimLink>(*this, fd + 1)};
}

TimePoint Network::arrival(int from, int to) {
  const TimePoint blocked = blockedUntil(from, to);
  if (blocked == TimePoint::max()) {
    return blocked;
  }
  const Nanos latency(random_.within(weather_.latency_low.count(), weather_.latency_high.count()));
  const TimePoint now = timeline_.now();
  return blocked > now ? blocked + Nanos(random_.below(kRetransmission.count())) + latency : now + latency;
}

void Network::changed(int fd) {
  if (end(fd).watcher != nullptr) {
    end(fd).watcher->changed(fd);
  }
}

void Network::setWatcher(int fd, SimLoop* loop) {
  end(fd).watcher = loop;
}

uint32_t Network::eventsOf(int fd) const {
  const End& here = end(fd);
  if (here.closed) {
    return 0;
  }
  if (here.reset || here.refused) {
    return EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP;
  }
  if (!here.connected) {
    return 0;
  }
  const Pipe& incoming = in(fd);
  const Pipe& outgoing = out(fd);
  uint32_t events = 0;
  if (incoming.arrived > incoming.read || incoming.fin_arrived) {
    events |= EPOLLIN;
  }
  if (outgoing.written - outgoing.acknowledged < outgoing.room) {
    events |= EPOLLOUT;
  }
  if (incoming.fin_arrived && outgoing.fin) {
    events |= EPOLLHUP;
  }
  return events;
}

Progress Network::write(int fd, const ConstBufferView* views, size_t count) {
  const End& here = end(fd);
  Pipe& pipe = out(fd);
  if (here.reset || here.closed || pipe.fin) {
    throw Error(ErrorCode::ConnectionReset, "writing failed on a simulated link");
  }
  Progress progress;
  int64_t wanted = 0;
  for (size_t i = 0; i < count; ++i) {
    wanted += static_cast<int64_t>(views[i].nbytes);
  }
  int64_t left = std::min(wanted, pipe.room - (pipe.written - pipe.acknowledged));
  if (left <= 0) {
    progress.would_block = wanted > 0;
    return progress;
  }
  if (random_.chance(weather_.short_write_percent)) {
    left = random_.within(1, left);
  }
  progress.nbytes = static_cast<size_t>(left);
  for (size_t i = 0; left > 0; ++i) {
    const auto take = std::min(left, static_cast<int64_t>(views[i].nbytes));
    pipe.bytes.insert(pipe.bytes.end(), views[i].ptr, views[i].ptr + take);
    if (observer_ != nullptr) {
      const LinkPurpose purpose = connectionOf(fd).purpose;
      pipe.sent.feed(
          views[i].ptr,
          static_cast<size_t>(take),
          [&](const FrameHeader& header) { observer_->frameSent(here.rank, here.peer, purpose, header); },
          [&](const std::byte* bytes, size_t nbytes) {
            observer_->payloadSent(here.rank, here.peer, purpose, {bytes, nbytes});
          });
    }
    left -= take;
  }
  pipe.written += static_cast<int64_t>(progress.nbytes);
  deliver(fd, pipe.written, false);
  return progress;
}

// Sends bytes up to `upto`; they arrive in order even if their delays differ.
void Network::deliver(int fd, int64_t upto, bool fin) {
  Pipe& pipe = out(fd);
  const TimePoint instant = arrival(end(fd).rank, end(fd).peer);
  if (instant == TimePoint::max()) {
    return; // never: a blockade without end
  }
  const Nanos transfer(static_cast<int64_t>(static_cast<double>(upto - pipe.arrived) * weather_.nanos_per_byte));
  pipe.last_arrival = std::max(pipe.last_arrival, instant + transfer);
  timeline_.at(pipe.last_arrival, [this, fd, upto, fin] {
    Pipe& pipe = out(fd);
    const TimePoint blocked = blockedUntil(end(fd).rank, end(fd).peer);
    if (blocked > timeline_.now()) { // the blockade began while they were in flight
      deliver(fd, upto, fin);
      return;
    }
    if (pipe.lost || (upto <= pipe.arrived && !fin)) {
      return;
    }
    const int64_t from = std::exchange(pipe.arrived, std::max(pipe.arrived, upto));
    End& there = end(fd ^ 1);
    pipe.fin_arrived = pipe.fin_arrived || fin;
    if (there.closed) {
      if (pipe.arrived > from) {
        sendReset(fd ^ 1);
      }
      return;
    }
    if (observer_ != nullptr && pipe.arrived > from) {
      pipe.received.feed(
          pipe.bytes.data() + (from - pipe.base),
          static_cast<size_t>(pipe.arrived - from),
          [&](const FrameHeader& header) {
            observer_->frameArrived(end(fd).rank, end(fd).peer, connectionOf(fd).purpose, header);
          },
          [](const std::byte*, size_t) {}); // the bytes that were sent
    }
    if (there.drains) {
      pipe.read = pipe.arrived;
      if (fin) {
        close(fd ^ 1);
      }
      return;
    }
    changed(fd ^ 1);
  });
}

Progress Network::read(int fd, BufferView into) {
  const End& here = end(fd);
  Pipe& pipe = in(fd);
  Progress progress;
  const int64_t take = std::min(pipe.arrived - pipe.read, static_cast<int64_t>(into.nbytes));
  if (here.closed) {
    throw Error(ErrorCode::ConnectionReset, "reading failed on a simulated link");
  }
  if (take > 0) {
    std::memcpy(into.ptr, pipe.bytes.data() + (pipe.read - pipe.base), static_cast<size_t>(take));
    pipe.read += take;
    progress.nbytes = static_cast<size_t>(take);
    if (pipe.read - pipe.base > 4096 || pipe.read == pipe.written) {
      pipe.bytes.erase(pipe.bytes.begin(), pipe.bytes.begin() + static_cast<std::ptrdiff_t>(pipe.read - pipe.base));
      pipe.base = pipe.read;
    }
    const TimePoint told = arrival(here.rank, here.peer);
    if (told != TimePoint::max()) {
      timeline_.at(told, [this, fd, upto = pipe.read] { acknowledge(fd ^ 1, upto); });
    }
    return progress;
  }
  if (here.reset) {
    throw Error(ErrorCode::ConnectionReset, "reading failed on a simulated link");
  }
  progress.closed = pipe.fin_arrived;
  progress.would_block = !pipe.fin_arrived;
  return progress;
}

void Network::acknowledge(int fd, int64_t upto) {
  Pipe& pipe = out(fd);
  const bool was_full = pipe.written - pipe.acknowledged >= pipe.room;
  pipe.acknowledged = std::max(pipe.acknowledged, upto);
  if (was_full) {
    changed(fd);
  }
}

void Network::shutdown(int fd) {
  Pipe& pipe = out(fd);
  if (!pipe.fin && !end(fd).closed && !end(fd).reset) {
    pipe.fin = true;
    deliver(fd, pipe.written, true);
  }
}

void Network::close(int fd) {
  End& here = end(fd);
  if (here.closed) {
    return;
  }
  const bool unread = in(fd).arrived > in(fd).read;
  if (here.connected && !here.reset) {
    if (unread && !here.drains) {
      sendReset(fd);
    } else {
      shutdown(fd);
    }
  }
  here.closed = true;
}

void Network::drainAndClose(int fd) {
  End& here = end(fd);
  if (here.closed || here.drains) {
    return;
  }
  shutdown(fd);
  here.drains = true;
  in(fd).read = in(fd).arrived;
  timeline_.after(kLinger, [this, fd] { close(fd); });
}

// It may overtake bytes that this end has not sent yet; these are then lost.
void Network::sendReset(int fd) {
  Pipe& pipe = out(fd);
  TimePoint instant = arrival(end(fd).rank, end(fd).peer);
  if (instant == TimePoint::max()) {
    return;
  }
  if (random_.chance(50)) {
    instant = std::max(instant, pipe.last_arrival);
  }
  pipe.last_arrival = std::max(pipe.last_arrival, instant);
  timeline_.at(instant, [this, fd] { becomeReset(fd ^ 1); });
}

void Network::becomeReset(int fd) {
  End& here = end(fd);
  if (here.closed || here.reset) {
    return;
  }
  here.reset = true;
  in(fd).lost = true;
  if (observer_ != nullptr) {
    observer_->linkChanged(here.peer, here.rank, connectionOf(fd).purpose, "is reset");
  }
  changed(fd);
}

// ---- faults of the network, and the connections of a dead process

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
