#include "engine/data/matching.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/data/credit.h"
#include "engine/data/waiting.h"
#include "engine/report/mismatch.h"

namespace pycomm::matching {
namespace {

/// In an all_to_all, a gather or a scatter each pair of ranks agrees on a number of elements of its own: `numel` of the frames between them.
/// Where both send something, that is what the sender has for its peer.
bool isByPair(Collective kind) noexcept {
  return kind == Collective::AllToAll || kind == Collective::Gather || kind == Collective::Scatter;
}

Descriptor between(const OperationRow& row, const EdgeRow* edge, const EdgeRow* or_else) {
  Descriptor descriptor = row.descriptor();
  edge = edge != nullptr ? edge : or_else;
  if (edge != nullptr && isByPair(descriptor.kind)) {
    descriptor.numel = edge->total / static_cast<int64_t>(elementSize(descriptor.dtype));
  }
  return descriptor;
}

Descriptor expectedFrom(const OperationRow& row, int peer) {
  return between(row, row.from(peer), row.to(peer));
}

void compare(Tables& tables, const Descriptor& mine, int peer, const Descriptor& theirs, const OperationId& id) {
  if (mine != theirs) {
    fail(tables, disagreement(tables.identity, mine, peer, theirs, id));
  }
}

// ---- operations that are over

// Both or neither. False if it is there already.
template <typename Insert>
bool keepLast(std::deque<uint64_t>& order, uint64_t op_id, const Insert& insert) {
  order.push_back(op_id);
  bool is_new = false;
  try {
    is_new = insert();
  } catch (...) {
    order.pop_back();
    throw;
  }
  if (!is_new) {
    order.pop_back();
  }
  return is_new;
}

// Its number says when a counted operation was, as a message's does.
void age(Tables& tables, uint64_t op_id, const Descriptor& descriptor) {
  if ((op_id & kDerivedIdBit) == 0 || descriptor.kind == Collective::Send) {
    return;
  }
  keepLast(tables.forgotten_order, op_id, [&] { return tables.forgotten.insert(op_id).second; });
  if (tables.forgotten_order.size() > Tables::kForgotten) {
    tables.forgotten.erase(tables.forgotten_order.front());
    tables.forgotten_order.pop_front();
  }
}

void remember(Tables& tables, uint64_t op_id, const Descriptor& descriptor) {
  if (tables.recent_order.size() == Tables::kRecent) {
    const auto oldest = tables.recent.find(tables.recent_order.front());
    age(tables, oldest->first, oldest->second); // first: without memory it stays where it is
    tables.recent.erase(oldest);
    tables.recent_order.pop_front();
  }
  keepLast(tables.recent_order, op_id, [&] { return tables.recent.insert_or_assign(op_id, descriptor).second; });
}

void noteEntered(Tables& tables, const OperationId& id, const Descriptor& descriptor) {
  tables.last_entered = id;
  tables.highest_sequence = std::max(tables.highest_sequence, id.sequence);
  tables.last_descriptor = descriptor;
}

/// Null unless it ended here not long ago.
const Descriptor* ofLate(const Tables& tables, uint64_t op_id) noexcept {
  const auto found = tables.recent.find(op_id);
  return found == tables.recent.end() ? nullptr : &found->second;
}

// ---- operations that are unexpected

size_t& places(PeerRow& peer, const Descriptor& descriptor) noexcept {
  return descriptor.kind == Collective::Send ? peer.messages : peer.collectives;
}

/// The operation is entered here now, or went another way: it is not unexpected any more. Empty if it was not.
std::map<uint64_t, UnexpectedRow>::node_type take(Tables& tables, uint64_t op_id) noexcept {
  auto taken = tables.unexpected.extract(op_id);
  if (!taken.empty()) {
    for (const auto& [rank, ahead] : taken.mapped().peers) {
      PeerRow& peer = tables.peer(rank);
      --places(peer, ahead.descriptor);
      peer.credited_unexpected -= ahead.limit == kNoLimit ? 0 : 1;
    }
  }
  return taken;
}

// ---- frames

Verdict dataArrived(Tables& tables, OperationRow* row, int peer, const FrameHeader& header, TimePoint now) {
  const bool eager = (header.aux & kEagerFlag) != 0;
  if (const char* const refused = credit::headerArrived(tables, row, peer, header.payload_nbytes, eager)) {
    violated(tables, peer, header, refused);
    return Verdict::Ignore;
  }
  if (row != nullptr) {
    waiting::progressed(*row, now);
    return Verdict::Accept;
  }
  AheadOfUs* const ahead = keep(tables, peer, header, now);
  if (ahead == nullptr) {
    return Verdict::Ignore;
  }
  ++ahead->frames;
  return Verdict::Keep;
}

void creditArrived(Tables& tables, OperationRow* row, int peer, const FrameHeader& header, TimePoint now) {
  const auto limit = static_cast<int64_t>(header.aux);
  const char* refused = nullptr;
  if (header.op_id == 0 || limit < 0) {
    refused = credit::gaveRoomBack(tables, peer, limit);
  } else if (row != nullptr) {
    refused = credit::granted(tables, *row, peer, limit);
  } else {
    if (credit::isPast(tables, peer, header.op_id)) {
      return; // the operation did without
    }
    AheadOfUs* const ahead = keep(tables, peer, header, now);
    if (ahead == nullptr) {
      return;
    }
    refused = credit::grantedAhead(tables, *ahead, peer, limit);
  }
  if (refused != nullptr) {
    violated(tables, peer, header, refused);
  }
}

} // namespace

// ---- the life of an operation

OperationRow& entered(
    Tables& tables,
    const std::shared_ptr<Operation>& operation,
    OperationRow::Runs runs,
    TimePoint now,
    const std::function<void(OperationRow&)>& build) {
  static const PreparedSchedule no_edges;
  const Operation::Request& request = operation->request();
  const auto [at, is_new] = tables.entered.try_emplace(request.id.id);
  if (!is_new) {
    throw Error(
        ErrorCode::Internal,
        "two operations of rank " + std::to_string(tables.identity.jobRank()) + " have one name",
        "report this as a bug");
  }
  OperationRow& row = at->second;
  row.runs = runs;
  row.operation = operation;
  row.deadline = request.deadline;
  row.since = now;
  const UnexpectedRow* const unexpected = tables.findUnexpected(request.id.id);
  const auto actions = static_cast<std::ptrdiff_t>(tables.actions.size());
  const auto credit_actions = static_cast<std::ptrdiff_t>(tables.credit_actions.size());
  try {
    if (build) {
      build(row);
    }
    const bool here = runs == OperationRow::Runs::Here;
    credit::entered(tables, row, here ? *request.schedule : no_edges, unexpected);
    waiting::entered(tables, row);
    if (unexpected != nullptr) {
      for (const auto& [peer, ahead] : unexpected->peers) {
        waiting::came(row, peer);
        compare(tables, expectedFrom(row, peer), peer, ahead.descriptor, request.id);
      }
      waiting::correct(tables, row, *unexpected);
    }
    if (row.isMessage()) {
      waiting::announce(tables, row);
    }
  } catch (...) { // nobody would look at its deadline
    const auto first = tables.actions.begin() + actions;
    const auto fails = [](const Action& action) { return action.kind == Action::Kind::Notice; };
    const auto found = std::find_if(first, tables.actions.end(), fails); // a mismatch is one without the row, too
    if (found != tables.actions.end()) {
      std::iter_swap(first, found);
    }
    tables.actions.erase(first + (found == tables.actions.end() ? 0 : 1), tables.actions.end());
    tables.credit_actions.erase(tables.credit_actions.begin() + credit_actions, tables.credit_actions.end());
    forget(tables, row);
    throw;
  }
  noteEntered(tables, request.id, request.descriptor); // from here on nothing takes memory
  if (auto taken = take(tables, request.id.id); !taken.empty()) {
    row.unexpected = std::move(taken.mapped().frames);
  }
  return row;
}

void forget(Tables& tables, OperationRow& row) noexcept {
  credit::forget(tables, row);
  tables.entered.erase(row.id().id);
}

void ended(Tables& tables, OperationRow& row) {
  tables.next_tick = std::min(tables.next_tick, tables.next_asks);
  remember(tables, row.id().id, row.descriptor());
  credit::ended(tables, row);
}

void passed(Tables& tables, const OperationId& id, const Descriptor& descriptor) {
  if (tables.find(id.id) != nullptr || hasEnded(tables, id.id)) {
    return;
  }
  remember(tables, id.id, descriptor);
  if (id.sequence > tables.highest_sequence) { // entered later than the last one that was entered here
    noteEntered(tables, id, descriptor);
  }
  if (const auto taken = take(tables, id.id); !taken.empty()) {
    for (const auto& [peer, ahead] : taken.mapped().peers) {
      compare(tables, descriptor, peer, ahead.descriptor, id);
    }
  }
}

// ---- frames

Verdict headerArrived(Tables& tables, OperationRow* row, int peer, const FrameHeader& header, TimePoint now) {
  if (tables.failed) {
    return Verdict::Ignore;
  }
  if (header.group != tables.identity.hash || header.epoch != tables.identity.epochOnWire()) {
    violated(tables, peer, header, "a frame of another group or epoch");
    return Verdict::Ignore;
  }
  if (header.op_id != 0 && header.type != FrameType::NotEntered) { // else it is about no operation, or another one
    const Descriptor theirs = Descriptor::readFrom(header);
    if (row != nullptr) {
      if (header.type != FrameType::Data) { // else its bytes count: see waiting::hasCome() and progressed()
        waiting::came(*row, peer);
      }
      compare(tables, expectedFrom(*row, peer), peer, theirs, row->id());
      credit::shown(tables, *row, peer);
    } else if (const Descriptor* const mine = ofLate(tables, header.op_id)) {
      const bool derived = (header.op_id & kDerivedIdBit) != 0;
      Descriptor compared = theirs;
      compared.numel = isByPair(compared.kind) ? mine->numel : compared.numel; // its receiver compares it
      compare(
          tables, *mine, peer, compared, OperationId{header.op_id, derived ? -1 : static_cast<int64_t>(header.op_id)});
      if (!tables.failed && header.type == FrameType::Data) {
        violated(tables, peer, header, "data of an operation that has ended");
      }
      return Verdict::Ignore;
    }
    if (tables.failed) {
      return Verdict::Ignore;
    }
  }
  switch (header.type) {
    case FrameType::Data:
      return dataArrived(tables, row, peer, header, now);
    case FrameType::Credit:
      creditArrived(tables, row, peer, header, now);
      return Verdict::Ignore;
    case FrameType::Waiting:
      waiting::asked(tables, row, peer, header, now);
      return Verdict::Ignore;
    case FrameType::NotEntered:
      waiting::answered(tables, row, peer, header, now);
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
  violated(
      tables, peer, header, "a frame of type " + std::to_string(static_cast<int>(header.type)) + " on a bulk link");
  return Verdict::Ignore;
}

AheadOfUs* keep(Tables& tables, int peer, const FrameHeader& header, TimePoint now) {
  const auto [row_at, is_new_row] = tables.unexpected.try_emplace(header.op_id);
  UnexpectedRow& row = row_at->second;
  const auto place = [&] {
    try {
      return row.peers.try_emplace(peer);
    } catch (...) {
      if (is_new_row) {
        tables.unexpected.erase(row_at);
      }
      throw;
    }
  };
  const auto [at, is_new] = place();
  const Descriptor theirs = Descriptor::readFrom(header);
  row.since = is_new_row ? now : row.since;
  row.last = now;
  AheadOfUs& ahead = at->second;
  ahead.answered_late = false;
  if (is_new) {
    ahead.descriptor = theirs;
    ++places(tables.peer(peer), theirs);
  } else if (ahead.descriptor != theirs) {
    violated(tables, peer, header, "two different descriptors for one operation");
    return nullptr;
  }
  return &ahead;
}

bool hasPlace(const Tables& tables, int peer, uint64_t op_id, bool message) {
  const size_t places = tables.limits.places();
  const PeerRow& asks = tables.peer(peer);
  return tables.findUnexpected(op_id) != nullptr ||
      (message ? asks.messages < places + asks.asked : asks.collectives < places);
}

void violated(Tables& tables, int peer, const FrameHeader& header, const std::string& what) {
  const GroupIdentity& us = tables.identity;
  ErrorRecord record;
  record.code = ErrorCode::ProtocolViolation;
  us.sign(record);
  us.blame(record, peer);
  record.op = collectiveName(Descriptor::readFrom(header).kindAt(us.rank));
  record.sequence = (header.op_id & kDerivedIdBit) != 0 ? -1 : static_cast<int64_t>(header.op_id);
  record.phase = ErrorPhase::Matching;
  record.summary = "Rank " + std::to_string(record.peer) + " sent what the protocol does not allow: " + what + ".";
  record.hint = "check that all ranks run the same build of pycomm; otherwise report this as a bug";
  fail(tables, std::move(record));
}

void fail(Tables& tables, ErrorRecord record) {
  if (tables.failed) {
    return; // the first error wins
  }
  Action& action = tables.actions.emplace_back();
  action.kind = Action::Kind::Notice;
  action.record = std::move(record);
  tables.failed = true;
}

// ---- questions

FrameHeader headerFor(const Tables& tables, const OperationRow* row, FrameType type, int peer) {
  FrameHeader header;
  header.type = type;
  header.group = tables.identity.hash;
  header.epoch = tables.identity.epochOnWire();
  if (row == nullptr) {
    return header;
  }
  header.op_id = row->id().id;
  between(*row, row->to(peer), row->from(peer)).writeTo(header);
  header.aux = type == FrameType::Waiting ? row->id().origin : 0;
  return header;
}

bool isKnown(const Tables& tables, int peer, uint64_t op_id) noexcept {
  const UnexpectedRow* const unexpected = tables.findUnexpected(op_id);
  return (unexpected != nullptr && unexpected->peers.count(peer) != 0) || tables.find(op_id) != nullptr;
}

bool hasEnded(const Tables& tables, uint64_t op_id) noexcept {
  return ofLate(tables, op_id) != nullptr;
}

bool isBehind(const Tables& tables, uint64_t op_id) noexcept {
  if ((op_id & kDerivedIdBit) == 0) {
    const auto is_held = [&](const auto& operation) { return operation->request().id.id == op_id; };
    return static_cast<int64_t>(op_id) <= tables.highest_sequence &&
        std::none_of(tables.held.begin(), tables.held.end(), is_held); // a later one may have been entered before it
  }
  return tables.forgotten.count(op_id) != 0;
}

void writeLast(const Tables& tables, FrameHeader& header) {
  if (tables.last_descriptor) {
    tables.last_descriptor->writeTo(header);
  }
  header.aux = tables.last_entered.id;
}

} // namespace pycomm::matching
