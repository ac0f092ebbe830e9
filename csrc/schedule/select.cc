#include "schedule/select.h"

#include <algorithm>

#include "schedule/partition.h"
#include "schedule/schedule_builder.h"
#include "schedule/topology_view.h"

namespace pycomm {
namespace {

// Up to this size a round costs latency, not bandwidth: log2(size) rounds of the whole beat 2 * size - 2 rounds of a
// part.
constexpr int64_t kSmallAllReduceNbytes = 32 << 10;

// The same for the parts of all_gather and reduce_scatter, all together. Large ones gain nothing from fewer rounds: a
// ring sends the bytes of one round while it receives those of the next.
constexpr int64_t kSmallPartsNbytes = 64 << 10;

constexpr int32_t kMaxDirectSize = 64;
// Up to this many ranks, small messages sent at once cost less than log2(size) rounds that wait for each other.
constexpr int32_t kFewRanks = 4;

// If hosts are this uneven, the few ranks that carry slices would be busy sending them to all others.
constexpr int32_t kMostUneven = 4;

constexpr bool severalRanksOnSeveralHosts(const SelectionKey& key) noexcept {
  return key.hosts > 1 && key.most_ranks > 1 && key.most_ranks <= kMostUneven * key.fewest_ranks;
}

/// True if all hosts have the same number of ranks, so that their parts form slices.
constexpr bool equalHostsOfSeveralRanks(const SelectionKey& key) noexcept {
  return key.hosts > 1 && key.fewest_ranks > 1 && key.fewest_ranks == key.most_ranks;
}

/// The number of elements that the choice of an algorithm depends on: the same on all ranks.
int64_t wholeNumel(const ScheduleRequest& request) {
  const bool parts = request.kind == Collective::AllGather || request.kind == Collective::ReduceScatter;
  return parts ? Partition::ofParts(request.numel, request.size, request.counts).numel() : request.numel;
}

constexpr bool isPowerOfTwo(int32_t size) noexcept {
  return (size & (size - 1)) == 0;
}

/// For a broadcast or a reduction. A tree's root moves each segment ceil(log2(size)) times; in a chain it moves each
/// one once, and the last one arrives size - 2 frames later.
Algorithm treeOrChain(int64_t segments, int32_t size) {
  int64_t rounds = 0;
  while ((int64_t{1} << rounds) < size) {
    ++rounds;
  }
  // segments * rounds <= segments + size - 2, without overflow
  return rounds <= 1 || segments <= (size - 2) / (rounds - 1) ? Algorithm::BinomialTree : Algorithm::Ring;
}

} // namespace

SelectionKey selectionKey(const ScheduleRequest& request) {
  SelectionKey key;
  key.kind = request.kind;
  key.size = request.size;
  key.nbytes = wholeNumel(request) * static_cast<int64_t>(elementSize(request.dtype));
  key.segment_nbytes = std::min(request.segment_nbytes, kMaxSegmentNbytes);
  key.encoded = request.codec != Codec::None;
  key.small_float_sum = isFloatingPoint(request.dtype) && elementSize(request.dtype) < sizeof(float) &&
      (request.reduce_op == ReduceOp::Sum || request.reduce_op == ReduceOp::Avg ||
       request.reduce_op == ReduceOp::PremulSum);
  key.hosts = request.topology == nullptr ? request.size : request.topology->hosts();
  key.fewest_ranks = request.topology == nullptr ? 1 : request.topology->fewestRanks();
  key.most_ranks = request.topology == nullptr ? 1 : request.topology->mostRanks();
  return key;
}

std::string whySelected(const SelectionKey& key) {
  if (key.encoded) {
    return "values that travel encoded are added up once";
  }
  if (key.small_float_sum && selectAlgorithm(key) == Algorithm::Direct) {
    return "sums of small floats are rounded once";
  }
  if (key.hosts == 1) {
    return "the table for one host";
  }
  return severalRanksOnSeveralHosts(key) ? "the table for several hosts with several ranks each"
                                         : "the table for several hosts";
}

Algorithm selectAlgorithm(const SelectionKey& key) noexcept {
  switch (key.kind) {
    case Collective::AllReduce:
      // One fp32 accumulator and one rounding, while the ring would round at each of its size - 1 hops. The bytes are
      // the ring's, but there are size times as many frames and the scratch grows with them: hence the bound.
      if (key.encoded || (key.small_float_sum && key.size > 2 && key.size <= kMaxDirectSize)) {
        return Algorithm::Direct;
      }
      if (key.nbytes <= kSmallAllReduceNbytes) {
        return Algorithm::RecursiveDoubling;
      }
      return severalRanksOnSeveralHosts(key) ? Algorithm::Hierarchical : Algorithm::Ring;
    case Collective::Broadcast:
    case Collective::Reduce:
      return treeOrChain(key.nbytes == 0 ? 1 : (key.nbytes - 1) / key.segment_nbytes + 1, key.size);
    case Collective::AllGather:
      if (key.size > 2 && key.nbytes <= kSmallPartsNbytes) {
        return isPowerOfTwo(key.size) ? Algorithm::RecursiveDoubling : Algorithm::Bruck;
      }
      return equalHostsOfSeveralRanks(key) ? Algorithm::Hierarchical : Algorithm::Ring;
    case Collective::ReduceScatter:
      if (key.encoded) {
        return Algorithm::Direct;
      }
      if (key.small_float_sum && key.size > 2 && key.size <= kMaxDirectSize) { // as in all_reduce
        return Algorithm::Direct;
      }
      if (key.size > 2 && key.nbytes <= kSmallPartsNbytes) {
        return key.size <= kFewRanks ? Algorithm::Direct : Algorithm::RecursiveHalving;
      }
      return equalHostsOfSeveralRanks(key) ? Algorithm::Hierarchical : Algorithm::Ring;
    case Collective::Barrier:
      return Algorithm::RecursiveDoubling;
    case Collective::AllToAll:
      return Algorithm::Pairwise;
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::Send:
    case Collective::Recv:
      return Algorithm::Direct;
  }
  return Algorithm::Direct; // a value outside the enumeration; makeSchedule has refused it before
}

bool keepsParts(Collective kind, Algorithm algorithm) noexcept {
  switch (kind) {
    case Collective::AllGather:
    case Collective::ReduceScatter:
      return algorithm == Algorithm::Ring || algorithm == Algorithm::Direct || algorithm == Algorithm::Hierarchical;
    case Collective::AllToAll:
    case Collective::Gather:
    case Collective::Scatter:
      return true;
    case Collective::AllReduce:
    case Collective::Broadcast:
    case Collective::Barrier:
    case Collective::Reduce:
    case Collective::Send:
    case Collective::Recv:
      break;
  }
  return false;
}

Codec codecFor(const ScheduleRequest& request, Codec wanted) noexcept {
  const bool adds = request.reduce_op == ReduceOp::Sum || request.reduce_op == ReduceOp::Avg ||
      request.reduce_op == ReduceOp::PremulSum;
  if (!adds || request.size < 2 || (request.dtype != DType::Float32 && request.dtype != DType::Float64)) {
    return Codec::None;
  }
  int64_t numel = request.numel;
  if (request.kind == Collective::ReduceScatter) {
    numel = request.counts.empty() ? request.numel * request.size : 0;
    for (const int64_t count : request.counts) {
      numel += count;
    }
  } else if (request.kind != Collective::AllReduce) {
    return Codec::None;
  }
  return numel * static_cast<int64_t>(elementSize(request.dtype)) < kMinEncodedNbytes ? Codec::None : wanted;
}

} // namespace pycomm
