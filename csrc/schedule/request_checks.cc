#include "schedule/make_schedule.h"

#include <limits>
#include <string>

#include "base/error.h"
#include "schedule/topology_view.h"

namespace pycomm {
namespace {

constexpr int32_t kMaxPipelineFrames = 256; // bounds scratch; far more than any network needs

[[noreturn]] void refuse(
    const ScheduleRequest& request,
    const std::string& why,
    const std::string& hint,
    ErrorCode code = ErrorCode::InvalidArgument) {
  ErrorRecord record;
  record.code = code;
  record.op = collectiveName(request.kind);
  record.summary = record.op + ": " + why;
  record.hint = hint;
  throw Error(record);
}

bool isKnown(Collective kind) noexcept {
  switch (kind) {
    case Collective::AllReduce:
    case Collective::Broadcast:
    case Collective::AllGather:
    case Collective::Barrier:
    case Collective::Reduce:
    case Collective::ReduceScatter:
    case Collective::AllToAll:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::Send:
    case Collective::Recv:
      return true;
  }
  return false;
}

bool hasRoot(Collective kind) noexcept {
  return kind == Collective::Broadcast || kind == Collective::Reduce || kind == Collective::Gather ||
      kind == Collective::Scatter || kind == Collective::Send || kind == Collective::Recv;
}

bool hasParts(Collective kind) noexcept {
  return kind == Collective::AllGather || kind == Collective::ReduceScatter || kind == Collective::AllToAll ||
      kind == Collective::Gather || kind == Collective::Scatter;
}

void checkRanks(const ScheduleRequest& request) {
  if (request.size < 1) {
    refuse(request, "size is " + std::to_string(request.size), "a group has at least one rank");
  }
  const std::string range = "[0, " + std::to_string(request.size) + ")";
  if (request.rank < 0 || request.rank >= request.size) {
    refuse(request, "rank " + std::to_string(request.rank) + " is not in " + range, "pass a rank of the group");
  }
  if (request.topology != nullptr && request.topology->size() != request.size) {
    refuse(
        request, "the topology is of " + std::to_string(request.topology->size()) + " ranks", "report this as a bug");
  }
  if (!hasRoot(request.kind)) {
    return;
  }
  const bool p2p = request.kind == Collective::Send || request.kind == Collective::Recv;
  const std::string role = p2p ? "peer " : "root ";
  if (request.root < 0 || request.root >= request.size) {
    refuse(request, role + std::to_string(request.root) + " is not in " + range, "pass a rank of the group");
  }
}

void checkCodec(const ScheduleRequest& request) {
  const std::string what = std::string(dtypeName(request.dtype)) + " as " + codecName(request.codec);
  const bool adds = request.reduce_op == ReduceOp::Sum || request.reduce_op == ReduceOp::Avg ||
      request.reduce_op == ReduceOp::PremulSum;
  if (!isKnown(request.codec)) {
    refuse(request, "unknown codec", "use one of pycomm's");
  }
  if ((request.kind != Collective::AllReduce && request.kind != Collective::ReduceScatter) || !adds) {
    refuse(request, "cannot encode " + what, "only sums and averages travel encoded", ErrorCode::Unsupported);
  }
  if (request.dtype != DType::Float32 && request.dtype != DType::Float64) {
    refuse(request, "cannot encode " + what, "only float32 and float64 travel encoded", ErrorCode::Unsupported);
  }
}

void checkDTypes(const ScheduleRequest& request) {
  if (elementSize(request.dtype) == 0) {
    refuse(request, "unknown dtype", "use one of pycomm's dtypes");
  }
  if (isReduction(request.kind)) {
    if (request.reduce_op == ReduceOp::None) {
      refuse(request, "no reduce op is given", "use SUM");
    }
    const std::string why = whyUnsupported(request.reduce_op, request.dtype);
    if (!why.empty()) {
      refuse(request, why, "use another reduce op or dtype", ErrorCode::Unsupported);
    }
  }
  if (request.codec != Codec::None) {
    checkCodec(request);
  }
}

/// Adds `numel` to `total`. Refuses negative numbers and sums whose bytes do not fit into 63 bits.
void addNumel(const ScheduleRequest& request, const char* name, int64_t numel, int64_t& total) {
  if (numel < 0) {
    refuse(request, std::string(name) + " is " + std::to_string(numel), "a number of elements is not negative");
  }
  const int64_t limit = std::numeric_limits<int64_t>::max() / static_cast<int64_t>(elementSize(request.dtype));
  if (numel > limit - total) {
    refuse(request, std::string(name) + " adds up to more bytes than 63 bits can count", "use smaller tensors");
  }
  total += numel;
}

void checkCounts(const ScheduleRequest& request, const char* name, const std::vector<int64_t>& counts) {
  if (counts.size() != static_cast<size_t>(request.size)) {
    refuse(
        request,
        std::string(name) + " has " + std::to_string(counts.size()) + " entries for " + std::to_string(request.size) +
            " ranks",
        "give one count for every rank");
  }
  int64_t total = 0;
  for (const int64_t count : counts) {
    addNumel(request, name, count, total);
  }
}

void checkNumel(const ScheduleRequest& request) {
  int64_t total = 0;
  addNumel(request, "numel", request.numel, total);
  if (hasParts(request.kind) && request.counts.empty()) {
    const int64_t limit = std::numeric_limits<int64_t>::max() / static_cast<int64_t>(elementSize(request.dtype));
    if (request.numel > limit / request.size) {
      refuse(request, "numel times size is more bytes than 63 bits can count", "use smaller tensors");
    }
  }
  if (!request.counts.empty()) {
    if (!hasParts(request.kind)) {
      refuse(request, "counts have no meaning", "leave counts empty");
    }
    checkCounts(request, "counts", request.counts);
  }
  if (request.kind != Collective::AllToAll) {
    if (!request.recv_counts.empty()) {
      refuse(request, "recv_counts have no meaning", "only all_to_all has recv_counts");
    }
    return;
  }
  if (request.counts.empty() != request.recv_counts.empty()) {
    refuse(request, "only one of counts and recv_counts is given", "give both, or neither for even parts");
  }
  if (!request.recv_counts.empty()) {
    checkCounts(request, "recv_counts", request.recv_counts);
    const auto own = static_cast<size_t>(request.rank);
    if (request.counts[own] != request.recv_counts[own]) {
      refuse(
          request,
          "counts and recv_counts differ for this rank itself: " + std::to_string(request.counts[own]) + " and " +
              std::to_string(request.recv_counts[own]),
          "what a rank sends to itself it receives from itself");
    }
  }
}

} // namespace

bool isReduction(Collective kind) noexcept {
  return kind == Collective::AllReduce || kind == Collective::Reduce || kind == Collective::ReduceScatter;
}

void checkRequest(const ScheduleRequest& request) {
  if (!isKnown(request.kind)) {
    refuse(request, "unknown collective " + std::to_string(static_cast<int>(request.kind)), "use one of pycomm's");
  }
  checkRanks(request);
  checkDTypes(request);
  checkNumel(request);
  if (request.segment_nbytes < 1) {
    refuse(request, "segment_nbytes is " + std::to_string(request.segment_nbytes), "pass at least 1");
  }
  if (request.pipeline_frames < 1 || request.pipeline_frames > kMaxPipelineFrames) {
    refuse(
        request,
        "pipeline_frames is " + std::to_string(request.pipeline_frames),
        "pass 1 to " + std::to_string(kMaxPipelineFrames));
  }
}

} // namespace pycomm
