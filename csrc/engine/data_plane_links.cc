// The data plane's links: how they open, what breaks them, how they close.
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "engine/data_plane.h"
#include "engine/failure_text.h"

namespace pycomm {
namespace {

// After a link breaks, how long to wait for the peer's goodbye on another one before it counts as dead. The one on
// the control link is said kGoodbyeMs after those on bulk links.
constexpr int kSuspicionMs = 40;
// Closing: how long to wait after a goodbye for the peer to read it.
constexpr int kGoodbyeMs = 20;
// Closing: how long to wait for room to say it, where the peer has yet to read what came before.
constexpr int kLastWordsMs = 1500;
// After a failure, how long bulk links stay open at the least.
constexpr int kNewsMs = 50;
// Operations that expect more than this are not looked for.
constexpr int64_t kLookNbytes = 256 << 10;
// Nor is any where more than this are under way.
constexpr size_t kLookOperations = 64;

} // namespace

void DataPlane::push(int peer, OutFrame frame) {
  if (failure_ || closing_) {
    return;
  }
  if (peer == identity_.rank) {
    to_self_.push_back(std::move(frame));
    return;
  }
  if (within_host_ == WithinHost::Undecided && rings_->holds(peer)) { // a link that is opened now would be TCP for good
    early_.emplace_back(peer, std::move(frame));
    return;
  }
  OutPort& port = portTo(peer);
  PYCOMM_FAULT_POINT("frame.queued");
  port.only_asks = port.only_asks && isQuestion(frame.header);
  port.channel.push(std::move(frame));
  if (!port.dirty && !port.waits_for_room) {
    port.dirty = true;
    dirty_.push_back(&port);
  }
}

void DataPlane::flushDirty() {
  while ((!dirty_.empty() || !to_self_.empty()) && !failure_) {
    if (!to_self_.empty()) {
      deliverToSelf();
      continue;
    }
    OutPort* port = dirty_.back();
    dirty_.pop_back();
    port->dirty = false;
    flush(*port);
  }
}

void DataPlane::flush(OutPort& port) {
  if (port.broken || !port.connected) {
    return;
  }
  std::vector<OutFrame> sent;
  bool left = false;
  try {
    left = port.channel.flush(sent);
  } catch (const Error& error) {
    port.broken = true;
    unwatch(port.watched);
    if (error.record().code == ErrorCode::ProtocolViolation) {
      report(port.peer, std::current_exception()); // whoever's turn it was: frames of others are flushed in it, too
    } else {
      portBroke(port, error);
    }
    endIfSaid(port);
    return;
  }
  port.waits_for_room = left;
  watch(port, writeEvents(port, left));
  for (OutFrame& frame : sent) {
    PYCOMM_FAULT_POINT("frame.written");
    const auto found = frame.step < 0 ? transfers_.end() : transfers_.find(frame.header.op_id);
    if (found != transfers_.end()) {
      found->second->sent(static_cast<uint32_t>(frame.step));
      settle(frame.header.op_id);
    }
  }
  endIfSaid(port);
  act();
}

void DataPlane::writeReady(OutPort& port) {
  if (!port.connected) {
    try {
      if (!port.link->finishConnect()) {
        watch(port, writeEvents(port, true));
        return;
      }
    } catch (const Error& error) {
      port.broken = true;
      unwatch(port.watched);
      if (port.only_asks || error.record().code == ErrorCode::ConnectFailed ||
          error.record().code == ErrorCode::ConnectionReset) {
        portBroke(port, error);
      } else {
        report(port.peer, std::make_exception_ptr(Error(refusedBy(port.peer, error.record(), identity_))));
      }
      return;
    }
    port.connected = true;
  }
  flush(port);
}

bool DataPlane::readPort(InPort& port) {
  if (port.ended || failure_) {
    return false;
  }
  // In the middle of a frame what follows would be taken for a header, and its sender for the culprit.
  const auto stopReading = [&] {
    port.ended = true;
    unwatch(port.watched);
  };
  bool open = true;
  std::optional<Error> broken;
  try {
    open = port.channel.read();
    if (open) {
      watch(port);
    }
  } catch (const Error& error) {
    if (error.record().code != ErrorCode::ConnectionReset) {
      stopReading();
      throw;
    }
    broken = error;
    open = false;
  } catch (...) {
    stopReading();
    throw;
  }
  if (!open && !port.ended) {
    endReading(port);
    if (left_[static_cast<size_t>(port.peer)] && lost_.count(port.peer) == 0) {
      peerLeft(port.peer);
    } else {
      linkBroke(port.peer, broken ? *broken : Error(ErrorCode::ConnectionReset, "the connection was closed"), false);
    }
  }
  return !open || port.channel.moved();
}

// Only small operations: a large one's bytes are better read when many have come.
Loop::Ticker::Look DataPlane::look() {
  looked_.clear(); // reading may change transfers_
  bool polled = false;
  if (transfers_.size() > kLookOperations) {
    return Look::Nothing; // looking for so many costs more than asking the kernel
  }
  for (const auto& entry : transfers_) {
    if (entry.second->bytesExpected() > kLookNbytes) {
      continue;
    }
    for (const Edge& edge : entry.second->incoming()) {
      const std::unique_ptr<InPort>& port = in_[static_cast<size_t>(edge.peer)];
      if (port == nullptr || port->ended || !entry.second->needsFrom(edge.peer)) {
        continue;
      }
      if (port->shared != nullptr) {
        polled = true; // see pollShared()
      } else {
        looked_.push_back(edge.peer);
      }
    }
  }
  for (int peer = 0; !unmatched_.empty() && peer < identity_.size; ++peer) {
    const std::unique_ptr<InPort>& port = in_[static_cast<size_t>(peer)];
    if (port != nullptr && !port->ended && point_to_point_.waitingFor(peer) != 0) {
      if (port->shared != nullptr) {
        polled = true;
      } else {
        looked_.push_back(peer);
      }
    }
  }
  for (const int peer : looked_) {
    bool moved = false;
    guarded(peer, [&] { moved = readPort(*in_[static_cast<size_t>(peer)]); });
    if (moved) {
      return Look::Moved;
    }
  }
  return looked_.empty() && !polled ? Look::Nothing : Look::NotYet;
}

// A link on which nothing but questions went is not missed.
void DataPlane::portBroke(OutPort& port, const Error& error) {
  if (port.only_asks) {
    askFailed(port.peer, error);
  } else {
    linkBroke(port.peer, error, true);
  }
}

void DataPlane::linkBroke(int peer, const Error& error, bool may_be_orderly) {
  if (isOwnTrouble(error.record().code)) { // no memory, no descriptors: the peer has nothing to do with it
    notice(ownTrouble(std::make_exception_ptr(error), identity_));
    return;
  }
  ErrorRecord record = peerGone(peer, error.record(), identity_);
  if (record.cause.empty()) {
    record.cause = error.record().summary;
  }
  if (!may_be_orderly) {
    notice(std::move(record));
  } else if (left_[static_cast<size_t>(peer)] && lost_.count(peer) == 0) {
    peerLeft(peer); // what is queued for it will not leave
  } else {
    suspicions_.emplace(
        peer, Suspicion{std::move(record), Clock::now() + std::chrono::milliseconds(kSuspicionMs), false});
  }
}

void DataPlane::onPortReady(int peer, bool outgoing, uint32_t events) {
  guarded(peer, [&] {
    if (!outgoing) {
      readPort(*in_[static_cast<size_t>(peer)]);
      return;
    }
    OutPort& port = *out_[static_cast<size_t>(peer)];
    if (port.connected && (events & (EPOLLERR | EPOLLHUP)) != 0) {
      port.broken = true;
      unwatch(port.watched);
      portBroke(port, Error(ErrorCode::ConnectionReset, "the connection was reset"));
      endIfSaid(port);
      return;
    }
    if (port.connected && port.shared != nullptr) {
      port.reader_gone = port.shared->hearBell();
    }
    writeReady(port);
  });
}

void DataPlane::peerLeft(int peer) {
  left_[static_cast<size_t>(peer)] = true;
  lost_.erase(peer);
  suspicions_.erase(peer);
  for (const auto& entry : transfers_) {
    missLeft(peer, *entry.second);
  }
  missMessagesOf(peer);
  missSenders(peer);
}

// A goodbye on the control link overtakes what the peer wrote on its bulk link: only where that has ended nothing
// more will come.
void DataPlane::missLeft(int peer, const Transfer& transfer) {
  const std::unique_ptr<InPort>& port = in_[static_cast<size_t>(peer)];
  const auto lost = lost_.find(peer);
  if (lost != lost_.end() && transfer.owes(peer)) {
    notice(lost->second); // it is still there: what broke is the link
  } else if (transfer.owes(peer) || (transfer.needsFrom(peer) && port != nullptr && port->ended)) {
    notice(peerLeftUs(peer, transfer.operation(), identity_));
  } else if (transfer.needsFrom(peer) && port == nullptr) {
    suspicions_.emplace(
        peer,
        Suspicion{
            peerLeftUs(peer, transfer.operation(), identity_),
            Clock::now() + std::chrono::milliseconds(kLastLinkMs),
            true});
  }
}

void DataPlane::endReading(InPort& port) noexcept {
  port.ended = true;
  unwatch(port.watched);
}

// Everything that holds a view of an operation's memory lets go of it: frames on their way out, to other ranks and to this one, and the
// places that arriving payloads go to. Links stay open, so that goodbyes are still sent and read. Operations may end only after this.
void DataPlane::stopTouchingMemory() noexcept {
  to_self_.clear();
  early_.clear();
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

void DataPlane::stopPorts() noexcept {
  dirty_.clear();
  for (const auto& port : out_) {
    if (port != nullptr) {
      unwatch(port->watched);
      port->broken = true;
    }
  }
  for (const auto& port : in_) {
    if (port != nullptr) {
      unwatch(port->watched);
      port->ended = true;
    }
  }
}

void DataPlane::close(const ErrorRecord& reason, std::function<void()> closed) noexcept {
  if (!failure_) {
    const Operation* const message = oldestMessage();
    try {
      if (!transfers_.empty()) {
        notice(leftInTheMiddle(transfers_.begin()->second->operation(), identity_));
      } else if (message != nullptr && message->request().peer != PointToPoint::kAnyRank) {
        notice(leftInTheMiddle(*message, identity_));
      }
    } catch (...) { // no memory to say so: the others find that this rank has left
    }
  }
  closing_ = recordInAnyCase(identity_, [&] { return reason; });
  closed_ = std::move(closed);
  close_at_ = Clock::now();
  if (failure_) {
    // News travels over other ranks' control links; a link that ends before it has arrived looks like a death.
    close_at_ = std::max(close_at_, failed_at_ + std::chrono::milliseconds(kNewsMs));
    return;
  }
  stopTouchingMemory();
  endAll([&](const Operation& operation, const Transfer*) { return errorOf(operation, reason, identity_); });
  for (const auto& port : out_) {
    if (port == nullptr || port->broken) {
      continue;
    }
    if (port->connected) {
      try {
        sayGoodbye(*port);
        continue;
      } catch (...) { // no memory for it: the goodbye on the control link is enough
        port->says_goodbye = false;
      }
    }
    unwatch(port->watched); // nothing was said to this peer, so no goodbye need follow
    port->broken = true;
  }
}

void DataPlane::sayGoodbye(OutPort& port) {
  if (!port.channel.cutShort()) {
    OutFrame frame;
    frame.header.type = FrameType::Goodbye;
    frame.header.group = identity_.hash;
    frame.header.epoch = identity_.epoch;
    port.channel.push(std::move(frame));
  }
  port.says_goodbye = true;
  close_at_ = Clock::now() + std::chrono::milliseconds(kLastWordsMs);
  flush(port);
}

void DataPlane::endIfSaid(OutPort& port) {
  if (!port.says_goodbye || !(port.broken || port.channel.empty())) {
    return;
  }
  port.says_goodbye = false;
  if (!port.broken) {
    port.link->shutdownWrite();
  }
  const bool more = std::any_of(out_.begin(), out_.end(), [](const std::unique_ptr<OutPort>& other) {
    return other != nullptr && other->says_goodbye;
  });
  if (!more) {
    close_at_ = Clock::now() + std::chrono::milliseconds(kGoodbyeMs);
  }
}

} // namespace pycomm
