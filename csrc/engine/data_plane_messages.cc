// The data plane's point-to-point: which send a receive belongs to, and messages to oneself.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/data_plane.h"
#include "engine/failure_text.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

std::shared_ptr<const PreparedSchedule> receiveFrom(int from, int rank, int size, const Descriptor& descriptor) {
  ScheduleRequest request;
  request.kind = Collective::Recv;
  request.rank = rank;
  request.size = size;
  request.root = from;
  request.dtype = descriptor.dtype;
  request.wire_dtype = descriptor.dtype;
  request.numel = descriptor.numel;
  return prepare(makeSchedule(request));
}

} // namespace

void DataPlane::postPointToPoint(std::shared_ptr<Operation> operation) {
  const Operation::Request& request = operation->request();
  if (!request.receives) {
    const PointToPoint::Name name = point_to_point_.nameSend(request.peer, request.descriptor.tag);
    operation->settle(OperationId{name.id, -1}, request.schedule, identity_.rank, name.index);
    begin(std::move(operation));
    return;
  }
  const uint64_t ticket = next_ticket_++;
  const int from = request.peer;
  const uint32_t tag = request.descriptor.tag;
  unmatched_.emplace(ticket, std::move(operation));
  lane_.addBusy(1);
  point_to_point_.postReceive(ticket, from, tag);
  beginMatched();
  const auto left = std::find(left_.begin(), left_.end(), true);
  if (!unmatched_.empty() && left != left_.end()) {
    missSenders(static_cast<int>(left - left_.begin()));
  }
}

// A receive from any rank can still be served as long as anyone is there, or a link may bring what was sent before its sender left: a
// goodbye on the control link overtakes it, and may even be read before the Hello of the link that it came on.
void DataPlane::missSenders(int left) {
  if (!nobodyCanSend()) {
    return;
  }
  const auto missing = [&](size_t peer) { return in_[peer] == nullptr && static_cast<int>(peer) != identity_.rank; };
  bool on_its_way = false;
  for (size_t peer = 0; peer < in_.size(); ++peer) {
    on_its_way = on_its_way || missing(peer);
  }
  ErrorRecord record = peerLeftUs(left, *unmatched_.begin()->second, identity_);
  if (on_its_way) {
    const auto found = suspicions_.find(left);
    if (found == suspicions_.end() || found->second.doubt) {
      const TimePoint due = Clock::now() + std::chrono::milliseconds(kLastLinkMs);
      suspicions_.insert_or_assign(left, Suspicion{std::move(record), due, true});
    }
  } else {
    notice(std::move(record));
  }
}

// Whether a receive from any rank waits although all others have left and no link of theirs is open.
bool DataPlane::nobodyCanSend() const noexcept {
  const bool alone = std::count(left_.begin(), left_.end(), true) == identity_.size - 1;
  const bool open =
      std::any_of(in_.begin(), in_.end(), [](const auto& port) { return port != nullptr && !port->ended; });
  return alone && !open && !unmatched_.empty();
}

void DataPlane::beginMatched() {
  for (const PointToPoint::Match& match : point_to_point_.takeMatches()) {
    const auto found = unmatched_.find(match.ticket);
    std::shared_ptr<Operation> operation = std::move(found->second);
    unmatched_.erase(found);
    lane_.addBusy(-1);
    const Operation::Request& request = operation->request();
    std::shared_ptr<const PreparedSchedule> schedule = request.schedule;
    if (schedule == nullptr) { // from any rank: only now is there an edge
      schedule = receiveFrom(match.from, identity_.rank, identity_.size, request.descriptor);
    }
    operation->settle(OperationId{match.name.id, -1}, std::move(schedule), match.from, match.name.index);
    begin(std::move(operation));
  }
}

// The receiver of a message looks at it before the protocol does: if a receive from any rank waits for it, the operation is posted by
// the time the protocol sees the frame, and the payload goes straight to its place.
void DataPlane::hear(int peer, const FrameHeader& header) {
  const bool announces = header.type == FrameType::Data || header.type == FrameType::Waiting;
  const bool ours = header.group == identity_.hash && header.epoch == identity_.epoch;
  if (announces && ours && header.root == peer &&
      (peer != identity_.rank || (header.op_id & PointToPoint::kSelfBit) != 0)) {
    point_to_point_.heard(peer, header.tag, header.digest);
    beginMatched();
  }
}

bool DataPlane::isLate(int peer, const FrameHeader& header) const {
  if (header.type != FrameType::Waiting || transfers_.count(header.op_id) != 0) {
    return false;
  }
  const bool sending =
      peer == identity_.rank ? (header.op_id & PointToPoint::kSelfBit) == 0 : header.root == identity_.rank;
  return point_to_point_.isPast(sending, peer, header.tag, header.digest);
}

void DataPlane::deliverToSelf() {
  const OutFrame frame = std::move(to_self_.front());
  to_self_.pop_front();
  FrameHeader header = frame.header;
  if (header.op_id != 0) { // pool room concerns no operation
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
