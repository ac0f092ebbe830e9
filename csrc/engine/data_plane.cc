#include "engine/data_plane.h"

#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "engine/failure_text.h"

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
      point_to_point_(identity_.rank, identity_.size, identity_.hash),
      out_(static_cast<size_t>(identity_.size)),
      in_(static_cast<size_t>(identity_.size)),
      left_(static_cast<size_t>(identity_.size), false) {
  lane_.addTicker(*this);
}

DataPlane::~DataPlane() {
  lane_.removeTicker(*this);
  stopPorts();
}

DataPlane::Usage DataPlane::usage() const {
  Usage usage;
  usage.transfers = transfers_.size();
  for (const auto& entry : held_) {
    usage.held_frames += entry.second.size();
  }
  for (const auto& entry : sends_) {
    usage.queued_sends += entry.second.size();
  }
  usage.shared_links = shared_in_.size() + shared_out_.size();
  usage.staging_nbytes = staging_.takenNbytes();
  usage.protocol = protocol_.usage();
  return usage;
}

void DataPlane::report(int peer, const std::exception_ptr& exception) noexcept {
  try {
    ErrorRecord record = ownTrouble(exception, identity_);
    if (peer >= 0 && !isOwnTrouble(record.code)) {
      record.peer = peer;
      record.peer_host = identity_.hosts[static_cast<size_t>(peer)];
      if (record.summary.empty()) { // of a shared link, which knows of no ranks
        record.summary = "Rank " + std::to_string(peer) + " on " + record.peer_host +
            " has broken the memory through which it talks with rank " + std::to_string(identity_.rank) + ".";
      }
    }
    notice(std::move(record));
  } catch (...) { // no memory even to say so: a deadline ends the others
    for (const auto& operation : std::exchange(refused_, {})) {
      endUnfit(*operation, exception);
    }
  }
}

void DataPlane::notice(ErrorRecord record) {
  if (!failure_ && !closing_) {
    events_.noticed(std::move(record));
  }
}

void DataPlane::post(const std::shared_ptr<Operation>& operation) {
  if (failure_ || closing_ || operation->request().descriptor.algorithm == Algorithm::SharedMemory) {
    // What belongs in shared memory comes here only when that is over, which is a little before all else is.
    ErrorRecord closed;
    closed.code = ErrorCode::ShutDown;
    closed.summary = "The process group is closed.";
    end(*operation, nullptr, [&](const Operation& ended, const Transfer*) {
      ErrorRecord record = errorOf(ended, failure_ ? *failure_ : (closing_ ? *closing_ : closed), identity_);
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
    return;
  }
  takeUp(operation, [&] {
    PYCOMM_FAULT_POINT("operation.post");
    next_deadline_ = std::min(next_deadline_, operation->request().deadline.instant());
    if (operation->request().descriptor.kind == Collective::Send) {
      postPointToPoint(operation);
    } else {
      begin(operation);
    }
  });
}

bool DataPlane::has(const Operation& operation) const noexcept {
  const auto is = [&](const auto& entry) { return entry.second.get() == &operation; };
  const auto queues = [&](const auto& entry) {
    bool queued = false;
    entry.second.forEach([&](const Operation& message) { queued = queued || &message == &operation; });
    return queued;
  };
  return std::any_of(
             transfers_.begin(),
             transfers_.end(),
             [&](const auto& entry) { return &entry.second->operation() == &operation; }) ||
      std::any_of(unmatched_.begin(), unmatched_.end(), is) || std::any_of(sends_.begin(), sends_.end(), queues) ||
      std::any_of(followed_.begin(), followed_.end(), is) ||
      std::any_of(without_input_.begin(), without_input_.end(), [&](const auto& entry) {
           return entry.get() == &operation;
         });
}

void DataPlane::refuse(const std::shared_ptr<Operation>& operation, const std::exception_ptr& exception) noexcept {
  try {
    refused_.push_back(operation);
    next_deadline_ = std::min(next_deadline_, operation->request().deadline.instant());
  } catch (...) { // no memory to remember it
    endUnfit(*operation, exception);
  }
}

void DataPlane::endUnfit(Operation& operation, const std::exception_ptr& exception) const noexcept {
  end(operation, nullptr, [&](const Operation& ended, const Transfer*) {
    return errorOf(ended, ownTrouble(exception, identity_), identity_);
  });
}

void DataPlane::begin(std::shared_ptr<Operation> operation) {
  const Operation::Request& request = operation->request();
  const uint64_t op_id = request.id.id;
  auto transfer =
      std::make_unique<Transfer>(operation, identity_.size, protocol_, staging_, [this](int peer, OutFrame frame) {
        push(peer, std::move(frame));
      });
  Transfer& running = *transfer;
  transfers_.emplace(op_id, std::move(transfer));
  lane_.addBusy(1);
  const TimePoint now = Clock::now();
  operation->mark().running(now, running.bytesExpected());
  protocol_.posted(request.id, request.descriptor, *request.schedule, now);
  act();
  if (protocol_.failed()) { // what was held for it does not fit it: it ends when the group's failure comes back
    return;
  }
  running.start();
  replayHeld(running);
  for (int peer = 0; peer < identity_.size; ++peer) {
    if (left_[static_cast<size_t>(peer)]) {
      missLeft(peer, running);
    }
  }
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
  if (failure_ || closing_ || header.type == FrameType::Goodbye) {
    return sink;
  }
  const TimePoint now = Clock::now();
  PYCOMM_FAULT_POINT("frame.header");
  const bool ours = header.group == identity_.hash && header.epoch == identity_.epoch;
  if (ours && header.op_id == PointToPoint::kAskId) {
    asked(peer, header);
    return sink;
  }
  if (ours && header.kind == static_cast<uint8_t>(Collective::Send)) {
    if (isOfPastMessage(peer, header)) {
      return sink;
    }
    hear(peer, header);
  }
  recallHost(header.op_id);
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
      beginQueued(peer); // it may have brought room
      break;
  }
  return sink;
}

void DataPlane::onFrame(int peer, const FrameHeader& header, Sink sink) {
  if (failure_ || protocol_.failed()) {
    return;
  }
  if (header.type == FrameType::Goodbye) {
    endReading(*in_[static_cast<size_t>(peer)]);
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
        case Protocol::Action::Kind::Send: {
          OutFrame frame;
          frame.header = action.header;
          try {
            push(action.peer, std::move(frame));
          } catch (const Error& error) {
            if (!isQuestion(action.header)) {
              throw;
            }
            askFailed(action.peer, error);
          }
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
  PYCOMM_FAULT_POINT("operation.finish");
  const std::unique_ptr<Transfer> finished = std::move(found->second);
  transfers_.erase(found);
  lane_.addBusy(-1);
  endInProtocol(op_id);
  finished->operation().finish(std::nullopt);
  messageEnded(finished->operation()); // begins others, which may throw
}

// A broken link to a peer matters only where something has still to go out on it. What is due from the peer comes on its own link, and
// the end of that tells more; if the peer died, those who have a control link to it say so.
void DataPlane::suspect(int peer, Suspicion suspicion) {
  if (failure_ || closing_) {
    return;
  }
  const auto any = [&](bool (Transfer::*question)(int) const noexcept) {
    return std::any_of(
        transfers_.begin(), transfers_.end(), [&](const auto& entry) { return (entry.second.get()->*question)(peer); });
  };
  const std::unique_ptr<InPort>& port = in_[static_cast<size_t>(peer)];
  const bool due = any(&Transfer::needsFrom) || (!unmatched_.empty() && point_to_point_.waitingFor(peer) != 0);
  if (suspicion.doubt) {
    events_.doubted(std::move(suspicion.record));
    missSenders(peer);
    return;
  }
  if (suspicion.record.code == ErrorCode::PeerLeft && port != nullptr && !port->ended) {
    return; // it came after all, and says itself when it ends
  }
  const Operation* const receive = withoutSenders();
  if (suspicion.record.code == ErrorCode::PeerLeft && receive != nullptr) {
    notice(peerLeftUs(peer, *receive, identity_));
    return;
  }
  if (!any(&Transfer::owes) && !hasQueued(peer)) {
    // Its link may be on its way, or still bring what is due; but without the broken one it may wait for credit for ever.
    if (due && !suspicion.patient && (port == nullptr || !port->ended)) {
      suspicion.patient = true;
      suspicion.due += std::chrono::milliseconds(kLastLinkMs);
      suspicions_.emplace(peer, std::move(suspicion));
      return;
    }
    if (!due) {
      // It was only asked whether it has entered something, and is not there any more; or a message is lost that had gone out, and
      // whoever waits for it would wait for ever.
      left_[static_cast<size_t>(peer)] = true;
      ErrorRecord lost = linkLost(peer, suspicion.record, identity_);
      lost_.insert_or_assign(peer, lost);
      suspicions_.emplace(
          peer, Suspicion{std::move(lost), suspicion.due + std::chrono::milliseconds(kLastLinkMs), true, true});
      return;
    }
  }
  notice(std::move(suspicion.record));
}

} // namespace pycomm
