// Draws the calls of a plan.
#include <algorithm>

#include "engine/operation/issue_context.h"
#include "proof/sim/plan.h"

namespace pycomm::sim {
namespace {

Algorithm drawAlgorithm(Random& random, Collective kind, bool encoded) {
  if (encoded || random.chance(40)) {
    return Algorithm::Auto;
  }
  switch (kind) {
    case Collective::AllReduce:
      return random.pick({Algorithm::Ring, Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::Direct});
    case Collective::Broadcast:
    case Collective::Reduce:
      return random.pick({Algorithm::BinomialTree, Algorithm::Ring});
    case Collective::AllGather:
    case Collective::Barrier:
    case Collective::ReduceScatter:
    case Collective::AllToAll:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::Send:
    case Collective::Recv:
      break;
  }
  return Algorithm::Auto;
}

ReduceOp drawReduceOp(Random& random, DType dtype) {
  return isFloatingPoint(dtype)
      ? random.pick({ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min})
      : random.pick({ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Bxor, ReduceOp::Band});
}

} // namespace

std::vector<int64_t> allToAllCounts(int key, int rank, int size, bool receives) {
  std::vector<int64_t> counts;
  for (int other = 0; other < size; ++other) {
    const int from = receives ? other : rank;
    const int to = receives ? rank : other;
    const uint64_t mixed =
        mix64(static_cast<uint64_t>(key) << 32 | static_cast<uint64_t>(from) << 16 | static_cast<uint64_t>(to));
    counts.push_back(mixed % 3 == 0 ? 0 : static_cast<int64_t>(mixed >> 32) % 40);
  }
  return counts;
}

CallPlan drawCall(Random& random, int key, int size, int64_t window_nbytes) {
  CallPlan call;
  call.key = key;
  ScheduleRequest& request = call.request;
  request.size = size;
  request.kind = random.pick(
      {Collective::AllReduce,
       Collective::AllReduce,
       Collective::AllReduce,
       Collective::Broadcast,
       Collective::AllGather,
       Collective::Barrier,
       Collective::Reduce,
       Collective::ReduceScatter,
       Collective::AllToAll,
       Collective::Gather,
       Collective::Scatter});
  if (request.kind == Collective::Barrier) {
    return call;
  }
  request.dtype =
      random.pick({DType::Float32, DType::Float32, DType::Int64, DType::Int32, DType::Float64, DType::UInt8});
  const bool reduces = request.kind == Collective::AllReduce || request.kind == Collective::Reduce ||
      request.kind == Collective::ReduceScatter;
  if (reduces) {
    request.reduce_op = drawReduceOp(random, request.dtype);
  }
  if (request.kind == Collective::AllReduce && request.dtype == DType::Float32 && request.reduce_op == ReduceOp::Sum &&
      random.chance(20)) {
    request.codec = Codec::Float16; // small integers: exact there, too
  }
  request.algorithm = drawAlgorithm(random, request.kind, request.codec != Codec::None);
  if (request.kind == Collective::Broadcast || request.kind == Collective::Reduce ||
      request.kind == Collective::Gather || request.kind == Collective::Scatter) {
    request.root = static_cast<int32_t>(random.below(size));
  }
  // As the real limits: a segment is a quarter of the window at the most, and an edge holds half of a window.
  const auto element = static_cast<int64_t>(elementSize(request.dtype));
  request.segment_nbytes = random.scaled(std::max<int64_t>(16, window_nbytes / 32), window_nbytes / 4);
  request.segment_nbytes -= request.segment_nbytes % element;
  request.pipeline_frames = static_cast<int32_t>(std::min<int64_t>(4, window_nbytes / 2 / request.segment_nbytes));
  const int64_t most = std::max<int64_t>(1, 16 * request.segment_nbytes / element);
  const bool parts = request.kind == Collective::AllGather || request.kind == Collective::ReduceScatter ||
      request.kind == Collective::AllToAll || request.kind == Collective::Gather || request.kind == Collective::Scatter;
  request.numel = random.scaled(0, parts ? most / size : most);
  call.in_place = random.chance(50) && (request.kind == Collective::AllReduce || request.kind == Collective::Broadcast);
  if (parts && random.chance(30)) {
    if (request.kind == Collective::AllToAll) {
      request.counts = request.recv_counts = allToAllCounts(key, 0, size, false); // each rank gets its own counts later
      request.recv_counts = allToAllCounts(key, 0, size, true);
    } else {
      for (int rank = 0; rank < size; ++rank) {
        request.counts.push_back(random.scaled(0, most / size));
      }
    }
  }
  return call;
}

std::string callText(const CallPlan& call) {
  const ScheduleRequest& request = call.request;
  std::string out = collectiveName(request.kind);
  out += std::string("(") + dtypeName(request.dtype) + " x " + std::to_string(request.numel);
  if (request.reduce_op != ReduceOp::None) {
    out += std::string(", ") + reduceOpName(request.reduce_op);
  }
  if (request.root >= 0) {
    out += ", root " + std::to_string(request.root);
  }
  if (!request.counts.empty()) {
    out += ", uneven";
  }
  if (request.codec != Codec::None) {
    out += std::string(", codec ") + codecName(request.codec);
  }
  if (call.peer != kNoPeer) {
    out += call.peer < 0 ? ", from any rank" : ", peer " + std::to_string(call.peer);
  }
  out += std::string(", ") + algorithmName(request.algorithm) + ", segments of " +
      std::to_string(request.segment_nbytes) + " B";
  if (call.tag != 0) {
    out += ", tag " + std::to_string(call.tag);
  }
  return out + (call.in_place ? ", in place" : "") + (call.waits ? "" : ", not waited for") + ")";
}

} // namespace pycomm::sim
