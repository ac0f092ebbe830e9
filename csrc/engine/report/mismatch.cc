#include "engine/report/mismatch.h"

#include <utility>

namespace pycomm {

std::string operationText(uint64_t op_id, uint64_t origin) {
  return (op_id & kDerivedIdBit) != 0 ? CallbackOrigin::unpacked(origin).text() : "#" + std::to_string(op_id);
}

ErrorRecord mismatch(const GroupIdentity& identity, const Descriptor& mine, int peer, const OperationId& id) {
  ErrorRecord record;
  record.code = ErrorCode::CollectiveMismatch;
  identity.sign(record);
  identity.blame(record, peer);
  record.op = collectiveName(mine.kindAt(identity.rank));
  record.sequence = id.sequence;
  record.dtype = dtypeName(mine.dtype);
  record.numel = mine.numel;
  record.phase = ErrorPhase::Matching;
  record.hint =
      "make every rank issue the same operations in the same order with the same shapes and dtypes; if callbacks of futures issue "
      "collectives, add them to the same futures in the same order";
  return record;
}

ErrorRecord disagreement(
    const GroupIdentity& identity,
    const Descriptor& mine,
    int peer,
    const Descriptor& theirs,
    const OperationId& id) {
  ErrorRecord record = mismatch(identity, mine, peer, id);
  const int rank = identity.rank;
  const JobRanks& job = identity.job;
  const std::string what =
      mine.kind == Collective::Send ? "a message" : "the operation " + operationText(id.id, id.origin);
  // Of a part that passes between the two, not of the whole.
  const bool at_root = rank == mine.root;
  const bool receives = at_root == (mine.kind == Collective::Gather);
  const bool one_way = mine.kind == Collective::Gather || mine.kind == Collective::Scatter;
  const bool part = theirs.kind == mine.kind && theirs.root == mine.root &&
      (mine.kind == Collective::AllToAll || (one_way && (at_root || peer == mine.root)));
  const std::string whose = at_root ? "the other's part of " : "its part of ";
  record.summary = "The ranks disagree about " + what + ": " + job.text(rank) + " (" + record.host + ") " +
      (part ? (receives ? "expects as " : "sends as ") + whose : "has ") + mine.text(job, rank, peer) + ", " +
      job.text(peer) + " (" + record.peer_host + ") " + (part ? (receives ? "sends " : "expects ") : "has ") +
      theirs.text(job, peer, rank) + ".";
  return record;
}

} // namespace pycomm
