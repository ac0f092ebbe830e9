#include "engine/data/transfers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/fault_point.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// Operations that expect more than this are not looked for: a large one's bytes are better read when many have come.
constexpr int64_t kLookNbytes = 256 << 10;
// No operation is looked for if more than this are under way.
constexpr size_t kLookOperations = 64;

} // namespace

Transfers::Transfers(
    const GroupIdentity& identity,
    Protocol& protocol,
    StagingPool& staging,
    Loop& lane,
    Transfer::SendFrame send_frame)
    : identity_(identity), protocol_(protocol), staging_(staging), lane_(lane), send_frame_(std::move(send_frame)) {}

// ---- events

Transfer& Transfers::add(const std::shared_ptr<Operation>& operation, TimePoint now) {
  const Operation::Request& request = operation->request();
  const uint64_t op_id = request.id.id;
  auto transfer = std::make_unique<Transfer>(operation, identity_, protocol_, staging_, send_frame_, working_);
  Transfer& running = *transfer;
  if (!transfers_.emplace(op_id, std::move(transfer)).second) {
    throw Error(
        ErrorCode::Internal,
        "two operations of rank " + std::to_string(identity_.jobRank()) + " have one name",
        "report this as a bug");
  }
  try {
    protocol_.posted(request.id, request.descriptor, *request.schedule, now, request.deadline);
  } catch (...) { // nobody would look at its deadline
    transfers_.erase(op_id);
    throw;
  }
  lane_.addBusy(1);
  operation->mark().running(now, running.bytesExpected());
  return running;
}

void Transfers::replayUnexpected(Transfer& transfer) {
  const auto found = unexpected_.find(transfer.operation().request().id.id);
  if (found == unexpected_.end()) {
    return;
  }
  std::vector<UnexpectedFrame> frames = std::move(found->second);
  unexpected_.erase(found);
  for (UnexpectedFrame& frame : frames) {
    transfer.expect(frame.peer, frame.header);
    Sink sink;
    sink.into = frame.staging.view();
    sink.staging = std::move(frame.staging);
    sink.unexpected = true;
    transfer.arrived(frame.peer, frame.header, std::move(sink));
    transfer.operation().mark().received(transfer.bytesArrived());
  }
}

Sink Transfers::place(int peer, const FrameHeader& header, TimePoint now) {
  Transfer& transfer = *transfers_.at(header.op_id);
  Sink sink = transfer.place(peer, header);
  transfer.operation().mark().arriving(now);
  return sink;
}

Sink Transfers::placeUnexpected(const FrameHeader& header) {
  Sink sink;
  sink.unexpected = true;
  if (header.payload_nbytes > 0) {
    sink.staging = staging_.take(header.payload_nbytes);
    sink.into = sink.staging.view();
  }
  return sink;
}

bool Transfers::arrived(int peer, const FrameHeader& header, Sink&& sink) {
  const auto found = transfers_.find(header.op_id);
  if (found == transfers_.end()) {
    if (sink.unexpected) {
      unexpected_[header.op_id].push_back(UnexpectedFrame{peer, header, std::move(sink.staging)});
    }
    return false;
  }
  Transfer& transfer = *found->second;
  if (sink.unexpected) { // posted between its header and its last byte
    transfer.expect(peer, header);
  }
  transfer.arrived(peer, header, std::move(sink));
  transfer.operation().mark().received(transfer.bytesArrived());
  return true;
}

bool Transfers::sent(const OutFrame& frame) {
  const auto found = frame.step < 0 ? transfers_.end() : transfers_.find(frame.header.op_id);
  if (found == transfers_.end()) {
    return false;
  }
  found->second->sent(static_cast<uint32_t>(frame.step));
  return true;
}

void Transfers::sendFrames(uint64_t op_id, int peer) {
  const auto found = transfers_.find(op_id);
  if (found != transfers_.end()) {
    found->second->sendFrames(peer);
  }
}

bool Transfers::inputArrived(uint64_t op_id) {
  const auto found = transfers_.find(op_id);
  if (found == transfers_.end()) {
    return false;
  }
  found->second->inputArrived();
  return true;
}

Transfers::Worked Transfers::work(size_t nbytes) {
  Transfer& transfer = *working_.front();
  working_.pop_front();
  const size_t touched = transfer.work(nbytes);
  return {transfer.operation().request().id.id, touched};
}

std::unique_ptr<Transfer> Transfers::takeComplete(uint64_t op_id) {
  const auto found = transfers_.find(op_id);
  if (found == transfers_.end() || !found->second->complete()) {
    return nullptr;
  }
  PYCOMM_FAULT_POINT("operation.finish");
  std::unique_ptr<Transfer> complete = std::move(found->second);
  transfers_.erase(found);
  lane_.addBusy(-1);
  return complete;
}

void Transfers::endAll(const std::function<void(const Transfer&)>& end) noexcept {
  unexpected_.clear();
  working_.clear();
  const auto transfers = std::exchange(transfers_, {});
  lane_.addBusy(-static_cast<int>(transfers.size()));
  for (const auto& entry : transfers) {
    end(*entry.second);
  }
}

// ---- questions

bool Transfers::has(const Operation& operation) const noexcept {
  return std::any_of(transfers_.begin(), transfers_.end(), [&](const auto& entry) {
    return &entry.second->operation() == &operation;
  });
}

size_t Transfers::unexpectedFrames() const noexcept {
  size_t frames = 0;
  for (const auto& entry : unexpected_) {
    frames += entry.second.size();
  }
  return frames;
}

const Transfer* Transfers::oldest() const noexcept {
  const auto oldest = std::min_element(transfers_.begin(), transfers_.end(), [](const auto& a, const auto& b) {
    return a.second->operation().issuedAt() < b.second->operation().issuedAt();
  });
  return oldest == transfers_.end() ? nullptr : oldest->second.get();
}

const Operation* Transfers::first() const noexcept {
  return transfers_.empty() ? nullptr : &transfers_.begin()->second->operation();
}

const Operation* Transfers::owing(int peer) const noexcept {
  for (const auto& entry : transfers_) {
    if (entry.second->owes(peer)) {
      return &entry.second->operation();
    }
  }
  return nullptr;
}

const Operation* Transfers::awaiting(int peer) const noexcept {
  for (const auto& entry : transfers_) {
    if (entry.second->needsFrom(peer)) {
      return &entry.second->operation();
    }
  }
  return nullptr;
}

bool Transfers::addDuePeers(std::vector<int>& peers) const {
  if (transfers_.size() > kLookOperations) {
    return false;
  }
  for (const auto& entry : transfers_) {
    if (entry.second->bytesExpected() > kLookNbytes) {
      continue;
    }
    for (const Edge& edge : entry.second->incoming()) {
      if (entry.second->needsFrom(edge.peer)) {
        peers.push_back(edge.peer);
      }
    }
  }
  return true;
}

std::optional<ErrorRecord> Transfers::overdue(uint64_t op_id) const {
  const auto found = transfers_.find(op_id);
  if (found == transfers_.end()) {
    return std::nullopt;
  }
  const Transfer& transfer = *found->second;
  if (!transfer.inputComplete()) {
    return inputLate(transfer.operation(), transfer.bytesExpected(), identity_);
  }
  return timedOut(
      transfer.operation(),
      transfer.bytesArrived(),
      transfer.bytesExpected(),
      transfer.waitsFor(),
      protocol_.missing(op_id),
      identity_);
}

} // namespace pycomm
