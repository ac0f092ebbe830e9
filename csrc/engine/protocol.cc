#include "engine/protocol.h"

#include <algorithm>
#include <utility>

#include "engine/mismatch.h"

namespace pycomm {
namespace {

constexpr size_t kRecent = 256;

} // namespace

Protocol::Protocol(Config config) : config_(std::move(config)), peers_(static_cast<size_t>(config_.size)) {}

void Protocol::send(int peer, const FrameHeader& header) {
  Action action;
  action.kind = Action::Kind::Send;
  action.peer = peer;
  action.header = header;
  addressTo(peer, action.header);
  actions_.push_back(std::move(action));
}

void Protocol::fail(ErrorRecord record) {
  if (failed_) {
    return; // the first error wins
  }
  failed_ = true;
  Action action;
  action.kind = Action::Kind::Fail;
  action.record = std::move(record);
  actions_.push_back(std::move(action));
}

FrameHeader Protocol::headerFor(uint64_t op_id, FrameType type, int peer) const {
  FrameHeader header;
  header.type = type;
  header.group = config_.group;
  header.epoch = config_.epoch;
  header.op_id = op_id;
  const auto found = ops_.find(op_id);
  if (found != ops_.end()) {
    found->second.descriptor.writeTo(header);
    addressTo(peer, header);
  }
  return header;
}

void Protocol::posted(
    const OperationId& id,
    const Descriptor& descriptor,
    const PreparedSchedule& schedule,
    TimePoint now) {
  Op& op = ops_[id.id];
  op.id = id;
  op.descriptor = descriptor;
  op.since = now;
  for (const Edge& edge : schedule.incoming) {
    op.incoming.push_back(stateOf(edge));
  }
  for (const Edge& edge : schedule.outgoing) {
    op.outgoing.push_back(stateOf(edge));
  }
  last_posted_ = id;
  highest_sequence_ = std::max(highest_sequence_, id.sequence);
  last_descriptor_ = descriptor;
  next_tick_ = std::min(next_tick_, now + std::chrono::milliseconds(config_.waiting_after_ms));

  for (const auto& entry : takeHeard(id.id)) {
    compare(expectedFrom(op, entry.first), entry.first, entry.second.descriptor, id);
    if (EdgeState* edge = edgeTo(op.outgoing, entry.first)) {
      edge->limit = std::max(edge->limit, entry.second.limit);
    }
    if (EdgeState* edge = edgeTo(op.incoming, entry.first)) {
      edge->passed = entry.second.frames;
      edge->shown = true;
    }
  }
  if (descriptor.kind == Collective::Send) {
    announce(op);
  }
  for (EdgeState& edge : op.incoming) {
    if (edge.total > config_.eager_nbytes || crowded(edge.peer)) {
      grant(op, edge);
    }
  }
}

// A message concerns two ranks only, so nobody else is ever asked about it. One that cannot go eagerly is announced at once: its
// receiver could not find it otherwise.
void Protocol::announce(Op& op) {
  op.told_everyone = true;
  op.told_again = true;
  for (const EdgeState& edge : op.outgoing) {
    if (!hasRoom(edge.peer, edge.total, edge.frames)) {
      op.told_waiting = true;
      send(edge.peer, headerFor(op.id.id, FrameType::Waiting, edge.peer));
    }
  }
}

void Protocol::ended(uint64_t op_id) {
  const auto found = ops_.find(op_id);
  if (found == ops_.end()) {
    return;
  }
  keepRecent(op_id, found->second.descriptor);
  for (const EdgeState& edge : found->second.outgoing) {
    keepPast(edge, op_id);
  }
  for (EdgeState& edge : found->second.incoming) {
    forget(edge);
  }
  ops_.erase(found);
  next_tick_ = std::min(next_tick_, next_asks_);
}

std::map<int, Protocol::HeardFrom> Protocol::takeHeard(uint64_t op_id) {
  const auto found = heard_.find(op_id);
  if (found == heard_.end()) {
    return {};
  }
  std::map<int, HeardFrom> ranks = std::move(found->second.ranks);
  heard_.erase(found);
  for (const auto& entry : ranks) {
    Peer& peer = peers_[static_cast<size_t>(entry.first)];
    --peer.heard(entry.second.descriptor.kind == Collective::Send);
    peer.limits -= entry.second.limit == kNoLimit ? 0 : 1;
  }
  return ranks;
}

void Protocol::keepRecent(uint64_t op_id, const Descriptor& descriptor) {
  recent_[op_id] = descriptor;
  recent_order_.push_back(op_id);
  if (recent_order_.size() > kRecent) {
    recent_.erase(recent_order_.front());
    recent_order_.pop_front();
  }
}

void Protocol::passed(const OperationId& id, const Descriptor& descriptor) {
  if (ops_.count(id.id) != 0 || recent_.count(id.id) != 0) {
    return;
  }
  keepRecent(id.id, descriptor);
  if (id.sequence > highest_sequence_) { // posted later than what the protocol saw last
    highest_sequence_ = id.sequence;
    last_posted_ = id;
    last_descriptor_ = descriptor;
  }
  for (const auto& entry : takeHeard(id.id)) {
    compare(descriptor, entry.first, entry.second.descriptor, id);
  }
}

void Protocol::compare(const Descriptor& mine, int peer, const Descriptor& theirs, const OperationId& id) {
  if (mine != theirs) {
    fail(disagreement(config_.hosts, config_.rank, mine, peer, theirs, id));
  }
}

ErrorRecord Protocol::violation(int peer, const FrameHeader& header, const std::string& what) const {
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  record.rank = config_.rank;
  record.host = config_.hosts[static_cast<size_t>(config_.rank)];
  record.peer = peer;
  record.peer_host = config_.hosts[static_cast<size_t>(peer)];
  record.op = collectiveName(Descriptor::readFrom(header).kind);
  record.sequence = (header.op_id & kDerivedIdBit) != 0 ? -1 : static_cast<int64_t>(header.op_id);
  record.phase = "matching";
  record.summary = "Rank " + std::to_string(peer) + " sent what the protocol does not allow: " + what + ".";
  record.hint = "check that all ranks run the same build of pycomm; otherwise report this as a bug";
  return record;
}

Protocol::HeardFrom* Protocol::remember(int peer, const FrameHeader& header, TimePoint now) {
  const Descriptor theirs = Descriptor::readFrom(header);
  Heard& heard = heard_[header.op_id];
  if (heard.ranks.empty()) {
    heard.since = now;
  }
  const auto inserted = heard.ranks.emplace(peer, HeardFrom{theirs, kNoLimit, 0});
  HeardFrom& from = inserted.first->second;
  if (inserted.second) {
    ++peers_[static_cast<size_t>(peer)].heard(theirs.kind == Collective::Send);
  } else if (from.descriptor != theirs) {
    fail(violation(peer, header, "two different descriptors for one operation"));
    return nullptr;
  }
  return &from;
}

Protocol::Verdict Protocol::arrived(int peer, const FrameHeader& header, TimePoint now) {
  if (failed_) {
    return Verdict::Ignore;
  }
  if (header.group != config_.group || header.epoch != config_.epoch) {
    fail(violation(peer, header, "a frame of another group or epoch"));
    return Verdict::Ignore;
  }
  const auto found = ops_.find(header.op_id);
  Op* op = found == ops_.end() ? nullptr : &found->second;
  const bool about_operation = header.op_id != 0 && header.type != FrameType::NotEntered;
  if (about_operation) {
    if (op != nullptr) {
      compare(expectedFrom(*op, peer), peer, Descriptor::readFrom(header), op->id);
      shown(*op, peer);
    } else {
      const auto recent = recent_.find(header.op_id);
      if (recent != recent_.end()) {
        const bool derived = (header.op_id & kDerivedIdBit) != 0;
        Descriptor theirs = Descriptor::readFrom(header);
        theirs.numel = theirs.kind == Collective::AllToAll ? recent->second.numel : theirs.numel;
        compare(
            recent->second, peer, theirs, OperationId{header.op_id, derived ? -1 : static_cast<int64_t>(header.op_id)});
        if (!failed_ && header.type == FrameType::Data) {
          fail(violation(peer, header, "data of an operation that has ended"));
        }
        return Verdict::Ignore;
      }
    }
    if (failed_) {
      return Verdict::Ignore;
    }
  }
  switch (header.type) {
    case FrameType::Data:
      return dataArrived(peer, header, op, now);
    case FrameType::Credit:
      creditArrived(peer, header, op, now);
      return Verdict::Ignore;
    case FrameType::Waiting:
      waitingArrived(peer, header, op, now);
      return Verdict::Ignore;
    case FrameType::NotEntered:
      if (op != nullptr) {
        op->missing.push_back(Missing{peer, lastText(header)});
        standOff(*op, peer, now);
      }
      return Verdict::Ignore;
    case FrameType::Hello:
    case FrameType::HelloReply:
    case FrameType::Failure:
    case FrameType::Heartbeat:
    case FrameType::Goodbye:
      break;
  }
  fail(violation(peer, header, "a frame of type " + std::to_string(static_cast<int>(header.type)) + " on a bulk link"));
  return Verdict::Ignore;
}

std::vector<Protocol::Action> Protocol::takeActions() {
  return std::exchange(actions_, {});
}

} // namespace pycomm
