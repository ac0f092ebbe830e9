#include "engine/monitor/roll_call_output.h"

#include "engine/operation/descriptor.h"
#include "engine/operation/issue_context.h"

namespace pycomm {

void RollCallOutput::send(int peer, const FrameHeader& header, Way way) {
  Action action;
  action.kind = Action::Kind::Send;
  action.peer = peer;
  action.way = way;
  action.header = header;
  actions_.push_back(std::move(action));
}

void RollCallOutput::overdue(uint64_t op_id) {
  Action action;
  action.kind = Action::Kind::Overdue;
  action.op_id = op_id;
  actions_.push_back(std::move(action));
}

void RollCallOutput::fail(ErrorRecord record) {
  if (failed_) {
    return; // the first error wins
  }
  failed_ = true;
  Action action;
  action.kind = Action::Kind::Fail;
  action.record = std::move(record);
  actions_.push_back(std::move(action));
}

void RollCallOutput::violated(int peer, const FrameHeader& header, const std::string& what) {
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  record.rank = config_.job.of(config_.rank);
  record.host = config_.hosts[static_cast<size_t>(config_.rank)];
  record.peer = config_.job.of(peer);
  record.peer_host = config_.hosts[static_cast<size_t>(peer)];
  record.op = collectiveName(Descriptor::readFrom(header).kindAt(config_.rank));
  record.sequence = (header.op_id & kDerivedIdBit) != 0 ? -1 : static_cast<int64_t>(header.op_id);
  record.phase = ErrorPhase::Matching;
  record.summary = "Rank " + std::to_string(record.peer) + " sent what the protocol does not allow: " + what + ".";
  record.hint = "check that all ranks run the same build of pycomm; otherwise report this as a bug";
  fail(std::move(record));
}

} // namespace pycomm
