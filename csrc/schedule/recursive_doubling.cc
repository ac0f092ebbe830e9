// Recursive doubling: few rounds for small tensors. In each round a rank exchanges its whole partial sum with one
// partner, twice as far away as in the round before. Both compute op(lower, higher), so both hold the same bits; after
// log2(size) rounds all ranks do. If size is not a power of two, ranks are folded into members (members.h).
//
// Three ranks with inputs a, b, c. Two members: rank 0 (for ranks 0 and 1) and rank 2.
//
//   fold     rank 1 sends b to rank 0          rank 0: scratch = a+b
//   round 0  ranks 0 and 2 exchange            both: Output = (a+b)+c, final
//   return   rank 0 sends Output to rank 1     rank 1: Output
//
// Only the last round writes Output, because only its sum contains every rank; until then the sum is in scratch. A
// round's receive waits for its send: it overwrites the send's source, which in the last round may be Input itself (in
// place).
//
// The sum is a balanced tree over consecutive ranks, the lower half always first. The small floats are rounded once per
// round.
#include <cstdint>

#include "schedule/algorithms.h"
#include "schedule/members.h"
#include "schedule/schedule_builder.h"
#include "schedule/write_log.h"

namespace pycomm {

Schedule recursiveDoublingAllReduce(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::RecursiveDoubling);
  const Members members(request.size);
  const int64_t segments = builder.segmentCount(request.numel, request.dtype);
  const auto segmentAt = [&](int64_t s) { return splitBalanced({0, request.numel}, segments, s); };

  if (members.isOdd(request.rank)) {
    const int32_t partner = request.rank - 1;
    for (int64_t s = 0; s < segments; ++s) {
      const auto local = builder.operand(segmentAt(s));
      builder.send(local.region, partner, {local.ready});
    }
    for (int64_t s = 0; s < segments; ++s) {
      builder.recv(partner, outputRegion(segmentAt(s))); // made from the sent frame, so Input is no longer needed
    }
    return std::move(builder).finish();
  }

  std::vector<ScheduleBuilder::Operand> partial;
  for (int64_t s = 0; s < segments; ++s) {
    partial.push_back(builder.operand(segmentAt(s)));
  }
  Buffer scratch = Buffer::None;
  if (members.paired(request.rank) || members.count > 2) {
    scratch = builder.addScratch(request.dtype, request.numel);
  }
  if (members.paired(request.rank)) {
    for (int64_t s = 0; s < segments; ++s) {
      auto& operand = partial[static_cast<size_t>(s)];
      const Region sum = bufferRegion(scratch, segmentAt(s));
      operand = {sum, builder.recvReduce(request.rank + 1, operand, sum, /*final=*/false)};
    }
  }
  for (int32_t distance = 1; distance < members.count; distance *= 2) {
    const int32_t partner = members.rankOf(members.memberOf(request.rank) ^ distance);
    const bool final = distance * 2 == members.count;
    std::vector<StepId> sent;
    for (const auto& operand : partial) {
      sent.push_back(builder.send(operand.region, partner, {operand.ready}));
    }
    for (int64_t s = 0; s < segments; ++s) {
      auto& operand = partial[static_cast<size_t>(s)];
      const Region sum = bufferRegion(final ? Buffer::Output : scratch, segmentAt(s));
      operand = {sum, builder.recvReduce(partner, operand, sum, final, {sent[static_cast<size_t>(s)]})};
    }
  }
  if (members.paired(request.rank)) {
    for (const auto& result : partial) {
      builder.send(result.region, request.rank + 1, {result.ready});
    }
  }
  return std::move(builder).finish();
}

// all_gather: in each round a rank exchanges all its parts with one partner, twice as far away as in
// the round before. Partners differ in one bit of their number, so a rank always has the parts of consecutive ranks,
// one piece of Output. If size is not a power of two, ranks are folded into members (members.h).
//
// Three ranks with parts a, b, c; members {0, 1} and {2}:
//
//   fold     rank 1 sends b to rank 0          rank 0: a b
//   round 0  ranks 0 and 2 exchange            both:   a b c
//   return   rank 0 sends a and c to rank 1    rank 1: a b c
//
// A power of two takes as many rounds as Bruck's, with always one frame per round; any other size takes two rounds
// more.
Schedule recursiveDoublingAllGather(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::RecursiveDoubling);
  const Members members(request.size);
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  const Run own = parts[request.rank];
  WriteLog written;
  const auto send = [&](Run run, int32_t to) {
    const int64_t segments = builder.segmentCount(run.numel, request.dtype);
    for (int64_t s = 0; s < segments; ++s) {
      const Run segment = splitBalanced(run, segments, s);
      builder.send(outputRegion(segment), to, written.writersOf(segment));
    }
  };
  const auto recv = [&](Run run, int32_t from) {
    const int64_t segments = builder.segmentCount(run.numel, request.dtype);
    for (int64_t s = 0; s < segments; ++s) {
      const Run segment = splitBalanced(run, segments, s);
      written.add(segment, builder.recv(from, outputRegion(segment)));
    }
  };
  // An odd rank gets back all but its own part.
  const auto before = [&](int32_t odd) { return parts.span(0, odd); };
  const auto behind = [&](int32_t odd) { return parts.span(odd + 1, request.size - odd - 1); };

  written.add(own, builder.copy(inputRegion({0, own.numel}), outputRegion(own)));
  if (members.isOdd(request.rank)) {
    const int32_t partner = request.rank - 1;
    send(own, partner);
    recv(before(request.rank), partner);
    recv(behind(request.rank), partner);
    return std::move(builder).finish();
  }
  if (members.paired(request.rank)) {
    recv(parts[request.rank + 1], request.rank + 1);
  }
  const int32_t member = members.memberOf(request.rank);
  for (int32_t distance = 1; distance < members.count; distance *= 2) {
    const auto blockOf = [&](int32_t of) {
      const int32_t first = members.rankOf(of / distance * distance);
      return parts.span(first, members.rankOf((of / distance + 1) * distance) - first);
    };
    const int32_t partner = members.rankOf(member ^ distance);
    send(blockOf(member), partner);
    recv(blockOf(member ^ distance), partner);
  }
  if (members.paired(request.rank)) {
    send(before(request.rank + 1), request.rank + 1);
    send(behind(request.rank + 1), request.rank + 1);
  }
  return std::move(builder).finish();
}

// Dissemination: in round k each rank reports to the rank 2^k further on that it, and all ranks that have reported to
// it, have entered. After ceil(log2(size)) rounds every rank knows of every other, for any size. Frames are empty.
Schedule disseminationBarrier(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::RecursiveDoubling);
  const Region nothing;
  StepId heard = kNoStep;
  for (int64_t distance = 1; distance < request.size; distance *= 2) {
    builder.send(nothing, builder.around(distance), {heard});
    heard = builder.recv(builder.around(-distance), nothing, {heard});
  }
  return std::move(builder).finish();
}

} // namespace pycomm
