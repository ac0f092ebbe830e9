#include "schedule/make_schedule.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/error.h"
#include "schedule/algorithms.h"
#include "schedule/partition.h"
#include "schedule/schedule_builder.h"
#include "schedule/select.h"

namespace pycomm {
namespace {

using MakeFunction = Schedule (*)(const ScheduleRequest&);

struct Entry {
  Collective kind;
  Algorithm algorithm;
  MakeFunction make;
};

constexpr Entry kTable[] = {
    {Collective::AllReduce, Algorithm::Ring, ringAllReduce},
    {Collective::AllReduce, Algorithm::RecursiveDoubling, recursiveDoublingAllReduce},
    {Collective::AllReduce, Algorithm::Direct, direct},
    {Collective::AllReduce, Algorithm::Hierarchical, hierarchicalAllReduce},
    {Collective::Broadcast, Algorithm::BinomialTree, binomialBroadcast},
    {Collective::Broadcast, Algorithm::Ring, chainBroadcast},
    {Collective::Reduce, Algorithm::BinomialTree, binomialReduce},
    {Collective::Reduce, Algorithm::Ring, chainReduce},
    {Collective::AllGather, Algorithm::Ring, ringAllGather},
    {Collective::AllGather, Algorithm::Hierarchical, hierarchicalAllGather},
    {Collective::AllGather, Algorithm::Bruck, bruckAllGather},
    {Collective::AllGather, Algorithm::RecursiveDoubling, recursiveDoublingAllGather},
    {Collective::ReduceScatter, Algorithm::Ring, ringReduceScatter},
    {Collective::ReduceScatter, Algorithm::RecursiveHalving, recursiveHalvingReduceScatter},
    {Collective::ReduceScatter, Algorithm::Hierarchical, hierarchicalReduceScatter},
    {Collective::ReduceScatter, Algorithm::Direct, direct},
    {Collective::Barrier, Algorithm::RecursiveDoubling, disseminationBarrier},
    {Collective::AllToAll, Algorithm::Pairwise, pairwiseAllToAll},
    {Collective::Gather, Algorithm::Direct, directGather},
    {Collective::Scatter, Algorithm::Direct, directScatter},
    {Collective::Send, Algorithm::Direct, pointToPoint},
    {Collective::Recv, Algorithm::Direct, pointToPoint},
};

bool encodes(const ScheduleRequest& request) {
  return request.codec != Codec::None;
}

[[noreturn]] void refuseAlgorithm(const ScheduleRequest& request, Algorithm algorithm, const std::string& hint) {
  ErrorRecord record;
  record.code = ErrorCode::Unsupported;
  record.op = collectiveName(request.kind);
  record.summary =
      record.op + " has no " + algorithmName(algorithm) + " algorithm" + (encodes(request) ? " that encodes" : "");
  record.hint = hint;
  throw Error(record);
}

const Entry& findEntry(const ScheduleRequest& request, Algorithm algorithm) {
  std::string others;
  for (const Entry& entry : kTable) {
    const bool can_encode = entry.algorithm == Algorithm::Direct;
    if (entry.kind != request.kind || (encodes(request) && !can_encode)) {
      continue;
    }
    if (entry.algorithm == algorithm) {
      return entry;
    }
    others += std::string(others.empty() ? "use " : " or ") + algorithmName(entry.algorithm);
  }
  refuseAlgorithm(request, algorithm, others);
}

/// One rank alone: its operand is the result. Nothing is sent, so nothing is encoded either.
Schedule makeForOneRank(const ScheduleRequest& request, Algorithm algorithm) {
  ScheduleBuilder builder(request, algorithm);
  if (request.kind == Collective::Barrier) {
    return std::move(builder).finish();
  }
  const Run whole = {0, inputNumel(request)};
  const bool final = isReduction(request.kind);
  if (final && request.reduce_op == ReduceOp::PremulSum) {
    builder.scale(inputRegion(whole), outputRegion(whole), final);
  } else {
    builder.copy(inputRegion(whole), outputRegion(whole), final);
  }
  return std::move(builder).finish();
}

} // namespace

bool hasAlgorithm(Collective kind, Algorithm algorithm) noexcept {
  return std::any_of(std::begin(kTable), std::end(kTable), [&](const Entry& entry) {
    return entry.kind == kind && entry.algorithm == algorithm;
  });
}

Algorithm algorithmOf(const ScheduleRequest& request) {
  checkRequest(request);
  Algorithm algorithm = request.algorithm;
  if (algorithm == Algorithm::Auto) {
    algorithm = selectAlgorithm(selectionKey(request));
    // A rank with an empty part must send a frame all the same, or its mistakes would go unnoticed: rings send an empty
    // frame for it, the other algorithms send none.
    if (request.kind == Collective::AllGather && !request.counts.empty() && algorithm != Algorithm::Hierarchical) {
      algorithm = Algorithm::Ring;
    }
  }
  return findEntry(request, algorithm).algorithm;
}

Schedule makeSchedule(const ScheduleRequest& request) {
  const Algorithm algorithm = algorithmOf(request);
  const Entry& entry = findEntry(request, algorithm);
  const bool p2p = request.kind == Collective::Send || request.kind == Collective::Recv; // with oneself, then
  if (request.codec != Codec::None && request.size > 1) {
    return encodedDirect(request);
  }
  if (request.size == 1 && !p2p) {
    return makeForOneRank(request, algorithm);
  }
  return goesByHost(request.kind, algorithm) ? makeByHost(request, entry.make) : entry.make(request);
}

int64_t inputNumel(const ScheduleRequest& request) {
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  switch (request.kind) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::Send:
      return request.numel;
    case Collective::Broadcast:
      return request.rank == request.root ? request.numel : 0;
    case Collective::AllGather:
    case Collective::Gather:
      return parts[request.rank].numel;
    case Collective::ReduceScatter:
    case Collective::AllToAll:
      return parts.numel();
    case Collective::Scatter:
      return request.rank == request.root ? parts.numel() : 0;
    case Collective::Barrier:
    case Collective::Recv:
      return 0;
  }
  return 0;
}

int64_t outputNumel(const ScheduleRequest& request) {
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  switch (request.kind) {
    case Collective::AllReduce:
    case Collective::Broadcast:
    case Collective::Recv:
      return request.numel;
    case Collective::Reduce:
      return request.rank == request.root ? request.numel : 0;
    case Collective::AllGather:
      return parts.numel();
    case Collective::Gather:
      return request.rank == request.root ? parts.numel() : 0;
    case Collective::ReduceScatter:
    case Collective::Scatter:
      return parts[request.rank].numel;
    case Collective::AllToAll:
      return Partition::ofParts(request.numel, request.size, request.recv_counts).numel();
    case Collective::Barrier:
    case Collective::Send:
      return 0;
  }
  return 0;
}

} // namespace pycomm
