// Collectives that only move blocks between pairs of ranks, and point-to-point. Every pair exchanges at least one
// frame, even if it is empty: so each side can detect that the other expects another count.
//
// all_to_all of three ranks: distance 1: 0 -> 1, 1 -> 2, 2 -> 0; distance 2: 0 -> 2, 1 -> 0, 2 -> 1. So at every
// distance each rank sends to one and receives from one, and no rank is the first target of all others.
#include <cstdint>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"

namespace pycomm {
namespace {

void sendBlock(ScheduleBuilder& builder, const ScheduleRequest& request, Run block, int32_t to) {
  const int64_t segments = builder.segmentCount(block.numel, request.dtype);
  for (int64_t s = 0; s < segments; ++s) {
    builder.send(inputRegion(splitBalanced(block, segments, s)), to);
  }
}

void recvBlock(ScheduleBuilder& builder, const ScheduleRequest& request, int32_t from, Run block) {
  const int64_t segments = builder.segmentCount(block.numel, request.dtype);
  for (int64_t s = 0; s < segments; ++s) {
    builder.recv(from, outputRegion(splitBalanced(block, segments, s)));
  }
}

} // namespace

Schedule pairwiseAllToAll(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Pairwise);
  const Partition to = Partition::ofParts(request.numel, request.size, request.counts);
  const Partition from = Partition::ofParts(request.numel, request.size, request.recv_counts);
  for (int32_t distance = 1; distance < request.size; ++distance) {
    const int32_t target = builder.around(distance);
    const int32_t source = builder.around(-distance);
    sendBlock(builder, request, to[target], target);
    recvBlock(builder, request, source, from[source]);
  }
  builder.copy(inputRegion(to[request.rank]), outputRegion(from[request.rank]));
  return std::move(builder).finish();
}

Schedule directGather(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Direct);
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  const Run own = {0, parts[request.rank].numel};
  if (request.rank != request.root) {
    sendBlock(builder, request, own, request.root);
    return std::move(builder).finish();
  }
  for (int32_t distance = 1; distance < request.size; ++distance) {
    const int32_t source = builder.around(distance);
    recvBlock(builder, request, source, parts[source]);
  }
  builder.copy(inputRegion(own), outputRegion(parts[request.rank]));
  return std::move(builder).finish();
}

Schedule directScatter(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Direct);
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  const Run own = {0, parts[request.rank].numel};
  if (request.rank != request.root) {
    recvBlock(builder, request, request.root, own);
    return std::move(builder).finish();
  }
  for (int32_t distance = 1; distance < request.size; ++distance) {
    const int32_t target = builder.around(distance);
    sendBlock(builder, request, parts[target], target);
  }
  builder.copy(inputRegion(parts[request.rank]), outputRegion(own));
  return std::move(builder).finish();
}

Schedule pointToPoint(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Direct);
  const Run whole = {0, request.numel};
  if (request.kind == Collective::Send) {
    sendBlock(builder, request, whole, request.root);
  } else {
    recvBlock(builder, request, request.root, whole);
  }
  return std::move(builder).finish();
}

} // namespace pycomm
