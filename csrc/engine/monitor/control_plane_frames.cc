// What control links bring, and the way of questions from neighbour to neighbour.
#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "base/fault_point.h"
#include "engine/monitor/control_link.h"
#include "engine/monitor/control_plane.h"
#include "engine/operation/issue_context.h"
#include "schedule/step.h"

namespace pycomm {
namespace {

constexpr size_t kMaxControlPayload =
    ErrorRecord::kMaxSerializedNbytes; // of a Failure or Leaving; no other frame has one

// Questions are asked again, reports of failures are not: a link that is not read must not fill with the former.
constexpr size_t kMostQueued = 4096;

// Of the largest group 16 are enough, without a detour. A frame that finds no way must end somewhere.
constexpr uint32_t kMostHops = 32;

Error violation(const GroupIdentity& identity, int peer, const std::string& what) {
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  record.summary =
      "Rank " + std::to_string(identity.job.of(peer)) + " sent what the protocol does not allow: " + what + ".";
  record.hint = "check that all ranks run the same build of pycomm; otherwise report this as a bug";
  return Error(record);
}

} // namespace

void ControlPlane::checkHeader(int peer, const FrameHeader& header) const {
  if (header.group != identity_.hash || header.epoch != identity_.epochOnWire()) {
    throw violation(identity_, peer, "a frame of another group or epoch");
  }
  const bool has_record = header.type == FrameType::Failure || header.type == FrameType::Leaving;
  if (header.payload_nbytes > (has_record ? kMaxControlPayload : 0)) {
    throw violation(
        identity_, peer, "a payload of " + std::to_string(header.payload_nbytes) + " bytes on a control link");
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
    case FrameType::Left:
      if (!identity_.isRank(header.root)) {
        throw violation(identity_, peer, "the goodbye of a rank that does not exist");
      }
      if (header.root != identity_.rank && membership_.saidGoodbye(header.root, peer)) {
        events_.left(header.root);
      }
      return;
    case FrameType::Failure:
    case FrameType::Leaving: {
      const std::string bytes(reinterpret_cast<const char*>(payload.ptr), payload.nbytes);
      std::optional<ErrorRecord> record = ErrorRecord::deserialize(bytes, identity_.size, identity_.job);
      if (!record) {
        throw violation(
            identity_, peer, "a report of a failure that cannot be read, or names a rank that does not exist");
      }
      if (header.type == FrameType::Failure) {
        membership_.reported(peer, std::move(*record), now);
      } else if (identity_.isRank(header.root)) {
        membership_.willLeave(header.root, *record, peer);
      } else {
        throw violation(identity_, peer, "the reason of a rank that does not exist");
      }
      return;
    }
    case FrameType::Waiting:
    case FrameType::NotEntered: {
      const Route route = Route::of(header);
      if (!identity_.isRank(route.from) || !identity_.isRank(route.to) || route.from == route.to) {
        throw violation(identity_, peer, "a question between ranks that do not exist");
      }
      const bool of_messages = header.op_id == kAskForMessagesId ||
          (header.type == FrameType::Waiting && header.kind == static_cast<uint8_t>(Collective::Send));
      if (header.op_id == 0 || of_messages) { // see Action::Way
        throw violation(identity_, peer, "a question that belongs on a bulk link");
      }
      if (route.to == identity_.rank) {
        events_.asked(route.from, header);
      } else {
        passOn(route, header, peer);
      }
      return;
    }
    case FrameType::Hello:
    case FrameType::HelloReply:
    case FrameType::Data:
    case FrameType::Credit:
      break;
  }
  throw violation(
      identity_, peer, "a frame of type " + std::to_string(static_cast<int>(header.type)) + " on a control link");
}

void ControlPlane::ask(const std::vector<Question>& questions) {
  for (const Question& question : questions) {
    if (identity_.size <= Route::kMaxGroupSize) { // in a larger group questions go over bulk links: see waiting.h
      passOn(Route{identity_.rank, question.to}, question.header, identity_.rank);
    }
  }
  flushAll();
  act();
}

// The neighbour that is closest to `rank` around the circle. Each link takes the frame closer, so log2 N of them are enough. Around a
// neighbour that is silent or has left there is a detour by the next best, which may be no closer: kMostHops ends what goes in circles.
ControlPlane::ControlLink* ControlPlane::towards(int rank, int from) {
  const TimePoint now = Clock::now();
  const auto cost = [&](int by) {
    const int clockwise = (rank - by + identity_.size) % identity_.size;
    const int distance = std::min(clockwise, identity_.size - clockwise);
    return std::make_tuple(distance != 0 && membership_.isSilent(by, now), distance, by);
  };
  ControlLink* next = nullptr;
  for (const auto& entry : links_) {
    const bool usable = !entry.second->down && entry.first != from && !membership_.hasLeft(entry.first);
    if (usable && (next == nullptr || cost(entry.first) < cost(next->peer))) {
      next = entry.second.get();
    }
  }
  return next;
}

void ControlPlane::passOn(Route route, const FrameHeader& question, int from) {
  ControlLink* const next = membership_.hasLeft(route.to) ? nullptr : towards(route.to, from);
  if (next == nullptr || route.hops >= kMostHops || next->out.size() >= kMostQueued) {
    return;
  }
  ++route.hops;
  FrameHeader header = question;
  route.writeTo(header);
  sendTo(*next, header, "");
}

void ControlPlane::flushAll() {
  for (const auto& entry : links_) {
    ControlLink& link = *entry.second;
    if (!link.down && !link.waits_for_room && !link.out.empty()) {
      flushOrDrop(link);
    }
  }
}

void ControlPlane::flushOrDrop(ControlLink& link) {
  try {
    flush(link);
  } catch (const Error& error) {
    writingBroke(link, error);
  }
}

} // namespace pycomm
