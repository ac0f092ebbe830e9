#include "engine/data_plane.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "engine/failure_text.h"

namespace pycomm {
namespace {

constexpr size_t kKeepStagingNbytes = 32 << 20;
// After a link breaks, how long to wait for the peer's goodbye on another one before it counts as dead.
constexpr int kSuspicionMs = 20;
// Closing: how long to wait after a goodbye for the peer to read it.
constexpr int kGoodbyeMs = 20;
// After a failure, how long bulk links stay open at the least.
constexpr int kNewsMs = 50;

Protocol::Config protocolConfig(const GroupIdentity& identity) {
  Protocol::Config config;
  config.rank = identity.rank;
  config.size = identity.size;
  config.group = identity.hash;
  config.epoch = identity.epoch;
  config.hosts = identity.hosts;
  return config;
}

} // namespace

DataPlane::DataPlane(GroupIdentity identity, EventLoop& lane, Notice notice)
    : identity_(std::move(identity)),
      lane_(lane),
      notice_(std::move(notice)),
      protocol_(protocolConfig(identity_)),
      staging_(kKeepStagingNbytes),
      out_(static_cast<size_t>(identity_.size)),
      in_(static_cast<size_t>(identity_.size)),
      left_(static_cast<size_t>(identity_.size), false) {
  lane_.addTicker(*this);
}

DataPlane::~DataPlane() {
  lane_.removeTicker(*this);
  stopPorts();
}

// Every entry from the loop goes through here: whatever is thrown becomes the group's failure, and frames that were queued leave.
template <typename Body>
void DataPlane::guarded(int peer, const Body& body) noexcept {
  try {
    body();
    flushDirty();
  } catch (const Error& error) {
    ErrorRecord record = error.record();
    record.rank = identity_.rank;
    record.host = identity_.hosts[static_cast<size_t>(identity_.rank)];
    record.group = identity_.name;
    if (peer >= 0) {
      record.peer = peer;
      record.peer_host = identity_.hosts[static_cast<size_t>(peer)];
    }
    notice(std::move(record));
  } catch (const std::bad_alloc&) {
    ErrorRecord record;
    record.code = ErrorCode::OutOfMemory;
    record.rank = identity_.rank;
    record.host = identity_.hosts[static_cast<size_t>(identity_.rank)];
    record.peer = identity_.rank;
    record.peer_host = record.host;
    record.group = identity_.name;
    record.summary = "Rank " + std::to_string(identity_.rank) + " on " + record.host + " has no memory left for a transfer.";
    record.hint = "use a smaller batch, or fewer operations at once";
    notice(std::move(record));
  }
}

void DataPlane::notice(ErrorRecord record) {
  if (!failure_ && !closing_) {
    notice_(std::move(record));
  }
}

OutPort& DataPlane::portTo(int peer) {
  std::unique_ptr<OutPort>& port = out_[static_cast<size_t>(peer)];
  if (port == nullptr) {
    port = std::make_unique<OutPort>(
        *this, peer, startConnect(identity_.local_address, identity_.addresses[static_cast<size_t>(peer)]));
    port->waits_for_room = true;
    writeHello(*port);
    lane_.watch(port->link->fd(), EPOLLOUT, *port);
  }
  return *port;
}

void DataPlane::writeHello(OutPort& port) {
  Hello hello;
  hello.nonce = identity_.nonce;
  hello.rank = identity_.rank;
  hello.size = identity_.size;
  hello.epoch = identity_.epoch;
  hello.group = identity_.hash;
  hello.purpose = LinkPurpose::Bulk;
  const std::string bytes = encodeHello(hello);
  OutFrame frame;
  std::memcpy(&frame.header, bytes.data(), sizeof frame.header);
  frame.staging = staging_.take(bytes.size() - sizeof frame.header);
  std::memcpy(frame.staging.view().ptr, bytes.data() + sizeof frame.header, frame.staging.view().nbytes);
  frame.payload = frame.staging.view();
  port.channel.push(std::move(frame));
}

void DataPlane::push(int peer, OutFrame frame) {
  if (failure_ || closing_) {
    return;
  }
  OutPort& port = portTo(peer);
  port.channel.push(std::move(frame));
  if (!port.dirty && !port.waits_for_room) {
    port.dirty = true;
    dirty_.push_back(&port);
  }
}

void DataPlane::flushDirty() {
  while (!dirty_.empty() && !failure_) {
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
    lane_.unwatch(port.link->fd());
    linkBroke(port.peer, error, true);
    return;
  }
  if (left != port.waits_for_room) {
    port.waits_for_room = left;
    lane_.watch(port.link->fd(), left ? EPOLLOUT : 0U, port);
  }
  for (OutFrame& frame : sent) {
    const auto found = frame.step < 0 ? transfers_.end() : transfers_.find(frame.header.op_id);
    if (found != transfers_.end()) {
      found->second->sent(static_cast<uint32_t>(frame.step));
      settle(frame.header.op_id);
    }
  }
  act();
}

void DataPlane::writeReady(OutPort& port) {
  if (!port.connected) {
    try {
      if (!port.link->finishConnect()) {
        return;
      }
    } catch (const Error& error) {
      port.broken = true;
      lane_.unwatch(port.link->fd());
      linkBroke(port.peer, error, true);
      return;
    }
    port.connected = true;
  }
  flush(port);
}

void DataPlane::readPort(InPort& port) {
  if (port.ended || failure_) {
    return;
  }
  bool open = true;
  std::optional<Error> broken;
  try {
    open = port.channel.read();
  } catch (const Error& error) {
    if (error.record().code != ErrorCode::ConnectionReset) {
      throw;
    }
    broken = error;
    open = false;
  }
  if (!open) {
    port.ended = true;
    lane_.unwatch(port.link->fd());
    if (!left_[static_cast<size_t>(port.peer)]) {
      linkBroke(port.peer, broken ? *broken : Error(ErrorCode::ConnectionReset, "the connection was closed"), false);
    }
  }
}

void DataPlane::linkBroke(int peer, const Error& error, bool may_be_orderly) {
  ErrorRecord record = peerGone(peer, error.record(), identity_);
  if (record.cause.empty()) {
    record.cause = error.record().summary;
  }
  if (!may_be_orderly) {
    notice(std::move(record));
  } else if (!left_[static_cast<size_t>(peer)]) {
    suspicions_.emplace(peer, Suspicion{std::move(record), Clock::now() + std::chrono::milliseconds(kSuspicionMs)});
  }
}

void DataPlane::onPortReady(int peer, bool outgoing, uint32_t events) noexcept {
  guarded(peer, [&] {
    if (!outgoing) {
      readPort(*in_[static_cast<size_t>(peer)]);
      return;
    }
    OutPort& port = *out_[static_cast<size_t>(peer)];
    if (port.connected && (events & (EPOLLERR | EPOLLHUP)) != 0) {
      port.broken = true;
      lane_.unwatch(port.link->fd());
      linkBroke(peer, Error(ErrorCode::ConnectionReset, "the connection was reset"), true);
      return;
    }
    writeReady(port);
  });
}

void DataPlane::adopt(int peer, std::unique_ptr<Link> link) {
  guarded(peer, [&] {
    std::unique_ptr<InPort>& port = in_[static_cast<size_t>(peer)];
    if (failure_ || closing_ || port != nullptr) {
      return; // a second connection of one rank is no peer of ours: drop it
    }
    port = std::make_unique<InPort>(*this, peer, std::move(link), *this);
    lane_.watch(port->link->fd(), EPOLLIN, *port);
    readPort(*port);
  });
}

void DataPlane::post(std::shared_ptr<Operation> operation) {
  if (failure_ || closing_) {
    operation->finish(errorOf(*operation, failure_ ? *failure_ : *closing_, identity_));
    return;
  }
  guarded(-1, [&] {
    const Operation::Request& request = operation->request();
    const uint64_t op_id = request.id.id;
    auto transfer = std::make_unique<Transfer>(
        operation, identity_.size, protocol_, staging_, [this](int peer, OutFrame frame) { push(peer, std::move(frame)); });
    Transfer& running = *transfer;
    transfers_.emplace(op_id, std::move(transfer));
    lane_.addBusy(1);
    protocol_.posted(request.id, request.descriptor, *request.schedule, Clock::now());
    next_deadline_ = std::min(next_deadline_, request.deadline.instant());
    act();
    if (protocol_.failed()) { // what was held for it does not fit it: it ends when the group's failure comes back
      return;
    }
    running.start();
    replayHeld(running);
    for (int peer = 0; peer < identity_.size; ++peer) {
      if (left_[static_cast<size_t>(peer)] && running.needs(peer)) {
        notice(peerLeftUs(peer, *operation, identity_));
      }
    }
    act();
    settle(op_id);
  });
}

void DataPlane::replayHeld(Transfer& transfer) {
  const auto found = held_.find(transfer.operation().request().id.id);
  if (found == held_.end()) {
    return;
  }
  std::vector<HeldFrame> frames = std::move(found->second);
  held_.erase(found);
  for (HeldFrame& frame : frames) {
    transfer.expect(frame.peer, frame.header);
    Sink sink;
    sink.into = frame.staging.view();
    sink.staging = std::move(frame.staging);
    transfer.arrived(frame.peer, frame.header, std::move(sink));
  }
}

Sink DataPlane::onHeader(int peer, const FrameHeader& header) {
  Sink sink;
  if (failure_ || header.type == FrameType::Goodbye) {
    return sink;
  }
  const Protocol::Verdict verdict = protocol_.arrived(peer, header, Clock::now());
  act();
  switch (verdict) {
    case Protocol::Verdict::Accept:
      if (!protocol_.failed()) {
        sink = transfers_.at(header.op_id)->place(peer, header);
      }
      break;
    case Protocol::Verdict::Hold:
      sink.held = true;
      if (header.payload_nbytes > 0) {
        sink.staging = staging_.take(header.payload_nbytes);
        sink.into = sink.staging.view();
      }
      break;
    case Protocol::Verdict::Ignore:
      break;
  }
  return sink;
}

void DataPlane::onFrame(int peer, const FrameHeader& header, Sink sink) {
  if (failure_ || protocol_.failed()) {
    return;
  }
  if (header.type == FrameType::Goodbye) {
    peerLeft(peer);
    return;
  }
  if (header.type != FrameType::Data) {
    return;
  }
  const auto found = transfers_.find(header.op_id);
  if (found == transfers_.end()) {
    if (sink.held) {
      held_[header.op_id].push_back(HeldFrame{peer, header, std::move(sink.staging)});
    }
    return;
  }
  if (sink.held) { // posted between its header and its last byte
    found->second->expect(peer, header);
  }
  found->second->arrived(peer, header, std::move(sink));
  act();
  settle(header.op_id);
}

void DataPlane::peerLeft(int peer) {
  left_[static_cast<size_t>(peer)] = true;
  suspicions_.erase(peer);
  for (const auto& entry : transfers_) {
    if (entry.second->needs(peer)) {
      notice(peerLeftUs(peer, entry.second->operation(), identity_));
      return;
    }
  }
}

void DataPlane::act() {
  for (std::vector<Protocol::Action> actions = protocol_.takeActions(); !actions.empty();
       actions = protocol_.takeActions()) {
    for (Protocol::Action& action : actions) {
      switch (action.kind) {
        case Protocol::Action::Kind::Send: {
          OutFrame frame;
          frame.header = action.header;
          push(action.peer, std::move(frame));
          break;
        }
        case Protocol::Action::Kind::Pump: {
          const auto found = transfers_.find(action.op_id);
          if (found != transfers_.end()) {
            found->second->pump(action.peer);
          }
          break;
        }
        case Protocol::Action::Kind::Fail:
          action.record.group = identity_.name;
          notice(std::move(action.record));
          break;
      }
    }
  }
}

void DataPlane::settle(uint64_t op_id) {
  const auto found = transfers_.find(op_id);
  if (found == transfers_.end() || !found->second->complete()) {
    return;
  }
  const std::unique_ptr<Transfer> finished = std::move(found->second);
  transfers_.erase(found);
  lane_.addBusy(-1);
  protocol_.ended(op_id);
  finished->operation().finish(std::nullopt);
}

void DataPlane::endAll(const std::function<ErrorRecord(const Transfer&)>& why) {
  const auto transfers = std::exchange(transfers_, {});
  lane_.addBusy(-static_cast<int>(transfers.size()));
  for (const auto& entry : transfers) {
    protocol_.ended(entry.first);
    entry.second->operation().finish(why(*entry.second));
  }
  held_.clear();
}

void DataPlane::stopPorts() noexcept {
  dirty_.clear();
  for (const auto& port : out_) {
    if (port != nullptr) {
      lane_.unwatch(port->link->fd());
      port->channel.clear();
      port->broken = true;
    }
  }
  for (const auto& port : in_) {
    if (port != nullptr) {
      lane_.unwatch(port->link->fd());
      port->ended = true;
    }
  }
}

void DataPlane::fail(const ErrorRecord& cause) {
  if (failure_) {
    return;
  }
  failure_ = cause;
  failed_at_ = Clock::now();
  // First no more bytes in or out of anybody's memory, then the operations end and their memory is free.
  stopPorts();
  endAll([&](const Transfer& transfer) {
    ErrorRecord record = errorOf(transfer.operation(), cause, identity_);
    record.bytes_done = transfer.bytesArrived();
    record.bytes_total = transfer.bytesExpected();
    return record;
  });
}

void DataPlane::close(const ErrorRecord& reason, std::function<void()> closed) {
  if (!failure_ && !transfers_.empty()) {
    notice(leftInTheMiddle(transfers_.begin()->second->operation(), identity_));
  }
  closing_ = reason;
  closed_ = std::move(closed);
  close_at_ = Clock::now();
  if (failure_) {
    // News travels over other ranks' control links; a link that ends before it has arrived looks like a death.
    close_at_ = std::max(close_at_, failed_at_ + std::chrono::milliseconds(kNewsMs));
    return;
  }
  endAll([&](const Transfer& transfer) { return errorOf(transfer.operation(), reason, identity_); });
  for (const auto& port : out_) {
    if (port == nullptr || port->broken || !port->connected) {
      continue;
    }
    const bool mid_frame = port->channel.midFrame();
    port->channel.clear(); // the memory of operations that ended just now may be gone
    if (!mid_frame) {
      OutFrame frame;
      frame.header.type = FrameType::Goodbye;
      frame.header.group = identity_.hash;
      frame.header.epoch = identity_.epoch;
      port->channel.push(std::move(frame));
      flush(*port);
    }
    port->link->shutdownWrite();
    close_at_ = Clock::now() + std::chrono::milliseconds(kGoodbyeMs);
  }
}

TimePoint DataPlane::nextTick() const noexcept {
  TimePoint next = std::min({protocol_.nextTick(), next_deadline_, close_at_});
  for (const auto& entry : suspicions_) {
    next = std::min(next, entry.second.due);
  }
  return next;
}

void DataPlane::checkDeadlines(TimePoint now) {
  if (now < next_deadline_) {
    return;
  }
  next_deadline_ = TimePoint::max();
  for (const auto& entry : transfers_) {
    const Deadline deadline = entry.second->operation().request().deadline;
    if (deadline.expired(now)) {
      notice(timedOut(*entry.second, protocol_.missing(entry.first), identity_));
    } else {
      next_deadline_ = std::min(next_deadline_, deadline.instant());
    }
  }
}

void DataPlane::tick(TimePoint now) noexcept {
  if (close_at_ <= now) {
    close_at_ = TimePoint::max();
    failure_ = failure_ ? failure_ : closing_;
    stopPorts();
    std::exchange(closed_, nullptr)();
    return; // the owner may be gone
  }
  guarded(-1, [&] {
    protocol_.tick(now);
    act();
    checkDeadlines(now);
    for (auto at = suspicions_.begin(); at != suspicions_.end();) {
      if (at->second.due <= now) {
        notice(std::move(at->second.record));
        at = suspicions_.erase(at);
      } else {
        ++at;
      }
    }
  });
}

} // namespace pycomm
