#include "engine/links/out_links.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/report/failure_text.h"

namespace pycomm {

OutLinks::OutLinks(
    const GroupIdentity& identity,
    const Connect& connect,
    Loop& loop,
    StagingPool& staging,
    LinkOwner& owner,
    std::vector<PeerLink>& peers)
    : identity_(identity),
      connect_(connect),
      loop_(loop),
      staging_(staging),
      owner_(owner),
      connector_(identity_),
      route_(identity_),
      peers_(peers) {}

OutLinks::~OutLinks() {
  stop();
  for (PeerLink& peer : peers_) {
    peer.out = nullptr;
  }
}

// ---- how links open

OutPort& OutLinks::portTo(int peer) {
  std::unique_ptr<OutPort>& port = peers_[static_cast<size_t>(peer)].out;
  if (port != nullptr && port->state() == OutPort::State::Broken && !port->needed) { // it broke when nothing needed it
    forget(peer);
  }
  if (port != nullptr) {
    return *port;
  }
  try {
    port = startPort(peer);
  } catch (const Error& error) {
    if (error.record().code != ErrorCode::ConnectFailed) {
      throw;
    }
    throw Error(peerGone(peer, error.record(), identity_)); // adds who and where
  }
  if (port->shared != nullptr) {
    shared_.push_back(port.get());
  } else if (connect_) {
    writeHello(*port);
  }
  try {
    port->watch(loop_);
  } catch (...) { // what is queued on a link that nobody watches never leaves
    forget(peer);
    throw;
  }
  if (!connect_) {
    next_look_ = std::min(next_look_, Clock::now() + SlowWait::kFirst);
  }
  return *port;
}

std::unique_ptr<OutPort> OutLinks::startPort(int peer) {
  PortOwner& self = *this;
  if (std::optional<SharedLink::Rings> rings = route_.take(peer, peers_[static_cast<size_t>(peer)].ring_used)) {
    auto link =
        std::make_unique<SharedLink>(connector_.startBell(peer), std::move(*rings), SharedLink::State::Connecting);
    SharedLink* const shared = link.get();
    auto port = std::make_unique<OutPort>(self, peer, std::move(link));
    port->shared = shared;
    return port;
  }
  return std::make_unique<OutPort>(self, peer, connect_ ? connect_(peer) : connector_.startBulk(peer));
}

// A simulator's links carry the Hello themselves; others are greeted when they connect.
void OutLinks::writeHello(OutPort& port) {
  PYCOMM_FAULT_POINT("hello.send");
  const std::string bytes = encodeHello(identity_.hello(LinkPurpose::Bulk));
  OutFrame frame;
  std::memcpy(static_cast<void*>(&frame.header), bytes.data(), sizeof frame.header);
  frame.staging = staging_.take(bytes.size() - sizeof frame.header);
  std::memcpy(frame.staging.view().ptr, bytes.data() + sizeof frame.header, frame.staging.view().nbytes);
  frame.payload = frame.staging.view();
  port.channel.push(std::move(frame));
}

void OutLinks::forget(int peer) noexcept {
  std::unique_ptr<OutPort>& port = peers_[static_cast<size_t>(peer)].out;
  shared_.erase(std::remove(shared_.begin(), shared_.end(), port.get()), shared_.end());
  to_flush_.erase(std::remove(to_flush_.begin(), to_flush_.end(), port.get()), to_flush_.end());
  port = nullptr;
}

void OutLinks::shareRings(HostRings rings) {
  route_.share(std::move(rings));
}

void OutLinks::useRings(bool all_have_them) {
  for (RingRoute::Kept& each : route_.decide(all_have_them)) {
    queue(each.peer, std::move(each.frame), each.needed);
  }
}

void OutLinks::tick(TimePoint now) {
  if (now < next_look_) {
    return;
  }
  next_look_ = TimePoint::max();
  for (const PeerLink& each : peers_) {
    const std::unique_ptr<OutPort>& port = each.out;
    if (port == nullptr || port->state() != OutPort::State::Connecting) {
      continue;
    }
    next_look_ = now + SlowWait::kFirst;
    if (const auto waited_s = port->slow.due(now)) {
      const SocketAddress remote = identity_.endpoints(port->peer).remote;
      log(LogLevel::Warn, stillConnecting(port->peer, remote, *waited_s, "", identity_));
    }
  }
}

// ---- writing

void OutLinks::send(int peer, OutFrame&& frame) {
  queue(peer, std::move(frame), true);
}

void OutLinks::ask(int peer, OutFrame&& question) {
  try {
    queue(peer, std::move(question), false);
  } catch (const Error& error) {
    askFailed(peer, error);
  }
}

void OutLinks::askFailed(int peer, const Error& error) {
  if (!std::exchange(peers_[static_cast<size_t>(peer)].cannot_be_asked, true)) {
    log(LogLevel::Info,
        identity_.text() + ": " + identity_.job.text(peer) +
            " cannot be asked what it waits in: " + error.record().summary);
  }
}

void OutLinks::queue(int peer, OutFrame&& frame, bool needed) {
  if (route_.isUndecided(peer)) {
    route_.keep(peer, std::move(frame), needed);
    return;
  }
  OutPort& port = portTo(peer);
  PYCOMM_FAULT_POINT("frame.queued");
  port.needed = port.needed || needed;
  port.channel.push(std::move(frame));
  if (port.state() == OutPort::State::Open && !port.to_flush) {
    port.to_flush = true;
    to_flush_.push_back(&port);
  }
}

void OutLinks::onPortReady(int peer, uint32_t events) {
  owner_.onBehalfOf(peer, [&] {
    OutPort& port = *peers_[static_cast<size_t>(peer)].out;
    if (port.connected() && (events & (EPOLLERR | EPOLLHUP)) != 0) {
      if (port.link->isReset()) {
        broke(port, Error(ErrorCode::ConnectionReset, "the connection was reset"));
        return;
      }
      // The peer has closed in order, as it does when it leaves. TCP would not report that either: the goodbye on its control
      // link, the end of the link that it opened or the next write says what it means.
      port.stopWatching(loop_);
    }
    if (port.connected() && port.shared != nullptr) {
      port.reader_gone = port.shared->hearBell();
    }
    writeReady(port);
  });
}

bool OutLinks::flush() {
  if (to_flush_.empty()) {
    return false;
  }
  OutPort& port = *to_flush_.back();
  to_flush_.pop_back();
  port.to_flush = false;
  flush(port);
  return true;
}

void OutLinks::flush(OutPort& port) {
  if (!port.connected()) {
    return;
  }
  std::vector<OutFrame> sent;
  bool left = false;
  try {
    left = port.channel.flush(sent);
  } catch (const Error& error) {
    broke(port, error);
    return;
  }
  if (port.state() != OutPort::State::Closing) {
    port.become(left ? OutPort::State::Full : OutPort::State::Open);
  }
  port.watch(loop_);
  owner_.onSent(sent);
  if (port.state() == OutPort::State::Closing && port.channel.empty() && !port.link->unsent()) {
    port.become(OutPort::State::Ended);
    port.unwatch(loop_);
    port.link->shutdownWrite();
    if (!isClosing()) {
      owner_.onGoodbyesSaid();
    }
  }
}

void OutLinks::writeReady(OutPort& port) {
  if (port.state() == OutPort::State::Connecting) {
    try {
      if (!port.link->finishConnect()) {
        port.watch(loop_);
        return;
      }
    } catch (const Error& error) {
      broke(port, error);
      return;
    }
    port.become(OutPort::State::Open);
  }
  flush(port);
}

void OutLinks::broke(OutPort& port, const Error& error) {
  const OutPort::State before = port.state();
  port.become(OutPort::State::Broken);
  port.unwatch(loop_);
  const ErrorCode code = error.record().code;
  if (!port.needed && (before == OutPort::State::Connecting || code != ErrorCode::ProtocolViolation)) {
    askFailed(port.peer, error);
  } else if (
      before == OutPort::State::Connecting && code != ErrorCode::ConnectFailed && code != ErrorCode::ConnectionReset) {
    owner_.onThrown(port.peer, std::make_exception_ptr(Error(refusedBy(port.peer, error.record(), identity_))));
  } else if (code == ErrorCode::ProtocolViolation) { // blames this port's peer, not the one that the loop serves
    owner_.onThrown(port.peer, std::make_exception_ptr(error));
  } else {
    owner_.onWritingBroke(port.peer, error);
  }
  if (before == OutPort::State::Closing && !isClosing()) {
    owner_.onGoodbyesSaid();
  }
}

bool OutLinks::pollShared() {
  bool moved = false;
  for (size_t i = 0; i < shared_.size(); ++i) {
    OutPort& port = *shared_[i];
    if (port.waitsForRoom() && port.shared->canWrite()) {
      owner_.onBehalfOf(port.peer, [&] { flush(port); });
      moved = true;
    }
  }
  return moved;
}

bool OutLinks::restShared() noexcept {
  return std::all_of(shared_.begin(), shared_.end(), [](OutPort* port) {
    return !port->waitsForRoom() || port->shared->writeSleeps();
  });
}

// ---- the end

void OutLinks::stopTouchingMemory() noexcept {
  route_.dropKept();
  for (PeerLink& peer : peers_) {
    if (peer.out != nullptr) {
      peer.out->channel.stopTouchingMemory();
    }
  }
}

bool OutLinks::sayGoodbyes() noexcept {
  bool said = false;
  for (const PeerLink& each : peers_) {
    const std::unique_ptr<OutPort>& port = each.out;
    if (port == nullptr || port->state() == OutPort::State::Broken) {
      continue;
    }
    if (port->connected()) {
      try {
        said = true;
        sayGoodbye(*port);
        continue;
      } catch (...) { // no memory for it: the goodbye on the control link is enough
      }
    }
    port->unwatch(loop_); // nothing was said to this peer, so no goodbye need follow
    port->become(OutPort::State::Broken);
  }
  return said;
}

void OutLinks::sayGoodbye(OutPort& port) {
  if (!port.channel.cutShort()) {
    OutFrame frame;
    frame.header.type = FrameType::Goodbye;
    frame.header.group = identity_.hash;
    frame.header.epoch = identity_.epochOnWire();
    port.channel.push(std::move(frame));
  }
  port.become(OutPort::State::Closing);
  flush(port);
}

bool OutLinks::isClosing() const noexcept {
  return std::any_of(peers_.begin(), peers_.end(), [](const PeerLink& peer) {
    return peer.out != nullptr && peer.out->state() == OutPort::State::Closing;
  });
}

void OutLinks::stop() noexcept {
  to_flush_.clear();
  for (const PeerLink& each : peers_) {
    const std::unique_ptr<OutPort>& port = each.out;
    if (port != nullptr) {
      port->unwatch(loop_);
      port->become(OutPort::State::Broken);
    }
  }
}

} // namespace pycomm
