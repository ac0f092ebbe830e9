#include "engine/data/data_plane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fault_point.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

Protocol::Config protocolConfig(const GroupIdentity& identity, Protocol::Config config) {
  config.rank = identity.rank;
  config.size = identity.size;
  config.group = identity.hash;
  config.epoch = identity.epoch;
  config.hosts = identity.hosts;
  return config;
}

} // namespace

DataPlane::DataPlane(GroupIdentity identity, Loop& lane, Events events, Options options)
    : identity_(std::move(identity)),
      options_(std::move(options)),
      lane_(lane),
      events_(std::move(events)),
      protocol_(protocolConfig(identity_, options_.limits)),
      staging_(lane_.stagingMemory()),
      links_(identity_, options_, lane_, staging_, *this),
      departures_(identity_, *this),
      messages_(
          identity_,
          Messages::Limits{options_.limits.eager_nbytes, options_.limits.max_ahead},
          protocol_,
          lane_,
          *this),
      watched_(identity_, protocol_) {
  lane_.addTicker(*this);
}

DataPlane::~DataPlane() {
  lane_.removeTicker(*this);
}

DataPlane::Usage DataPlane::usage() const {
  Usage usage;
  usage.transfers = transfers_.size();
  for (const auto& entry : held_) {
    usage.held_frames += entry.second.size();
  }
  usage.queued_sends = messages_.queued();
  usage.shared_links = links_.sharedLinks();
  usage.staging_nbytes = staging_.takenNbytes();
  usage.protocol = protocol_.usage();
  return usage;
}

void DataPlane::report(int peer, const std::exception_ptr& exception) noexcept {
  try {
    ErrorRecord record = ownTrouble(exception, identity_);
    if (peer >= 0 && !isOwnTrouble(record.code)) {
      record.peer = peer;
      record.peer_host = identity_.host(peer);
      if (record.summary.empty()) { // of a shared link, which knows of no ranks
        record.summary = "Rank " + std::to_string(peer) + " on " + record.peer_host +
            " has broken the memory through which it talks with rank " + std::to_string(identity_.rank) + ".";
      }
    }
    notice(std::move(record));
  } catch (...) { // no memory even to report it: a deadline ends the others
    for (const auto& operation : std::exchange(refused_, {})) {
      endUnfit(*operation, exception);
    }
  }
}

void DataPlane::notice(ErrorRecord record) {
  if (end_.running()) {
    events_.noticed(std::move(record));
  }
}

void DataPlane::post(const std::shared_ptr<Operation>& operation) {
  // What belongs in shared memory comes here only when that is over, which is a little before all else is.
  if (!end_.running() || operation->request().descriptor.algorithm == Algorithm::SharedMemory) {
    endAtOnce(*operation);
    return;
  }
  takeUp(operation, [&] {
    PYCOMM_FAULT_POINT("operation.post");
    if (operation->request().descriptor.kind == Collective::Send) {
      messages_.post(operation);
      departures_.posted(operation->request().schedule.get(), operation->request().receives, Clock::now());
      actOnDepartures();
    } else {
      start(operation);
    }
  });
}

// The plane is failing or closing.
void DataPlane::endAtOnce(Operation& operation) noexcept {
  end(operation, nullptr, [&](const Operation& ended, const Transfer*) {
    ErrorRecord closed;
    closed.code = ErrorCode::ShutDown;
    closed.summary = "The process group is closed.";
    const ErrorRecord& cause = end_.failure ? *end_.failure : (end_.closing ? *end_.closing : closed);
    ErrorRecord record = errorOf(ended, cause, identity_);
    record.bytes_done = 0;
    record.bytes_total = 0;
    if (const PreparedSchedule* schedule = ended.request().schedule.get()) { // null: from any rank
      for (const Edge& edge : schedule->incoming) {
        record.bytes_total += edge.nbytes;
      }
    }
    record.phase = record.phase.empty() ? "not_started" : record.phase;
    return record;
  });
}

bool DataPlane::has(const Operation& operation) const noexcept {
  return std::any_of(
             transfers_.begin(),
             transfers_.end(),
             [&](const auto& entry) { return &entry.second->operation() == &operation; }) ||
      messages_.has(operation) || watched_.has(operation) ||
      std::any_of(refused_.begin(), refused_.end(), [&](const auto& entry) { return entry.get() == &operation; });
}

void DataPlane::cannotBegin(const std::shared_ptr<Operation>& operation) noexcept {
  if (has(*operation)) {
    return;
  }
  const std::exception_ptr exception = std::current_exception();
  try {
    refused_.push_back(operation);
  } catch (...) { // no memory to remember it
    endUnfit(*operation, exception);
  }
}

void DataPlane::endUnfit(Operation& operation, const std::exception_ptr& exception) const noexcept {
  end(operation, nullptr, [&](const Operation& ended, const Transfer*) {
    return errorOf(ended, ownTrouble(exception, identity_), identity_);
  });
}

void DataPlane::start(const std::shared_ptr<Operation>& operation) {
  const Operation::Request& request = operation->request();
  const uint64_t op_id = request.id.id;
  auto transfer =
      std::make_unique<Transfer>(operation, identity_.size, protocol_, staging_, [this](int peer, OutFrame frame) {
        push(peer, std::move(frame));
      });
  Transfer& running = *transfer;
  transfers_.emplace(op_id, std::move(transfer));
  const TimePoint now = Clock::now();
  try {
    protocol_.posted(request.id, request.descriptor, *request.schedule, now, request.deadline);
  } catch (...) { // nobody would look at its deadline
    transfers_.erase(op_id);
    throw;
  }
  lane_.addBusy(1);
  operation->mark().running(now, running.bytesExpected());
  act();
  if (protocol_.failed()) { // what was held for it does not fit it: it ends when the group's failure comes back
    return;
  }
  running.start();
  replayHeld(running);
  departures_.posted(request.schedule.get(), false, now);
  actOnDepartures();
  act();
  settle(op_id);
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
    transfer.operation().mark().received(transfer.bytesArrived());
  }
}

Sink DataPlane::onHeader(int peer, const FrameHeader& header) {
  Sink sink;
  if (!end_.running() || header.type == FrameType::Goodbye) {
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
  const auto runs = [&] { return transfers_.count(header.op_id) != 0; };
  if (ours && header.kind == static_cast<uint8_t>(Collective::Send) && !messages_.heard(peer, header, runs())) {
    return sink;
  }
  if (!runs()) {
    watched_.recall(header.op_id);
  }
  const Protocol::Verdict verdict = protocol_.arrived(peer, header, now);
  act();
  switch (verdict) {
    case Protocol::Verdict::Accept:
      if (!protocol_.failed()) {
        Transfer& transfer = *transfers_.at(header.op_id);
        sink = transfer.place(peer, header);
        transfer.operation().mark().arriving(now);
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
      messages_.beginQueued(peer); // it may have brought room
      break;
  }
  return sink;
}

void DataPlane::onFrame(int peer, const FrameHeader& header, Sink sink) {
  if (end_.failure || protocol_.failed()) {
    return;
  }
  if (header.type == FrameType::Goodbye) {
    links_.endReading(peer);
    events_.left(peer);
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
  found->second->operation().mark().received(found->second->bytesArrived());
  act();
  settle(header.op_id);
}

void DataPlane::act() {
  for (std::vector<Protocol::Action> actions = protocol_.takeActions(); !actions.empty();
       actions = protocol_.takeActions()) {
    for (Protocol::Action& action : actions) {
      switch (action.kind) {
        case Protocol::Action::Kind::Send:
          if (action.way == RollCall::Way::BulkLink) {
            send(action.peer, action.header);
          } else {
            ask(action.peer, action.header);
          }
          break;
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
        case Protocol::Action::Kind::Overdue:
          overdue(action.op_id);
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
  PYCOMM_FAULT_POINT("operation.finish");
  const std::unique_ptr<Transfer> finished = std::move(found->second);
  transfers_.erase(found);
  lane_.addBusy(-1);
  endInProtocol(op_id);
  finished->operation().finish(std::nullopt);
  messages_.ended(finished->operation()); // begins others, which may throw
}

// ---- questions, and frames to this rank itself

bool DataPlane::isQuestion(const FrameHeader& header) const noexcept {
  const bool announces = header.kind == static_cast<uint8_t>(Collective::Send) && header.root == identity_.rank;
  return header.type == FrameType::NotEntered || (header.type == FrameType::Waiting && !announces);
}

void DataPlane::send(int peer, const FrameHeader& header) {
  OutFrame frame;
  frame.header = header;
  if (!isQuestion(header) || peer == identity_.rank) {
    push(peer, std::move(frame));
  } else if (end_.running()) {
    links_.ask(peer, std::move(frame));
  }
}

void DataPlane::ask(int peer, const FrameHeader& question) {
  if (!links_.isWriting(peer)) {
    questions_.push_back(Question{peer, question});
  } else if (end_.running()) {
    OutFrame frame;
    frame.header = question;
    links_.ask(peer, std::move(frame));
  }
}

void DataPlane::sendQuestions() {
  if (!questions_.empty() && end_.running()) {
    events_.ask(std::exchange(questions_, {}));
  }
}

void DataPlane::heardQuestion(int peer, const FrameHeader& question) {
  guarded(peer, [&] { static_cast<void>(onHeader(peer, question)); });
}

void DataPlane::deliverToSelf() {
  const OutFrame frame = std::move(to_self_.front());
  to_self_.pop_front();
  FrameHeader header = frame.header;
  if (header.op_id != 0 && header.op_id != PointToPoint::kAskId) { // pool room and questions concern no operation
    header.op_id ^= PointToPoint::kSelfBit;
  }
  Sink sink = onHeader(identity_.rank, header);
  if (sink.into.nbytes > 0) {
    std::memcpy(sink.into.ptr, frame.payload.ptr, sink.into.nbytes);
  }
  onFrame(identity_.rank, header, std::move(sink));
  const auto found = frame.step < 0 ? transfers_.end() : transfers_.find(frame.header.op_id);
  if (found != transfers_.end()) {
    found->second->sent(static_cast<uint32_t>(frame.step));
    settle(frame.header.op_id);
  }
  act();
}

} // namespace pycomm
