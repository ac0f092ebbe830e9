#include "engine/data/messages.h"

#include <algorithm>
#include <exception>
#include <vector>

#include "engine/data/credit.h"
#include "engine/data/matching.h"
#include "engine/report/failure_text.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

std::shared_ptr<const PreparedSchedule> receiveFrom(
    int from,
    const GroupIdentity& identity,
    const Descriptor& descriptor) {
  ScheduleRequest request;
  request.kind = Collective::Recv;
  request.rank = identity.rank;
  request.size = identity.size;
  request.root = from;
  request.dtype = descriptor.dtype;
  request.numel = descriptor.numel;
  return prepare(makeSchedule(request));
}

} // namespace

// ---- posting

void Messages::post(const std::shared_ptr<Operation>& message) {
  next_deadline_ = std::min(next_deadline_, message->request().deadline.instant());
  if (message->request().receives) {
    postReceive(message);
  } else {
    postSend(message);
  }
}

void Messages::postSend(const std::shared_ptr<Operation>& message) {
  const Operation::Request& request = message->request();
  const int peer = request.peer;
  const PointToPoint::Name name = names_.nameSend(peer);
  message->identify(OperationId{name.id, -1}, request.schedule, identity_.rank, name.index);
  SendQueue& queue = sends_[peer];
  const bool wanted = queue.takeMissed(request.descriptor.tag) && mostAnnounced(queue) > 0;
  const bool has_place = queue.empty() && hasPlace(peer, *message);
  if (wanted || has_place) {
    begin(message, !has_place || !goesEagerly(*message));
    return;
  }
  queue.push(message);
  lane_.addBusy(1);
}

void Messages::postReceive(const std::shared_ptr<Operation>& message) {
  const int peer = message->request().peer;
  const uint32_t tag = message->request().descriptor.tag;
  const uint64_t ticket = next_ticket_++;
  unmatched_.emplace(ticket, message);
  lane_.addBusy(1);
  names_.postReceive(ticket, peer, tag);
  beginMatched();
  if (unmatched_.count(ticket) != 0) {
    askSoon(peer, tag);
  }
}

bool Messages::goesEagerly(const Operation& message) const noexcept {
  return static_cast<int64_t>(message.request().input.nbytes) <= tables_.limits.eager_nbytes;
}

bool Messages::hasPlace(int peer, const Operation& message) const {
  if (!goesEagerly(message)) {
    const auto queue = sends_.find(peer);
    return queue == sends_.end() || queue->second.announced.size() < tables_.limits.max_ahead / 4;
  }
  const std::vector<Edge>& edges = message.request().schedule->outgoing;
  return credit::hasRoom(tables_, peer, edges.front().nbytes, edges.front().steps.size());
}

// ---- beginning

void Messages::begin(const std::shared_ptr<Operation>& message, bool announced) {
  const Operation::Request& request = message->request();
  if (announced) {
    try {
      sends_[request.peer].announced.insert(request.id.id);
    } catch (...) {
      owner_.cannotBegin(message);
      throw;
    }
  }
  owner_.begin(message);
}

void Messages::beginQueued(int peer) {
  const auto queue = sends_.find(peer);
  if (queue == sends_.end()) {
    return;
  }
  SendQueue& waiting = queue->second;
  while (!waiting.empty() && hasPlace(peer, *waiting.first()) && !tables_.failed) {
    const std::shared_ptr<Operation> next = waiting.takeFirst();
    lane_.addBusy(-1);
    begin(next, !goesEagerly(*next));
  }
}

void Messages::beginMatched() {
  for (const PointToPoint::Match& match : names_.takeMatches()) {
    const auto found = unmatched_.find(match.ticket);
    if (found == unmatched_.end()) {
      continue; // it has ended, with the group
    }
    const std::shared_ptr<Operation> message = found->second;
    const Operation::Request& request = message->request();
    std::shared_ptr<const PreparedSchedule> schedule = request.schedule;
    if (schedule == nullptr) { // from any rank: only now is there an edge
      schedule = receiveFrom(match.from, identity_, request.descriptor);
    }
    message->identify(OperationId{match.name.id, -1}, std::move(schedule), match.from, match.name.index);
    owner_.begin(message);
    unmatched_.erase(match.ticket); // only now: if it cannot begin, the group's failure finds it here
    lane_.addBusy(-1);
    askSoon(request.peer, request.descriptor.tag); // for the next one
  }
}

void Messages::ended(const Operation& message) {
  const Operation::Request& request = message.request();
  if (request.descriptor.kind != Collective::Send || request.receives) {
    return;
  }
  const auto queue = sends_.find(request.peer);
  if (queue != sends_.end() && queue->second.announced.erase(request.id.id) != 0) {
    beginQueued(request.peer);
  }
}

// The receiver of a message looks at it before the protocol does: if a receive waits for it, the operation is posted by the time the
// protocol sees the frame, and the payload goes straight to its place.
bool Messages::arrived(int peer, const FrameHeader& header, bool running) {
  const bool self = peer == identity_.rank;
  const bool reply = header.type == FrameType::Waiting || header.type == FrameType::Credit;
  if (!reply && header.type != FrameType::Data) {
    return true; // it is not about the message that it describes
  }
  const bool mine = self ? (header.op_id & PointToPoint::kSelfBit) == 0 : header.root == identity_.rank;
  const int from = mine ? identity_.rank : peer;
  const int to = mine ? peer : identity_.rank;
  const PointToPoint::Name name{header.op_id, header.digest};
  if (header.root != from || !names_.isNameOf(from, to, name)) {
    matching::violated(tables_, peer, header, "a message that has the name of another operation");
    return false;
  }
  if (reply && mine && !running && names_.hasSent(peer, header.digest)) {
    return false; // what its receiver said when it had left here already
  }
  const bool asks = header.type == FrameType::Waiting && header.aux == 0; // else it answers
  const bool announces = header.type == FrameType::Data || asks;
  const bool known =
      running || matching::isKnown(tables_, peer, header.op_id) || matching::hasEnded(tables_, header.op_id);
  if (announces && !known && !mine) {
    not_entered_.erase(peer);
    names_.arrived(peer, header.tag, name);
    beginMatched();
  }
  return true;
}

// ---- the end

void Messages::endAll(const std::function<void(Operation&)>& end) noexcept {
  const auto unmatched = std::exchange(unmatched_, {});
  auto sends = std::exchange(sends_, {});
  asks_of_.clear();
  asks_.clear();
  lane_.addBusy(-static_cast<int>(unmatched.size()));
  for (const auto& entry : unmatched) {
    end(*entry.second);
  }
  for (auto& entry : sends) {
    while (!entry.second.empty()) {
      lane_.addBusy(-1);
      end(*entry.second.takeFirst());
    }
  }
}

void Messages::checkDeadlines(TimePoint now) {
  if (now < next_deadline_) {
    return;
  }
  TimePoint next = TimePoint::max();
  const auto isOver = [&](const Operation& message) {
    const Deadline deadline = message.request().deadline;
    next = std::min(next, deadline.expired(now) ? now + kReportAgain : deadline.instant());
    return deadline.expired(now);
  };
  for (const auto& entry : sends_) {
    entry.second.forEach([&](const Operation& message) {
      if (isOver(message)) {
        owner_.notice(timedOut(message, 0, 0, entry.first, std::nullopt, identity_));
      }
    });
  }
  for (const auto& entry : unmatched_) {
    if (isOver(*entry.second)) {
      owner_.notice(noMessage(*entry.second, entry.first));
    }
  }
  next_deadline_ = next; // last: if a report was lost for want of memory, the next tick looks again
}

ErrorRecord Messages::noMessage(const Operation& operation, uint64_t ticket) const {
  const Operation::Request& request = operation.request();
  const auto waiting = names_.waitingUnder(request.descriptor.tag);
  const bool after_any =
      !waiting.empty() && waiting.front().first == PointToPoint::kAnyRank && waiting.front().second < ticket;
  if (request.peer == PointToPoint::kAnyRank || after_any) {
    return unmatched(operation, identity_);
  }
  std::optional<NotEntered> missing;
  const auto said = not_entered_.find(request.peer);
  if (said != not_entered_.end()) {
    missing = NotEntered{request.peer, said->second};
  }
  return timedOut(operation, 0, static_cast<int64_t>(request.output.nbytes), request.peer, missing, identity_);
}

// ---- questions of the owner

const Operation* Messages::oldest() const noexcept {
  const Operation* oldest = unmatched_.empty() ? nullptr : unmatched_.begin()->second.get();
  for (const auto& entry : sends_) {
    const Operation* const first = entry.second.first();
    if (first != nullptr && (oldest == nullptr || first->issuedAt() < oldest->issuedAt())) {
      oldest = first;
    }
  }
  return oldest;
}

const Operation* Messages::firstTo(int peer) const noexcept {
  const auto queue = sends_.find(peer);
  return queue == sends_.end() ? nullptr : queue->second.first();
}

// A receive that has a message stays in unmatched_ until it has begun.
const Operation* Messages::firstFrom(int peer) const noexcept {
  if (!waitsFor(peer)) {
    return nullptr;
  }
  const auto found = std::find_if(
      unmatched_.begin(), unmatched_.end(), [&](const auto& entry) { return entry.second->request().peer == peer; });
  return found == unmatched_.end() ? nullptr : found->second.get();
}

bool Messages::has(const Operation& operation) const noexcept {
  const auto queues = [&](const auto& entry) {
    bool queued = false;
    entry.second.forEach([&](const Operation& message) { queued = queued || &message == &operation; });
    return queued;
  };
  return std::any_of(
             unmatched_.begin(),
             unmatched_.end(),
             [&](const auto& entry) { return entry.second.get() == &operation; }) ||
      std::any_of(sends_.begin(), sends_.end(), queues);
}

Messages::Usage Messages::usage() const noexcept {
  Usage usage;
  for (const auto& entry : sends_) {
    usage.queued_sends += entry.second.size();
  }
  usage.receives = unmatched_.size();
  usage.asks = asks_.size();
  usage.tags = names_.tags();
  return usage;
}

} // namespace pycomm
