#include "engine/report/mismatch.h"

#include <utility>

namespace pycomm {

std::string operationText(uint64_t op_id) {
  return (op_id & kDerivedIdBit) != 0 ? "issued in a callback" : "#" + std::to_string(op_id);
}

ErrorRecord mismatch(
    const std::vector<std::string>& hosts,
    int rank,
    const Descriptor& mine,
    int peer,
    const OperationId& id) {
  ErrorRecord record;
  record.code = ErrorCode::CollectiveMismatch;
  record.rank = rank;
  record.host = hosts[static_cast<size_t>(rank)];
  record.peer = peer;
  record.peer_host = hosts[static_cast<size_t>(peer)];
  record.op = collectiveName(mine.kind);
  record.sequence = id.sequence;
  record.dtype = dtypeName(mine.dtype);
  record.numel = mine.numel;
  record.phase = ErrorPhase::Matching;
  record.hint =
      "make every rank issue the same operations in the same order with the same shapes and dtypes; if a DDP comm hook or a "
      "future's callback issues collectives, wrap the hook in pycomm.comm_hooks.ordered";
  return record;
}

ErrorRecord disagreement(
    const std::vector<std::string>& hosts,
    int rank,
    const Descriptor& mine,
    int peer,
    const Descriptor& theirs,
    const OperationId& id) {
  ErrorRecord record = mismatch(hosts, rank, mine, peer, id);
  const std::string what = mine.kind == Collective::Send ? "a message" : "the operation " + operationText(id.id);
  const bool share = mine.kind == Collective::AllToAll && theirs.kind == mine.kind; // the peer's part, not the whole
  record.summary = "The ranks disagree about " + what + ": rank " + std::to_string(rank) + " (" + record.host +
      (share ? ") expects as its part of " : ") has ") + mine.text() + ", rank " + std::to_string(peer) + " (" +
      record.peer_host + (share ? ") sends " : ") has ") + theirs.text() + ".";
  return record;
}

} // namespace pycomm
