// What control links bring.
#include <algorithm>
#include <string>
#include <utility>

#include "base/fault_point.h"
#include "engine/monitor/control_link.h"
#include "engine/monitor/control_plane.h"

namespace pycomm {
namespace {

constexpr size_t kMaxControlPayload = ErrorRecord::kMaxSerializedNbytes; // of a Failure; no other frame has one

Error violation(int peer, const std::string& what) {
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  record.summary = "Rank " + std::to_string(peer) + " sent what the protocol does not allow: " + what + ".";
  record.hint = "check that all ranks run the same build of pycomm; otherwise report this as a bug";
  return Error(record);
}

} // namespace

void ControlPlane::checkHeader(int peer, const FrameHeader& header) const {
  if (header.group != identity_.hash || header.epoch != identity_.epoch) {
    throw violation(peer, "a frame of another group or epoch");
  }
  if (header.payload_nbytes > (header.type == FrameType::Failure ? kMaxControlPayload : 0)) {
    throw violation(peer, "a payload of " + std::to_string(header.payload_nbytes) + " bytes on a control link");
  }
}

void ControlPlane::onFrame(int peer, const FrameHeader& header, ConstBufferView payload) {
  PYCOMM_FAULT_POINT("control.received");
  const TimePoint now = Clock::now();
  membership_.alive(peer, now);
  switch (header.type) {
    case FrameType::Heartbeat:
      return;
    case FrameType::Goodbye:
      membership_.saidGoodbye(peer);
      events_.left(peer);
      return;
    case FrameType::Failure: {
      const std::string bytes(reinterpret_cast<const char*>(payload.ptr), payload.nbytes);
      std::optional<ErrorRecord> record = ErrorRecord::deserialize(bytes, identity_.size);
      if (!record) {
        throw violation(peer, "a report of a failure that cannot be read, or names a rank that does not exist");
      }
      membership_.reported(peer, std::move(*record), now);
      return;
    }
    case FrameType::Hello:
    case FrameType::HelloReply:
    case FrameType::Data:
    case FrameType::Credit:
    case FrameType::Waiting:
    case FrameType::NotEntered:
      break;
  }
  throw violation(peer, "a frame of type " + std::to_string(static_cast<int>(header.type)) + " on a control link");
}

} // namespace pycomm
