// The ring: every rank sends only to its right neighbour and receives only from its left one, and every link carries
// the same number of bytes all the time. The tensor is cut into one chunk per rank; rank r owns chunk r, so that the
// chunk's sum becomes complete there.
//
// all_reduce of three ranks, whose inputs a, b and c have the chunks 0, 1 and 2. In round k rank r handles
// chunk (r - 1 - k) mod 3:
//
//   round  what happens                    rank 0                  rank 1                  rank 2
//   0      Send own chunk                  a2 ->                   b0 ->                   c1 ->
//   1      RecvReduceSend                  c1+a1 ->                a2+b2 ->                b0+c0 ->
//   2      RecvReduceCopySend, final       (b0+c0)+a0 = sum0 ->    (c1+a1)+b1 = sum1 ->    (a2+b2)+c2 = sum2 ->
//   3      RecvCopySend                    sum2 ->                 sum0 ->                 sum1 ->
//   4      Recv                            sum1                    sum2                    sum0
//
// Of size ranks there are 2 * size - 1 rounds. Rounds 0 to size - 1 alone are a reduce_scatter; the rest alone,
// started with a Send of one's own part, is an all_gather.
//
// Bits: one rank makes each sum and all others copy it, so all ranks hold the same bits. Chunk c is folded along the
// ring from rank c + 1 to rank c: in ascending order, except at the place where the ring wraps from the last rank to
// rank 0. There rank 0's operand is taken first. Chunk size - 1 is folded strictly as 0, 1, 2, ... . The small floats
// are rounded once per hop.
//
// In place: a rank's input chunk is overwritten only by a sum that contains it. The frames sent from it have arrived by
// then, so no explicit dependency is needed. Partial sums are only sent, never written.
//
// Order of the steps: a chunk is cut into segments, and segments go in waves of `pipeline_frames`: for every wave, for
// every round, for every segment of the wave. A frame of round k needs the one of round k - 1 that arrived a whole wave
// earlier, so the link always has that many frames to send. The next wave begins with Sends that depend on nothing, so
// there is no gap between waves. One wave for all segments would be just as fast, but would deadlock on links that hold
// fewer frames than a chunk has segments: every rank would wait to send its own segments before it forwards the first
// one.
#include <algorithm>
#include <cstdint>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"

namespace pycomm {
namespace {

/// Calls emit(round, segment) in listed order. `chunkAt(round)` is the run of elements that this rank handles in a
/// round.
template <typename ChunkAt, typename Emit>
void forEachStep(
    const ScheduleBuilder& builder,
    const ScheduleRequest& request,
    const Partition& chunks,
    int32_t rounds,
    ChunkAt chunkAt,
    Emit emit) {
  int64_t most_segments = 1;
  for (int32_t rank = 0; rank < request.size; ++rank) {
    most_segments = std::max(most_segments, builder.segmentCount(chunks[rank].numel, request.dtype));
  }
  const int64_t wave = builder.pipelineFrames();
  for (int64_t begin = 0; begin < most_segments; begin += wave) {
    for (int32_t round = 0; round < rounds; ++round) {
      // Chunks of an uneven collective end in different waves. Sender and receiver use the same chunk, so they agree.
      const Run chunk = chunks[chunkAt(round)];
      const int64_t segments = builder.segmentCount(chunk.numel, request.dtype);
      for (int64_t s = begin; s < std::min(begin + wave, segments); ++s) {
        emit(round, splitBalanced(chunk, segments, s));
      }
    }
  }
}

} // namespace

Schedule ringAllReduce(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Ring);
  const int32_t left = builder.around(-1);
  const int32_t right = builder.around(1);
  const int32_t complete = request.size - 1; // the round that makes this rank's own sum
  const int32_t last = 2 * request.size - 2;
  const auto chunkAt = [&](int32_t round) { return builder.around(-1 - round); };
  const auto emit = [&](int32_t round, Run segment) {
    if (round == 0) {
      const auto local = builder.operand(segment);
      builder.send(local.region, right, {local.ready});
    } else if (round < complete) {
      builder.recvReduceSend(left, builder.operand(segment), right);
    } else if (round == complete) {
      builder.recvReduceCopySend(left, builder.operand(segment), outputRegion(segment), right);
    } else if (round < last) {
      builder.recvCopySend(left, outputRegion(segment), right);
    } else {
      builder.recv(left, outputRegion(segment));
    }
  };
  forEachStep(builder, request, Partition::balanced(request.numel, request.size), last + 1, chunkAt, emit);
  return std::move(builder).finish();
}

Schedule ringReduceScatter(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Ring);
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  const int32_t left = builder.around(-1);
  const int32_t right = builder.around(1);
  const int32_t complete = request.size - 1;
  const auto chunkAt = [&](int32_t round) { return builder.around(-1 - round); };
  const auto emit = [&](int32_t round, Run segment) {
    const auto local = builder.operand(segment);
    if (round == 0) {
      builder.send(local.region, right, {local.ready});
    } else if (round < complete) {
      builder.recvReduceSend(left, local, right);
    } else {
      const Run result = {segment.offset - parts[request.rank].offset, segment.numel};
      builder.recvReduce(left, local, outputRegion(result), /*final=*/true);
    }
  };
  forEachStep(builder, request, parts, request.size, chunkAt, emit);
  return std::move(builder).finish();
}

Schedule ringAllGather(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Ring);
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  const Run own = parts[request.rank];
  const int32_t left = builder.around(-1);
  const int32_t right = builder.around(1);
  const int32_t last = request.size - 1;
  const auto chunkAt = [&](int32_t round) { return builder.around(-round); };
  const auto emit = [&](int32_t round, Run segment) {
    if (round == 0) {
      builder.send(inputRegion({segment.offset - own.offset, segment.numel}), right);
    } else if (round < last) {
      builder.recvCopySend(left, outputRegion(segment), right);
    } else {
      builder.recv(left, outputRegion(segment));
    }
  };
  forEachStep(builder, request, parts, request.size, chunkAt, emit);
  // Listed last: the neighbours wait for the sends, but no step waits for this.
  builder.copy(inputRegion({0, own.numel}), outputRegion(own));
  return std::move(builder).finish();
}

} // namespace pycomm
