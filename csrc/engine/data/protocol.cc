#include "engine/data/protocol.h"

#include <utility>

namespace pycomm {

Protocol::Protocol(const Config& config)
    : group_(config.group),
      epoch_(config.epoch),
      credits_(config, config.size),
      roll_call_(
          config,
          credits_,
          static_cast<size_t>(config.eager_pool_nbytes / config.frame_nbytes) + 2 * config.max_ahead) {}

void Protocol::posted(
    const OperationId& id,
    const Descriptor& descriptor,
    const PreparedSchedule& schedule,
    TimePoint now,
    Deadline deadline) {
  try {
    credits_.posted(id.id, schedule, descriptor.kind == Collective::Send, roll_call_.unexpectedFrom(id.id));
    roll_call_.entered(id, descriptor, deadline, now);
  } catch (...) {
    roll_call_.forget(id.id);
    credits_.forget(id.id);
    throw;
  }
}

void Protocol::ended(uint64_t op_id) {
  roll_call_.ended(op_id);
  credits_.ended(op_id);
}

void Protocol::passed(const OperationId& id, const Descriptor& descriptor) {
  roll_call_.passed(id, descriptor);
  credits_.passed(id.id);
}

Protocol::Verdict Protocol::arrived(int peer, const FrameHeader& header, TimePoint now) {
  if (failed()) {
    return Verdict::Ignore;
  }
  if (header.group != group_ || header.epoch != epoch_) {
    roll_call_.violated(peer, header, "a frame of another group or epoch");
    return Verdict::Ignore;
  }
  RollCall::OperationState state = RollCall::OperationState::Unknown;
  if (header.op_id != 0 &&
      header.type != FrameType::NotEntered) { // else it is about no operation, or about another one
    state = roll_call_.compared(peer, header);
    if (state == RollCall::OperationState::Entered) {
      credits_.shown(header.op_id, peer);
    }
    if (state == RollCall::OperationState::Past && !failed() && header.type == FrameType::Data) {
      roll_call_.violated(peer, header, "data of an operation that has ended");
    }
    if (state == RollCall::OperationState::Past || failed()) {
      return Verdict::Ignore;
    }
  }
  switch (header.type) {
    case FrameType::Data:
      return dataArrived(peer, header, state, now);
    case FrameType::Credit:
      creditArrived(peer, header, state, now);
      return Verdict::Ignore;
    case FrameType::Waiting:
      roll_call_.asked(peer, header, now);
      return Verdict::Ignore;
    case FrameType::NotEntered:
      roll_call_.answered(peer, header, now);
      return Verdict::Ignore;
    case FrameType::Hello:
    case FrameType::HelloReply:
    case FrameType::Failure:
    case FrameType::Heartbeat:
    case FrameType::Goodbye:
    case FrameType::Left:
    case FrameType::Leaving:
      break;
  }
  roll_call_.violated(
      peer, header, "a frame of type " + std::to_string(static_cast<int>(header.type)) + " on a bulk link");
  return Verdict::Ignore;
}

Protocol::Verdict Protocol::dataArrived(
    int peer,
    const FrameHeader& header,
    RollCall::OperationState state,
    TimePoint now) {
  const bool eager = (header.aux & kEagerFlag) != 0;
  if (const char* const refused = credits_.arrived(header.op_id, peer, header.payload_nbytes, eager)) {
    roll_call_.violated(peer, header, refused);
    return Verdict::Ignore;
  }
  if (state == RollCall::OperationState::Entered) {
    roll_call_.progressed(header.op_id, now);
    return Verdict::Accept;
  }
  return roll_call_.keepUnexpected(peer, header, now) ? Verdict::Hold : Verdict::Ignore;
}

void Protocol::creditArrived(int peer, const FrameHeader& header, RollCall::OperationState state, TimePoint now) {
  const auto limit = static_cast<int64_t>(header.aux);
  if (header.op_id != 0 && state == RollCall::OperationState::Unknown && limit >= 0) {
    if (credits_.isPast(peer, header.op_id) || !roll_call_.keepUnexpected(peer, header, now)) {
      return; // the former: the operation did without
    }
  }
  if (const char* const refused = credits_.granted(header.op_id, peer, limit)) {
    roll_call_.violated(peer, header, refused);
  }
}

Protocol::Usage Protocol::usage() const {
  Usage usage;
  static_cast<RollCall::Usage&>(usage) = roll_call_.usage();
  static_cast<Credits::Usage&>(usage) = credits_.usage();
  return usage;
}

std::vector<Protocol::Action> Protocol::takeActions() {
  std::vector<Action> actions = roll_call_.takeActions();
  for (const Credits::Action& given : credits_.takeActions()) {
    if (given.op_id != 0 && !roll_call_.isEntered(given.op_id)) {
      continue; // it has ended since
    }
    Action action;
    action.peer = given.peer;
    action.op_id = given.op_id;
    switch (given.kind) {
      case Credits::Action::Kind::Grant:
        action.kind = Action::Kind::Send;
        action.header = headerFor(given.op_id, FrameType::Credit, given.peer);
        action.header.aux = static_cast<uint64_t>(given.nbytes);
        break;
      case Credits::Action::Kind::MaySend:
        action.kind = Action::Kind::MaySend;
        break;
    }
    actions.push_back(std::move(action));
  }
  return actions;
}

} // namespace pycomm
