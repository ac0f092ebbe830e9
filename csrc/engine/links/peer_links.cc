// Bulk links: what moves on them, and how they end.
#include "engine/links/peer_links.h"

#include <sys/epoll.h>

#include <algorithm>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/report/failure_text.h"

namespace pycomm {

PeerLinks::PeerLinks(
    const GroupIdentity& identity,
    const Options& options,
    Loop& loop,
    StagingPool& staging,
    Owner& owner)
    : identity_(identity),
      options_(options),
      loop_(loop),
      staging_(staging),
      owner_(owner),
      connector_(identity_),
      out_(static_cast<size_t>(identity_.size)),
      in_(static_cast<size_t>(identity_.size)) {}

PeerLinks::~PeerLinks() {
  stop();
}

void PeerLinks::onPortReady(int peer, bool outgoing, uint32_t events) {
  onBehalfOf(peer, [&] {
    if (!outgoing) {
      read(*in_[static_cast<size_t>(peer)]);
      return;
    }
    OutPort& port = *out_[static_cast<size_t>(peer)];
    if (port.connected() && (events & (EPOLLERR | EPOLLHUP)) != 0) {
      broke(port, Error(ErrorCode::ConnectionReset, "the connection was reset"));
      return;
    }
    if (port.connected() && port.shared != nullptr) {
      port.reader_gone = port.shared->hearBell();
    }
    writeReady(port);
  });
}

// ---- writing

void PeerLinks::send(int peer, OutFrame frame) {
  queue(peer, std::move(frame), true);
}

void PeerLinks::ask(int peer, OutFrame question) {
  try {
    queue(peer, std::move(question), false);
  } catch (const Error& error) {
    askFailed(peer, error);
  }
}

void PeerLinks::askFailed(int peer, const Error& error) {
  if (cannot_ask_.insert(peer).second) {
    log(LogLevel::Info,
        "group " + identity_.name + ": rank " + std::to_string(peer) +
            " cannot be asked what it waits in: " + error.record().summary);
  }
}

void PeerLinks::queue(int peer, OutFrame frame, bool needed) {
  if (within_host_ == WithinHost::Undecided && rings_->holds(peer)) { // a link that is opened now would be TCP for good
    undecided_.push_back(Undecided{peer, std::move(frame), needed});
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

bool PeerLinks::flush() {
  if (to_flush_.empty()) {
    return false;
  }
  OutPort& port = *to_flush_.back();
  to_flush_.pop_back();
  port.to_flush = false;
  flush(port);
  return true;
}

void PeerLinks::flush(OutPort& port) {
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
  watch(port);
  owner_.onSent(sent);
  if (port.state() == OutPort::State::Closing && port.channel.empty()) {
    port.become(OutPort::State::Ended);
    unwatch(port.watched);
    port.link->shutdownWrite();
    if (!isClosing()) {
      owner_.onGoodbyesSaid();
    }
  }
}

void PeerLinks::writeReady(OutPort& port) {
  if (port.state() == OutPort::State::Connecting) {
    try {
      if (!port.link->finishConnect()) {
        watch(port);
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

void PeerLinks::broke(OutPort& port, const Error& error) {
  const OutPort::State before = port.state();
  port.become(OutPort::State::Broken);
  unwatch(port.watched);
  const ErrorCode code = error.record().code;
  if (!port.needed && (before == OutPort::State::Connecting || code != ErrorCode::ProtocolViolation)) {
    askFailed(port.peer, error);
  } else if (
      before == OutPort::State::Connecting && code != ErrorCode::ConnectFailed && code != ErrorCode::ConnectionReset) {
    owner_.onThrown(port.peer, std::make_exception_ptr(Error(refusedBy(port.peer, error.record(), identity_))));
  } else if (code == ErrorCode::ProtocolViolation) { // this peer's, whichever peer the loop's turn was for
    owner_.onThrown(port.peer, std::make_exception_ptr(error));
  } else {
    owner_.onWritingBroke(port.peer, error);
  }
  if (before == OutPort::State::Closing && !isClosing()) {
    owner_.onGoodbyesSaid();
  }
}

// ---- reading

bool PeerLinks::read(InPort& port) {
  if (port.ended) {
    return false;
  }
  bool open = true;
  std::optional<Error> broken;
  try {
    open = port.channel.read();
    if (open) {
      watch(port);
    }
  } catch (const Error& error) {
    if (error.record().code != ErrorCode::ConnectionReset) {
      endReading(
          port); // in the middle of a frame: its rest would be taken for a header, and its sender for the culprit
      throw;
    }
    broken = error;
    open = false;
  } catch (...) {
    endReading(port);
    throw;
  }
  if (!open && !port.ended) {
    endReading(port);
    owner_.onReadingEnded(port.peer, broken ? *broken : Error(ErrorCode::ConnectionReset, "the connection was closed"));
  }
  return !open || port.channel.moved();
}

void PeerLinks::endReading(int peer) noexcept {
  endReading(*in_[static_cast<size_t>(peer)]);
}

void PeerLinks::endReading(InPort& port) noexcept {
  port.ended = true;
  unwatch(port.watched);
}

Loop::Ticker::Look PeerLinks::look(const std::vector<int>& peers) {
  Loop::Ticker::Look looked = Loop::Ticker::Look::Nothing;
  for (const int peer : peers) {
    if (!isReading(peer)) {
      continue;
    }
    looked = Loop::Ticker::Look::NotYet;
    InPort& port = *in_[static_cast<size_t>(peer)];
    if (port.shared != nullptr) {
      continue; // see pollShared()
    }
    bool moved = false;
    onBehalfOf(peer, [&] { moved = read(port); });
    if (moved) {
      return Loop::Ticker::Look::Moved;
    }
  }
  return looked;
}

bool PeerLinks::pollShared() {
  bool moved = false;
  for (size_t i = 0; i < shared_in_.size(); ++i) { // reading may open another one
    InPort& port = *shared_in_[i];
    if (!port.ended && port.shared->canRead()) {
      onBehalfOf(port.peer, [&] { read(port); });
      moved = true;
    }
  }
  for (size_t i = 0; i < shared_out_.size(); ++i) {
    OutPort& port = *shared_out_[i];
    if (port.waitsForRoom() && port.shared->canWrite()) {
      onBehalfOf(port.peer, [&] { flush(port); });
      moved = true;
    }
  }
  return moved;
}

bool PeerLinks::restShared() noexcept {
  for (InPort* port : shared_in_) {
    if (!port->ended && !port->shared->readSleeps()) {
      return false;
    }
  }
  for (OutPort* port : shared_out_) {
    if (port->waitsForRoom() && !port->shared->writeSleeps()) {
      return false;
    }
  }
  return true;
}

// ---- the end

void PeerLinks::stopTouchingMemory() noexcept {
  undecided_.clear();
  for (const auto& port : out_) {
    if (port != nullptr) {
      port->channel.stopTouchingMemory();
    }
  }
  for (const auto& port : in_) {
    if (port != nullptr) {
      port->channel.stopTouchingMemory();
    }
  }
}

bool PeerLinks::sayGoodbyes() noexcept {
  bool said = false;
  for (const auto& port : out_) {
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
    unwatch(port->watched); // nothing was said to this peer, so no goodbye need follow
    port->become(OutPort::State::Broken);
  }
  return said;
}

void PeerLinks::sayGoodbye(OutPort& port) {
  if (!port.channel.cutShort()) {
    OutFrame frame;
    frame.header.type = FrameType::Goodbye;
    frame.header.group = identity_.hash;
    frame.header.epoch = identity_.epoch;
    port.channel.push(std::move(frame));
  }
  port.become(OutPort::State::Closing);
  flush(port);
}

bool PeerLinks::isClosing() const noexcept {
  return std::any_of(out_.begin(), out_.end(), [](const std::unique_ptr<OutPort>& port) {
    return port != nullptr && port->state() == OutPort::State::Closing;
  });
}

void PeerLinks::stop() noexcept {
  to_flush_.clear();
  for (const auto& port : out_) {
    if (port != nullptr) {
      unwatch(port->watched);
      port->become(OutPort::State::Broken);
    }
  }
  for (const auto& port : in_) {
    if (port != nullptr) {
      endReading(*port);
    }
  }
}

// ---- what the loop watches

// Of a shared link always: the peer's end must be noticed, and bytes of its bell must not pile up.
uint32_t PeerLinks::writeEvents(const OutPort& port) const noexcept {
  const auto events = static_cast<uint32_t>(port.link->roomEvent());
  if (port.shared != nullptr) {
    return port.reader_gone ? 0U : events;
  }
  return port.state() == OutPort::State::Open ? 0U : events;
}

// The loop watches the connection that the link goes on with.
void PeerLinks::watch(OutPort& port) {
  const int fd = port.link->writeFd();
  const uint32_t events = writeEvents(port);
  if (fd == port.watched && events == port.watched_events) {
    return;
  }
  if (fd != port.watched) {
    unwatch(port.watched);
  }
  loop_.watch(fd, events, port);
  port.watched = fd;
  port.watched_events = events;
}

void PeerLinks::watch(InPort& port) {
  const int fd = port.link->readFd();
  if (fd != port.watched && !port.ended) {
    unwatch(port.watched);
    loop_.watch(fd, EPOLLIN, port);
    port.watched = fd;
  }
}

void PeerLinks::unwatch(int& watched) noexcept {
  if (watched >= 0) {
    loop_.unwatch(std::exchange(watched, -1));
  }
}

std::string PeerLinks::readsFrom(int peer) const {
  return isOpened(peer) ? in_[static_cast<size_t>(peer)]->link->readsFrom() : "";
}

std::string PeerLinks::writesTo(int peer) const {
  const std::unique_ptr<OutPort>& port = out_[static_cast<size_t>(peer)];
  return port != nullptr ? port->link->writesTo() : "";
}

} // namespace pycomm
