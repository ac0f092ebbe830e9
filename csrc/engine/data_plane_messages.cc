// The data plane's point-to-point: which send a receive belongs to, and messages to oneself.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
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

bool DataPlane::goesEagerly(const Operation& message) const noexcept {
  return static_cast<int64_t>(message.request().input.nbytes) <= options_.limits.eager_nbytes;
}

bool DataPlane::hasPlace(int peer, const Operation& message) const {
  if (!goesEagerly(message)) {
    const auto queue = sends_.find(peer);
    return queue == sends_.end() || queue->second.announced.size() < options_.limits.max_ahead / 4;
  }
  const std::vector<Edge>& edges = message.request().schedule->outgoing;
  return protocol_.hasRoom(peer, edges.front().nbytes, edges.front().steps.size());
}

bool DataPlane::hasQueued(int peer) const noexcept {
  const auto queue = sends_.find(peer);
  return queue != sends_.end() && !queue->second.empty();
}

// Of those that have not begun.
const Operation* DataPlane::oldestMessage() const noexcept {
  const Operation* oldest = unmatched_.empty() ? nullptr : unmatched_.begin()->second.get();
  for (const auto& entry : sends_) {
    const Operation* const first = entry.second.first();
    if (first != nullptr && (oldest == nullptr || first->issuedAt() < oldest->issuedAt())) {
      oldest = first;
    }
  }
  return oldest;
}

void DataPlane::postPointToPoint(std::shared_ptr<Operation> operation) {
  const Operation::Request& request = operation->request();
  const int peer = request.peer;
  if (!request.receives) {
    const PointToPoint::Name name = point_to_point_.nameSend(peer);
    operation->settle(OperationId{name.id, -1}, request.schedule, identity_.rank, name.index);
    SendQueue& queue = sends_[peer];
    const bool wanted = queue.takeMissed(request.descriptor.tag) && mostAnnounced(queue) > 0;
    const bool has_place = queue.empty() && hasPlace(peer, *operation);
    if (wanted || has_place) {
      const bool announced = !has_place || !goesEagerly(*operation);
      beginMessage(std::move(operation), announced);
      return;
    }
    queue.push(operation);
    lane_.addBusy(1);
    if (left_[static_cast<size_t>(peer)]) {
      missMessagesOf(peer);
    }
    return;
  }
  const uint64_t ticket = next_ticket_++;
  const uint32_t tag = request.descriptor.tag;
  unmatched_.emplace(ticket, std::move(operation));
  lane_.addBusy(1);
  point_to_point_.postReceive(ticket, peer, tag);
  beginMatched();
  if (unmatched_.count(ticket) == 0) {
    return;
  }
  askSoon(peer, tag);
  if (peer != PointToPoint::kAnyRank && left_[static_cast<size_t>(peer)]) {
    missMessagesOf(peer);
  }
  const auto left = std::find(left_.begin(), left_.end(), true);
  if (left != left_.end()) {
    missSenders(static_cast<int>(left - left_.begin()));
  }
}

void DataPlane::beginMessage(std::shared_ptr<Operation> operation, bool announced) {
  const Operation::Request& request = operation->request();
  if (announced) {
    sends_[request.peer].announced.insert(request.id.id);
  }
  begin(std::move(operation));
}

void DataPlane::messageEnded(const Operation& message) {
  const Operation::Request& request = message.request();
  if (request.descriptor.kind != Collective::Send || request.receives) {
    return;
  }
  const auto queue = sends_.find(request.peer);
  if (queue != sends_.end() && queue->second.announced.erase(request.id.id) != 0) {
    beginQueued(request.peer);
  }
}

void DataPlane::beginQueued(int peer) {
  const auto queue = sends_.find(peer);
  if (queue == sends_.end()) {
    return;
  }
  SendQueue& waiting = queue->second;
  while (!waiting.empty() && hasPlace(peer, *waiting.first()) && !protocol_.failed()) {
    const std::shared_ptr<Operation> next = waiting.takeFirst();
    lane_.addBusy(-1);
    const bool announced = !goesEagerly(*next);
    orRefuse(next, [&] { beginMessage(next, announced); });
  }
}

// The peer has left. What is queued for it will not leave here; what is due from it may still be on a link.
void DataPlane::missMessagesOf(int left) {
  const auto queue = sends_.find(left);
  const Operation* const queued = queue == sends_.end() ? nullptr : queue->second.first();
  if (queued != nullptr) {
    const auto lost = lost_.find(left); // it is still there: what broke is the link
    notice(lost != lost_.end() ? lost->second : peerLeftUs(left, *queued, identity_));
    return;
  }
  const auto receive = std::find_if(
      unmatched_.begin(), unmatched_.end(), [&](const auto& entry) { return entry.second->request().peer == left; });
  if (receive == unmatched_.end()) {
    return;
  }
  const std::unique_ptr<InPort>& port = in_[static_cast<size_t>(left)];
  if (port != nullptr && port->ended) {
    notice(peerLeftUs(left, *receive->second, identity_));
  } else if (port == nullptr) {
    const TimePoint due = Clock::now() + std::chrono::milliseconds(kLastLinkMs);
    suspicions_.emplace(left, Suspicion{peerLeftUs(left, *receive->second, identity_), due, true});
  }
}

ErrorRecord DataPlane::noMessage(const Operation& operation, uint64_t ticket) const {
  const Operation::Request& request = operation.request();
  const auto waiting = point_to_point_.waitingUnder(request.descriptor.tag);
  const bool after_any =
      !waiting.empty() && waiting.front().first == PointToPoint::kAnyRank && waiting.front().second < ticket;
  if (request.peer == PointToPoint::kAnyRank || after_any) {
    return unmatched(operation, identity_);
  }
  std::optional<Protocol::Missing> missing;
  const auto said = not_entered_.find(request.peer);
  if (said != not_entered_.end()) {
    missing = Protocol::Missing{request.peer, said->second};
  }
  return timedOut(operation, 0, static_cast<int64_t>(request.output.nbytes), request.peer, missing, identity_);
}

// A receive from any rank can still be served as long as anyone is there, or a link may bring what was sent before its sender left: a
// goodbye on the control link overtakes it, and may even be read before the Hello of the link that it came on.
void DataPlane::missSenders(int left) {
  const Operation* const receive = withoutSenders();
  if (receive == nullptr) {
    return;
  }
  const auto missing = [&](size_t peer) { return in_[peer] == nullptr && static_cast<int>(peer) != identity_.rank; };
  bool on_its_way = false;
  for (size_t peer = 0; peer < in_.size(); ++peer) {
    on_its_way = on_its_way || missing(peer);
  }
  ErrorRecord record = peerLeftUs(left, *receive, identity_);
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

// A receive from any rank that waits although all others have left and no link of theirs is open; null if there is none.
const Operation* DataPlane::withoutSenders() const noexcept {
  const bool alone = std::count(left_.begin(), left_.end(), true) == identity_.size - 1;
  const bool open =
      std::any_of(in_.begin(), in_.end(), [](const auto& port) { return port != nullptr && !port->ended; });
  const auto receive = std::find_if(unmatched_.begin(), unmatched_.end(), [](const auto& entry) {
    return entry.second->request().peer == PointToPoint::kAnyRank;
  });
  return alone && !open && receive != unmatched_.end() ? receive->second.get() : nullptr;
}

void DataPlane::beginMatched() {
  for (const PointToPoint::Match& match : point_to_point_.takeMatches()) {
    const auto found = unmatched_.find(match.ticket);
    if (found == unmatched_.end()) {
      continue; // it has ended, with the group
    }
    const std::shared_ptr<Operation> operation = found->second;
    const Operation::Request& request = operation->request();
    std::shared_ptr<const PreparedSchedule> schedule = request.schedule;
    if (schedule == nullptr) { // from any rank: only now is there an edge
      schedule = receiveFrom(match.from, identity_.rank, identity_.size, request.descriptor);
    }
    operation->settle(OperationId{match.name.id, -1}, std::move(schedule), match.from, match.name.index);
    begin(operation);
    unmatched_.erase(match.ticket); // only now: if it cannot begin, the group's failure finds it here
    lane_.addBusy(-1);
    askSoon(request.peer, request.descriptor.tag); // for the next one
  }
}

// The receiver of a message looks at it before the protocol does: if a receive waits for it, the operation is posted by the time the
// protocol sees the frame, and the payload goes straight to its place.
void DataPlane::hear(int peer, const FrameHeader& header) {
  const bool announces = header.type == FrameType::Data || header.type == FrameType::Waiting;
  const bool first = transfers_.count(header.op_id) == 0 && !protocol_.hasHeardOf(header.op_id);
  if (announces && first && header.root == peer &&
      (peer != identity_.rank || (header.op_id & PointToPoint::kSelfBit) != 0)) {
    not_entered_.erase(peer);
    point_to_point_.heard(peer, header.tag, PointToPoint::Name{header.op_id, header.digest});
    beginMatched();
  }
}

// What the receiver of a message said when that had left here already.
bool DataPlane::isOfPastMessage(int peer, const FrameHeader& header) const {
  const bool reply = header.type == FrameType::Waiting || header.type == FrameType::Credit;
  const bool mine =
      peer == identity_.rank ? (header.op_id & PointToPoint::kSelfBit) == 0 : header.root == identity_.rank;
  return reply && mine && transfers_.count(header.op_id) == 0 && point_to_point_.hasSent(peer, header.digest);
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
