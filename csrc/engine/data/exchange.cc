#include "engine/data/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fault_point.h"

namespace pycomm {
namespace {

Protocol::Config protocolConfig(const GroupIdentity& identity, Protocol::Config config) {
  config.rank = identity.rank;
  config.job = identity.job;
  config.size = identity.size;
  config.group = identity.hash;
  config.epoch = identity.epoch;
  config.hosts = identity.hosts;
  return config;
}

} // namespace

Exchange::Exchange(
    const GroupIdentity& identity,
    const Protocol::Config& limits,
    const PeerLinks::Options& links,
    Loop& lane,
    PlaneEnd& end,
    const Reporter& reporter)
    : identity_(identity),
      end_(end),
      reporter_(reporter),
      protocol_(protocolConfig(identity, limits)),
      staging_(lane.stagingMemory()),
      transfers_(
          identity,
          protocol_,
          staging_,
          lane,
          [this](int peer, OutFrame&& frame) { outgoing_.push(peer, std::move(frame)); }),
      links_(identity, links, lane, staging_, *this),
      outgoing_(identity.rank, links_, end, reporter),
      messages_(identity, Messages::Limits{limits.eager_nbytes, limits.max_ahead}, protocol_, lane, *this),
      departures_(identity, links_, transfers_, messages_, reporter),
      watched_(identity, protocol_),
      ends_(identity, protocol_, links_, outgoing_, transfers_, messages_, watched_, reporter) {}

// ---- operations begin

void Exchange::post(const std::shared_ptr<Operation>& operation) {
  orRefuse(operation, [&] {
    PYCOMM_FAULT_POINT("operation.post");
    const Operation::Request& request = operation->request();
    if (request.descriptor.kind == Collective::Send) {
      messages_.post(operation);
      departures_.posted(request.schedule.get(), request.receives, Clock::now());
    } else {
      start(operation);
    }
  });
}

void Exchange::start(const std::shared_ptr<Operation>& operation) {
  const Operation::Request& request = operation->request();
  const TimePoint now = Clock::now();
  Transfer& transfer = transfers_.add(operation, now);
  act();
  if (protocol_.failed()) { // an unexpected frame does not fit it: it ends when the group's failure comes back
    return;
  }
  transfer.start();
  transfers_.replayUnexpected(transfer);
  departures_.posted(request.schedule.get(), false, now);
  act();
  finishIfComplete(request.id.id);
}

void Exchange::inputArrived(uint64_t op_id) {
  if (transfers_.inputArrived(op_id)) {
    act();
    finishIfComplete(op_id);
  }
}

void Exchange::hold(const std::shared_ptr<Operation>& operation) {
  orRefuse(operation, [&] { watched_.hold(operation); });
}

void Exchange::stuck(const std::shared_ptr<Operation>& operation, uint64_t lacking) {
  watched_.stuck(operation, lacking);
  act();
}

void Exchange::hostEnded(const OperationId& id, const Descriptor& descriptor) {
  watched_.hostEnded(id, descriptor);
  act();
}

void Exchange::follow(const std::shared_ptr<Operation>& operation) {
  orRefuse(operation, [&] {
    watched_.follow(operation);
    act();
  });
}

// ---- frames arrive

Sink Exchange::onHeader(int peer, const FrameHeader& header) {
  Sink sink;
  if (!end_.running() || protocol_.failed() || header.type == FrameType::Goodbye) {
    return sink;
  }
  const TimePoint now = Clock::now();
  PYCOMM_FAULT_POINT("frame.header");
  const bool ours = header.group == identity_.hash && header.epoch == identity_.epoch;
  if (ours && header.op_id == PointToPoint::kAskId) {
    messages_.asked(peer, header);
    act();
    return sink;
  }
  if (ours && header.kind == static_cast<uint8_t>(Collective::Send) &&
      !messages_.arrived(peer, header, transfers_.runs(header.op_id))) {
    act();
    return sink;
  }
  if (!transfers_.runs(header.op_id)) {
    watched_.recall(header);
  }
  const Protocol::Verdict verdict = protocol_.arrived(peer, header, now);
  act();
  switch (verdict) {
    case Protocol::Verdict::Accept:
      if (!protocol_.failed()) {
        sink = transfers_.place(peer, header, now);
      }
      break;
    case Protocol::Verdict::Hold:
      sink = transfers_.placeUnexpected(header);
      break;
    case Protocol::Verdict::Ignore:
      messages_.beginQueued(peer); // it may have brought room
      break;
  }
  return sink;
}

void Exchange::onFrame(int peer, const FrameHeader& header, Sink sink) {
  if (end_.failed() || protocol_.failed()) {
    return;
  }
  if (header.type == FrameType::Goodbye) {
    links_.endReading(peer);
    reporter_.left(peer);
    departures_.saidGoodbye(peer);
    return;
  }
  if (header.type == FrameType::Data && transfers_.arrived(peer, header, std::move(sink))) {
    act();
    finishIfComplete(header.op_id);
  }
}

// ---- frames leave

void Exchange::onSent(const std::vector<OutFrame>& frames) {
  for (const OutFrame& frame : frames) {
    PYCOMM_FAULT_POINT("frame.written");
    if (transfers_.sent(frame)) {
      finishIfComplete(frame.header.op_id);
    }
  }
  act();
}

// Frames first: other ranks wait for them.
void Exchange::flush() {
  while (!end_.failed() && (links_.flush() || work())) {
  }
}

bool Exchange::work() {
  if (turn_left_ <= 0 || !hasWork()) {
    return false;
  }
  if (outgoing_.hasOwn()) {
    deliverToSelf();
  }
  if (transfers_.hasWork()) {
    const Transfers::Worked worked = transfers_.work(static_cast<size_t>(std::max<int64_t>(turn_left_, 0)));
    turn_left_ -= static_cast<int64_t>(worked.nbytes);
    act();
    finishIfComplete(worked.op_id);
  }
  return true;
}

void Exchange::deliverToSelf() {
  const OutFrame frame = outgoing_.takeOwn();
  FrameHeader header = frame.header;
  if (header.op_id != 0 && header.op_id != PointToPoint::kAskId) { // pool room and questions concern no operation
    header.op_id ^= PointToPoint::kSelfBit;
  }
  Sink sink = onHeader(identity_.rank, header);
  if (sink.into.nbytes > 0) {
    std::memcpy(sink.into.ptr, frame.payload.ptr, sink.into.nbytes);
    turn_left_ -= 2 * static_cast<int64_t>(sink.into.nbytes);
  }
  onFrame(identity_.rank, header, std::move(sink));
  if (transfers_.sent(frame)) {
    finishIfComplete(frame.header.op_id);
  }
  act();
}

// ---- what follows

void Exchange::act() {
  for (std::vector<Protocol::Action> actions = protocol_.takeActions(); !actions.empty();
       actions = protocol_.takeActions()) {
    for (Protocol::Action& action : actions) {
      switch (action.kind) {
        case Protocol::Action::Kind::Send:
          if (action.way == RollCall::Way::OpenLink) {
            outgoing_.ask(action.peer, action.header);
          } else {
            outgoing_.send(action.peer, action.header, action.way == RollCall::Way::Needed);
          }
          break;
        case Protocol::Action::Kind::MaySend:
          transfers_.sendFrames(action.op_id, action.peer);
          break;
        case Protocol::Action::Kind::Fail:
          reporter_.notice(std::move(action.record));
          break;
        case Protocol::Action::Kind::Overdue:
          overdue(action.op_id);
          break;
      }
    }
  }
}

void Exchange::finishIfComplete(uint64_t op_id) {
  const std::unique_ptr<Transfer> complete = transfers_.takeComplete(op_id);
  if (complete != nullptr) {
    ends_.endInProtocol(op_id);
    complete->operation().finish(std::nullopt);
    messages_.ended(complete->operation()); // begins others, which may throw
  }
}

// The deadline of an operation in the roll call has passed.
void Exchange::overdue(uint64_t op_id) {
  std::optional<ErrorRecord> late = transfers_.runs(op_id) ? transfers_.overdue(op_id) : watched_.overdue(op_id);
  if (late) {
    reporter_.notice(std::move(*late));
  }
}

void Exchange::tick(TimePoint now) {
  turn_left_ = kTurnNbytes;
  protocol_.tick(now);
  act();
  messages_.tick(now);
  for (ErrorRecord& late : watched_.overdueHeld(now)) {
    reporter_.notice(std::move(late));
  }
  departures_.tick(now);
  links_.tick(now);
}

// ---- questions

Exchange::Usage Exchange::usage() const {
  Usage usage;
  static_cast<Messages::Usage&>(usage) = messages_.usage();
  static_cast<WatchedOperations::Usage&>(usage) = watched_.usage();
  usage.transfers = transfers_.size();
  usage.unexpected_frames = transfers_.unexpectedFrames();
  usage.frames = outgoing_.frames();
  usage.refused = ends_.refused();
  usage.shared_links = links_.sharedLinks();
  usage.staging_nbytes = staging_.takenNbytes();
  usage.protocol = protocol_.usage();
  return usage;
}

TimePoint Exchange::nextTick() const noexcept {
  if (hasWork()) {
    return Loop::Ticker::kAtOnce;
  }
  return std::min(
      {protocol_.nextTick(),
       messages_.nextTick(),
       watched_.nextDeadline(),
       departures_.nextTick(),
       links_.nextTick(),
       ends_.nextDeadline()});
}

bool Exchange::addDuePeers(std::vector<int>& peers) const {
  if (!transfers_.addDuePeers(peers)) {
    return false;
  }
  for (int peer = 0; messages_.receives() && peer < identity_.size; ++peer) {
    if (messages_.waitsFor(peer)) {
      peers.push_back(peer);
    }
  }
  return true;
}

} // namespace pycomm
