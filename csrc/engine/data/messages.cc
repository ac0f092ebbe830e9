#include "engine/data/messages.h"

#include <algorithm>
#include <vector>

#include "engine/data/credit.h"
#include "engine/data/data_plane.h"
#include "engine/data/matching.h"
#include "engine/data/waiting.h"
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

SendQueue& Messages::queueOf(int peer) {
  std::unique_ptr<SendQueue>& queue = tables_.peer(peer).queue;
  queue = queue != nullptr ? std::move(queue) : std::make_unique<SendQueue>();
  return *queue;
}

void Messages::hold(const std::shared_ptr<Operation>& message) {
  const Operation::Request& request = message->request();
  if (!request.receives) {
    name(message);
    queueOf(request.peer).push(message, true);
    data_loop_.addBusy(1);
    return;
  }
  held_.emplace(message.get(), std::nullopt);
  try {
    postReceive(message);
  } catch (...) {
    if (!has(*message)) {
      held_.erase(message.get());
    }
    throw;
  }
}

void Messages::release(const std::shared_ptr<Operation>& message) {
  const Operation::Request& request = message->request();
  next_deadline_ = std::min(next_deadline_, request.deadline.instant());
  if (request.receives) {
    const auto found = held_.extract(message.get());
    if (!found.empty() && found.mapped()) {
      beginReceive(*found.mapped());
    }
    return;
  }
  SendQueue& queue = queueOf(request.peer);
  queue.release(*message);
  const uint32_t tag = request.descriptor.tag;
  if (mostAnnounced(queue) > 0 && queue.takeMissed(tag)) { // its receiver has asked meanwhile
    if (const std::shared_ptr<Operation> wanted = queue.takeUnder(tag)) {
      data_loop_.addBusy(-1);
      begin(wanted, true);
    } else {
      queue.miss(tag); // a message before it is held still
    }
  }
  beginQueued(request.peer);
}

void Messages::name(const std::shared_ptr<Operation>& send) {
  const Operation::Request& request = send->request();
  const PointToPoint::Name name = names_.nameSend(request.peer);
  send->identify(OperationId{name.id, -1}, request.schedule, identity_.rank, name.index);
}

void Messages::postSend(const std::shared_ptr<Operation>& message) {
  const Operation::Request& request = message->request();
  const int peer = request.peer;
  name(message);
  SendQueue& queue = queueOf(peer);
  const bool behind = queue.has(request.descriptor.tag);
  const bool wanted = !behind && queue.takeMissed(request.descriptor.tag) && mostAnnounced(queue) > 0;
  const bool has_place = !behind && !queue.isReady() && hasPlace(peer, *message);
  if (wanted || has_place) {
    begin(message, !has_place || !goesEagerly(*message));
    return;
  }
  queue.push(message);
  data_loop_.addBusy(1);
}

void Messages::postReceive(const std::shared_ptr<Operation>& message) {
  const int peer = message->request().peer;
  const uint32_t tag = message->request().descriptor.tag;
  const uint64_t ticket = next_ticket_++;
  tables_.receives.emplace(ticket, message);
  data_loop_.addBusy(1);
  names_.postReceive(ticket, peer, tag);
  beginMatched();
  if (tables_.receives.count(ticket) != 0) {
    askSoon(peer, tag);
  }
}

bool Messages::goesEagerly(const Operation& message) const noexcept {
  return static_cast<int64_t>(message.request().input.nbytes) <= tables_.limits.eager_nbytes;
}

bool Messages::hasPlace(int peer, const Operation& message) const {
  if (!goesEagerly(message)) {
    const SendQueue* const queue = tables_.peer(peer).queue.get();
    return queue == nullptr || queue->maybe_announced.size() < tables_.limits.max_ahead / 4;
  }
  const std::vector<Edge>& edges = message.request().schedule->outgoing;
  return credit::hasRoom(tables_, peer, edges.front().nbytes, edges.front().steps.size());
}

// ---- beginning

void Messages::begin(const std::shared_ptr<Operation>& message, bool maybe_announced) {
  const Operation::Request& request = message->request();
  if (maybe_announced) {
    try {
      queueOf(request.peer).maybe_announced.insert(request.id.id);
    } catch (...) {
      plane_.cannotBegin(message);
      throw;
    }
  }
  plane_.begin(message);
}

void Messages::beginQueued(int peer) {
  SendQueue* const queue = tables_.peer(peer).queue.get();
  while (queue != nullptr && queue->isReady() && hasPlace(peer, *queue->firstReady()) && !tables_.failed) {
    const std::shared_ptr<Operation> next = queue->takeFirst();
    data_loop_.addBusy(-1);
    begin(next, !goesEagerly(*next));
  }
}

void Messages::beginMatched() {
  for (const PointToPoint::Match& match : names_.takeMatches()) {
    const auto found = tables_.receives.find(match.ticket);
    if (found == tables_.receives.end()) {
      continue; // it has ended, with the group
    }
    const std::shared_ptr<Operation> message = found->second; // a copy: beginReceive() takes it out
    if (const auto held = held_.find(message.get()); held != held_.end()) {
      held->second = match; // its frames are kept as those of an unexpected message
    } else {
      beginReceive(match);
    }
    askSoon(message->request().peer, message->request().descriptor.tag); // for the next one
  }
}

void Messages::beginReceive(const PointToPoint::Match& match) {
  const std::shared_ptr<Operation> message = tables_.receives.at(match.ticket);
  const Operation::Request& request = message->request();
  std::shared_ptr<const PreparedSchedule> schedule = request.schedule;
  if (schedule == nullptr) { // from any rank: only now is there an edge
    schedule = receiveFrom(match.from, identity_, request.descriptor);
  }
  message->identify(OperationId{match.name.id, -1}, std::move(schedule), match.from, match.name.index);
  plane_.begin(message);
  tables_.receives.erase(match.ticket); // only now: if it cannot begin, the group's failure finds it here
  data_loop_.addBusy(-1);
  const bool from_any = request.peer == PointToPoint::kAnyRank;
  for (int peer = from_any ? 0 : match.from; peer < (from_any ? identity_.size : match.from + 1); ++peer) {
    forgetQuestions(tables_.peer(peer));
  }
}

void Messages::forgetQuestions(PeerRow& peer) const noexcept {
  if (peer.receives == 0 && tables_.receives_from_any == 0 && peer.messages == 0) {
    peer.asked = 0; // all that they have brought is received
  }
}

void Messages::ended(const Operation& message) {
  const Operation::Request& request = message.request();
  if (request.descriptor.kind != Collective::Send || request.receives) {
    return;
  }
  SendQueue* const queue = tables_.peer(request.peer).queue.get();
  if (queue != nullptr && queue->maybe_announced.erase(request.id.id) != 0) {
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
  const bool asks = header.type == FrameType::Waiting && !waiting::answers(header);
  const bool announces = header.type == FrameType::Data || asks;
  const bool known =
      running || matching::isKnown(tables_, peer, header.op_id) || matching::hasEnded(tables_, header.op_id);
  if (announces && !known && !mine) {
    tables_.peer(peer).lacked.clear();
    names_.arrived(peer, header.tag, name);
    beginMatched();
  }
  return true;
}

// ---- the end

void Messages::endAll(const std::function<void(Operation&)>& end) noexcept {
  const auto unmatched = std::exchange(tables_.receives, {});
  asks_of_.clear();
  asks_.clear();
  data_loop_.addBusy(-static_cast<int>(unmatched.size()));
  for (const auto& entry : unmatched) {
    end(*entry.second);
  }
  held_.clear();
  for (PeerRow& peer : tables_.peers) {
    if (const std::unique_ptr<SendQueue> queue = std::move(peer.queue)) {
      queue->takeAll([&](Operation& message) {
        data_loop_.addBusy(-1);
        end(message);
      });
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
    next = std::min(next, deadline.expired(now) ? now + kSayAgain : deadline.instant());
    return deadline.expired(now);
  };
  for (const PeerRow& peer : tables_.peers) {
    if (peer.queue == nullptr) {
      continue;
    }
    peer.queue->forEach([&](const Operation& message, const Operation* behind) {
      if (&message == behind || !isOver(message)) {
        return; // the deadline of a held one is that of WatchedOperations
      }
      plane_.notice(
          behind != nullptr ? inputLate(*behind, 0, identity_)
                            : timedOut(message, 0, 0, message.request().peer, std::nullopt, identity_));
    });
  }
  for (const auto& entry : tables_.receives) {
    if (held_.count(entry.second.get()) == 0 && isOver(*entry.second)) {
      plane_.notice(noMessage(*entry.second, entry.first));
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
  if (const std::string& last = tables_.peer(request.peer).lacked; !last.empty()) {
    missing = NotEntered{request.peer, last};
  }
  return timedOut(operation, 0, static_cast<int64_t>(request.output.nbytes), request.peer, missing, identity_);
}

// ---- questions

const Operation* Messages::oldest() const noexcept {
  const Operation* oldest = tables_.receives.empty() ? nullptr : tables_.receives.begin()->second.get();
  for (const PeerRow& peer : tables_.peers) {
    const Operation* const first = peer.queue == nullptr ? nullptr : peer.queue->oldest();
    if (first != nullptr && (oldest == nullptr || first->issuedAt() < oldest->issuedAt())) {
      oldest = first;
    }
  }
  return oldest;
}

bool Messages::has(const Operation& operation) const noexcept {
  const auto queued = [&](const PeerRow& peer) {
    bool found = false;
    if (peer.queue != nullptr) {
      peer.queue->forEach([&](const Operation& message, const Operation*) { found = found || &message == &operation; });
    }
    return found;
  };
  return std::any_of(
             tables_.receives.begin(),
             tables_.receives.end(),
             [&](const auto& entry) { return entry.second.get() == &operation; }) ||
      std::any_of(tables_.peers.begin(), tables_.peers.end(), queued);
}

Messages::Usage Messages::usage() const noexcept {
  Usage usage;
  for (const PeerRow& peer : tables_.peers) {
    usage.queued_sends += peer.queue == nullptr ? 0 : peer.queue->size();
  }
  usage.receives = tables_.receives.size();
  usage.asks = asks_.size();
  usage.tags = names_.tags();
  return usage;
}

} // namespace pycomm
