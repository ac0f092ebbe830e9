// What control links bring, and the way of questions from neighbour to neighbour.
#include <algorithm>
#include <string>
#include <utility>

#include "base/fault_point.h"
#include "engine/monitor/control_link.h"
#include "engine/monitor/control_plane.h"

namespace pycomm {
namespace {

constexpr size_t kMaxControlPayload = ErrorRecord::kMaxSerializedNbytes; // of a Failure; no other frame has one

// Questions are asked again, reports of failures are not: a link that is not read must not fill with the former.
constexpr size_t kMostQueued = 4096;

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
    case FrameType::Waiting:
    case FrameType::NotEntered: {
      const Route route = Route::of(header);
      if (!identity_.isRank(route.from) || !identity_.isRank(route.to) || route.from == identity_.rank ||
          route.from == route.to) {
        throw violation(peer, "a question between ranks that do not exist");
      }
      if (route.to == identity_.rank) {
        events_.asked(route.from, header);
      } else {
        passOn(route, header);
      }
      return;
    }
    case FrameType::Hello:
    case FrameType::HelloReply:
    case FrameType::Data:
    case FrameType::Credit:
      break;
  }
  throw violation(peer, "a frame of type " + std::to_string(static_cast<int>(header.type)) + " on a control link");
}

void ControlPlane::ask(const std::vector<Question>& questions) {
  for (const Question& question : questions) {
    if (question.to >= Route::kMaxRanks) {
      continue; // nobody asks in a group of that size
    }
    passOn(Route{identity_.rank, question.to}, question.header);
  }
  flushAll();
  act();
}

// The neighbour that is closest to `rank` around the circle, of those that are closer than this rank. So a frame comes closer with each
// link, and cannot go round in circles. Null if those have left.
ControlPlane::ControlLink* ControlPlane::towards(int rank) {
  const auto distance = [&](int from) {
    const int clockwise = (rank - from + identity_.size) % identity_.size;
    return std::min(clockwise, identity_.size - clockwise);
  };
  int closest = distance(identity_.rank);
  ControlLink* next = nullptr;
  for (const auto& entry : links_) {
    if (!entry.second->down && distance(entry.first) < closest) {
      closest = distance(entry.first);
      next = entry.second.get();
    }
  }
  return next;
}

void ControlPlane::passOn(const Route& route, const FrameHeader& question) {
  ControlLink* const next = towards(route.to);
  if (next != nullptr && next->out.size() < kMostQueued) {
    FrameHeader header = question;
    route.writeTo(header);
    sendTo(*next, header, "");
  }
}

void ControlPlane::flushAll() {
  for (const auto& entry : links_) {
    ControlLink& link = *entry.second;
    if (link.down || link.waits_for_room || link.out.empty()) {
      continue;
    }
    try {
      flush(link);
    } catch (const Error& error) {
      linkBroke(link, error);
    }
  }
}

} // namespace pycomm
