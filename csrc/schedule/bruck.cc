// Bruck's all_gather: ceil(log2(size)) rounds for any size, while the ring takes size - 1. In round k each rank has the
// parts of the 2^k ranks from its own on; it sends them to the rank 2^k before it and receives as many from the one 2^k
// behind it (in the last round, as many as are missing).
//
// Five ranks with parts a, b, c, d, e. The contents of rank 3:
//
//   start      d
//   distance 1 d e          from 4; sent d to 2
//   distance 2 d e a b      from 0; sent d e to 1
//   distance 4 d e a b c    from 2, which has c d e a and sends c alone; sent d alone to 4
//
// Parts go straight to their places in Output, so that nothing has to be rotated in the end. A block that spans the
// place where the ring wraps from the last rank to rank 0 is two runs of Output, and so two frames.
//
// Every rank sends each part log2(size) times at most and the bytes are the ring's; but a round moves as many bytes as
// all rounds before it together, and rounds do not overlap. So Bruck's algorithm is for small parts.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"
#include "schedule/write_log.h"

namespace pycomm {
namespace {

/// The parts of `count` ranks from `first` on, around the ring, as runs of the whole; at least one, maybe empty.
std::vector<Run> runsOf(const Partition& parts, int32_t first, int32_t count, int32_t size) {
  const int32_t until_wrap = std::min(count, size - first);
  std::vector<Run> runs = {parts.span(first, until_wrap)};
  if (count > until_wrap) {
    runs.push_back(parts.span(0, count - until_wrap));
  }
  return runs;
}

} // namespace

Schedule bruckAllGather(const ScheduleRequest& request) {
  ScheduleBuilder builder(request, Algorithm::Bruck);
  const Partition parts = Partition::ofParts(request.numel, request.size, request.counts);
  const Run own = parts[request.rank];
  WriteLog written;
  written.add(own, builder.copy(inputRegion({0, own.numel}), outputRegion(own)));
  for (int64_t distance = 1; distance < request.size; distance *= 2) {
    const auto count = static_cast<int32_t>(std::min(distance, request.size - distance));
    const int32_t before = builder.around(-distance);
    const int32_t behind = builder.around(distance);
    for (const Run run : runsOf(parts, request.rank, count, request.size)) {
      const int64_t segments = builder.segmentCount(run.numel, request.dtype);
      for (int64_t s = 0; s < segments; ++s) {
        const Run segment = splitBalanced(run, segments, s);
        if (distance == 1) { // the first need not wait for the copy
          builder.send(inputRegion({segment.offset - own.offset, segment.numel}), before);
        } else {
          builder.send(outputRegion(segment), before, written.writersOf(segment));
        }
      }
    }
    for (const Run run : runsOf(parts, behind, count, request.size)) {
      const int64_t segments = builder.segmentCount(run.numel, request.dtype);
      for (int64_t s = 0; s < segments; ++s) {
        const Run segment = splitBalanced(run, segments, s);
        written.add(segment, builder.recv(behind, outputRegion(segment)));
      }
    }
  }
  return std::move(builder).finish();
}

} // namespace pycomm
