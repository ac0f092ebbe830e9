// Recursive doubling all_gather: in each round a rank exchanges all its parts with one partner, twice as far away as in
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
#include <cstdint>

#include "schedule/algorithms.h"
#include "schedule/members.h"
#include "schedule/schedule_builder.h"
#include "schedule/write_log.h"

namespace pycomm {

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

} // namespace pycomm
