#include "engine/data/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fault_point.h"
#include "engine/data/matching.h"
#include "engine/data/waiting.h"

namespace pycomm {
Exchange::Exchange(
    const GroupIdentity& identity,
    const Limits& limits,
    const PeerLinks::Options& links,
    Loop& lane,
    PlaneEnd& end,
    const Reporter& reporter)
    : identity_(identity),
      end_(end),
      reporter_(reporter),
      staging_(lane.stagingMemory()),
      tables_(identity, limits),
      transfers_(
          tables_,
          staging_,
          lane,
          [this](int peer, OutFrame&& frame) { outgoing_.push(peer, std::move(frame)); }),
      links_(identity, links, lane, staging_, *this),
      outgoing_(identity.rank, links_, end, reporter),
      messages_(tables_, lane, *this),
      departures_(identity, links_, tables_, messages_, reporter),
      watched_(tables_),
      ends_(tables_, links_, outgoing_, transfers_, messages_, watched_, reporter) {}

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
  OperationRow& row = transfers_.add(operation, now);
  act();
  if (tables_.failed) { // an unexpected frame does not fit it: it ends when the group's failure comes back
    return;
  }
  row.transfer->start();
  transfers_.replayUnexpected(row);
  departures_.posted(request.schedule.get(), false, now);
  act();
  finishIfComplete(row);
}

void Exchange::inputArrived(uint64_t op_id) {
  OperationRow* const row = tables_.find(op_id);
  if (row != nullptr && row->transfer != nullptr) {
    row->transfer->inputArrived();
    act();
    finishIfComplete(*row);
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

std::shared_ptr<Operation> Exchange::unfollow(uint64_t op_id) noexcept {
  const auto found = tables_.entered.find(op_id);
  if (found == tables_.entered.end() || found->second.runs != OperationRow::Runs::Elsewhere) {
    return nullptr;
  }
  auto node = tables_.entered.extract(found);
  ends_.endInTables(node.mapped());
  return std::move(node.mapped().operation);
}

// ---- frames arrive

Sink Exchange::onHeader(int peer, const FrameHeader& header) {
  Sink sink;
  if (!end_.running() || tables_.failed || header.type == FrameType::Goodbye) {
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
  OperationRow* row = tables_.find(header.op_id);
  if (ours && header.kind == static_cast<uint8_t>(Collective::Send)) {
    if (!messages_.arrived(peer, header, row != nullptr && row->transfer != nullptr)) {
      act();
      return sink;
    }
    row = row != nullptr ? row : tables_.find(header.op_id); // a receive that waited for it may have begun
  }
  if (row == nullptr) {
    watched_.recall(header);
    row = watched_.host() != nullptr ? tables_.find(header.op_id) : nullptr;
  }
  const matching::Verdict verdict = matching::arrived(tables_, row, peer, header, now);
  act();
  switch (verdict) {
    case matching::Verdict::Accept:
      if (!tables_.failed) {
        sink = transfers_.place(*row, peer, header, now);
      }
      break;
    case matching::Verdict::Hold:
      sink = transfers_.placeUnexpected(header);
      break;
    case matching::Verdict::Ignore:
      messages_.beginQueued(peer); // it may have brought room
      break;
  }
  return sink;
}

void Exchange::onFrame(int peer, const FrameHeader& header, Sink sink) {
  if (end_.failed() || tables_.failed) {
    return;
  }
  if (header.type == FrameType::Goodbye) {
    links_.endReading(peer);
    reporter_.left(peer);
    departures_.saidGoodbye(peer);
    return;
  }
  if (header.type == FrameType::Data) {
    OperationRow* const row = tables_.find(header.op_id);
    if (transfers_.arrived(row, peer, header, std::move(sink))) {
      act();
      finishIfComplete(*row);
    }
  }
}

// ---- frames leave

void Exchange::onSent(const std::vector<OutFrame>& frames) {
  for (const OutFrame& frame : frames) {
    PYCOMM_FAULT_POINT("frame.written");
    sent(frame);
  }
  act();
}

void Exchange::sent(const OutFrame& frame) {
  OperationRow* const row = frame.step < 0 ? nullptr : tables_.find(frame.header.op_id);
  if (row != nullptr && row->transfer != nullptr) {
    row->transfer->sent(static_cast<uint32_t>(frame.step));
    finishIfComplete(*row);
  }
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
    finishIfComplete(*worked.row);
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
  sent(frame);
  act();
}

// ---- what follows

void Exchange::act() {
  while (!tables_.actions.empty() || !tables_.credit_actions.empty()) {
    for (Action& action : tables_.takeActions()) {
      switch (action.kind) {
        case Action::Kind::Send:
          if (action.way == Action::Way::OpenLink) {
            outgoing_.ask(action.peer, action.header);
          } else {
            outgoing_.send(action.peer, action.header, action.way == Action::Way::Needed);
          }
          break;
        case Action::Kind::MaySend:
          if (const OperationRow* const row = tables_.find(action.op_id); row != nullptr && row->transfer != nullptr) {
            row->transfer->sendFrames(action.peer);
          }
          break;
        case Action::Kind::Fail:
          reporter_.notice(std::move(action.record));
          break;
        case Action::Kind::Overdue:
          overdue(action.op_id);
          break;
      }
    }
  }
}

void Exchange::finishIfComplete(OperationRow& row) {
  if (!Transfers::isComplete(row)) {
    return;
  }
  const auto node = tables_.entered.extract(row.id().id);
  const std::shared_ptr<Operation>& operation = node.mapped().operation;
  transfers_.ended();
  ends_.endInTables(node.mapped());
  operation->finish(std::nullopt);
  messages_.ended(*operation); // begins others, which may throw
}

// The deadline of an operation that is entered has passed.
void Exchange::overdue(uint64_t op_id) {
  OperationRow* const row = tables_.find(op_id);
  if (row == nullptr) {
    return;
  }
  std::optional<ErrorRecord> late =
      row->transfer != nullptr ? std::optional(transfers_.overdue(*row)) : watched_.overdue(*row);
  if (late) {
    reporter_.notice(std::move(*late));
  }
}

void Exchange::tick(TimePoint now) {
  turn_left_ = kTurnNbytes;
  waiting::tick(tables_, now);
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
  usage.held = watched_.held();
  for (const auto& entry : tables_.entered) {
    const OperationRow& row = entry.second;
    usage.transfers += row.runs == OperationRow::Runs::Here ? 1 : 0;
    usage.on_host += row.runs == OperationRow::Runs::InSharedMemory ? 1 : 0;
    usage.followed += row.runs == OperationRow::Runs::Elsewhere ? 1 : 0;
    usage.unexpected_frames += row.unexpected.size();
  }
  for (const auto& entry : tables_.others) {
    usage.unexpected_frames += entry.second.unexpected == nullptr ? 0 : entry.second.unexpected->frames.size();
  }
  usage.frames = outgoing_.frames();
  usage.refused = ends_.refused();
  usage.shared_links = links_.sharedLinks();
  usage.staging_nbytes = staging_.takenNbytes();
  usage.tables = tables_.usage();
  return usage;
}

TimePoint Exchange::nextTick() const noexcept {
  if (hasWork()) {
    return Loop::Ticker::kAtOnce;
  }
  return std::min(
      {waiting::nextTick(tables_),
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
