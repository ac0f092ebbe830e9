// Recursive halving reduce_scatter: log2(size) rounds that move half as much each time, so every rank sends (size - 1)
// / size of the tensor, like the ring, in fewer rounds. In each round two partners split the block of which both have
// partial sums: each sends the other's half and keeps its own, adding the arriving half to it. Partners are half the
// members away at first, neighbours in the last round. If size is not a power of two, ranks are folded into members
// (members.h), which costs the odd ranks' whole tensor twice.
//
// Three ranks with inputs a, b, c; a1 is the part of a that belongs to rank 1. Members {0, 1} and {2}:
//
//   fold     rank 1 sends b to rank 0      rank 0: scratch = a+b
//   round 0  rank 0 sends (a+b)2 to 2      rank 2: Output = (a+b)2 + c2, final
//            rank 2 sends c0, c1 to 0      rank 0: Output = (a+b)0 + c0, scratch = (a+b)1 + c1, both final
//   return   rank 0 sends that to rank 1   rank 1: Output
//
// One rank makes each sum. It folds a balanced tree over the members, the farthest first: for four ranks (0 + 2) + (1 +
// 3), the lower of two partners always first. The small floats are rounded once per round.
//
// In place: the first round reads the half that it keeps before any step writes there, and never writes the half that
// it sends.
#include <cstdint>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/members.h"
#include "schedule/schedule_builder.h"
#include "schedule/write_log.h"

namespace pycomm {
namespace {

class RecursiveHalving {
 public:
  explicit RecursiveHalving(const ScheduleRequest& request)
      : request_(request),
        builder_(request, Algorithm::RecursiveHalving),
        members_(request.size),
        parts_(Partition::ofParts(request.numel, request.size, request.counts)) {}

  Schedule build() && {
    const bool odd = members_.isOdd(request_.rank);
    takeOperands();
    if (odd) {
      send({0, parts_.numel()}, request_.rank - 1);
      const Run result = {0, parts_[request_.rank].numel};
      forEachSegment(result, [&](Run segment) { builder_.recv(request_.rank - 1, outputRegion(segment)); });
      return std::move(builder_).finish();
    }
    if (members_.paired(request_.rank) || members_.count > 2) {
      scratch_ = builder_.addScratch(request_.dtype, parts_.numel());
    }
    if (members_.paired(request_.rank)) {
      WriteLog sums;
      reduce({0, parts_.numel()}, request_.rank + 1, /*final=*/false, sums);
      partial_ = scratch_;
      written_ = std::move(sums);
    }
    halve();
    if (members_.paired(request_.rank)) {
      send(parts_[request_.rank + 1], request_.rank + 1);
    }
    return std::move(builder_).finish();
  }

 private:
  template <typename Use>
  void forEachSegment(Run run, Use use) {
    const int64_t segments = builder_.segmentCount(run.numel, request_.dtype);
    for (int64_t s = 0; s < segments; ++s) {
      use(splitBalanced(run, segments, s));
    }
  }

  void takeOperands() {
    forEachSegment({0, parts_.numel()}, [&](Run segment) {
      const auto mine = builder_.operandInPlace(segment);
      partial_ = mine.region.buffer;
      written_.add(segment, mine.ready);
    });
  }

  /// The elements that belong to members [first, first + count).
  [[nodiscard]] Run blockOf(int32_t first, int32_t count) const {
    const int32_t rank = members_.rankOf(first);
    return parts_.span(rank, members_.rankOf(first + count) - rank);
  }
  /// The same, cut between the two ranks of a paired member: their results go to different places.
  [[nodiscard]] std::vector<Run> piecesOf(int32_t first, int32_t count) const {
    const int32_t rank = members_.rankOf(first);
    if (count == 1 && members_.paired(rank)) {
      return {parts_[rank], parts_[rank + 1]};
    }
    return {blockOf(first, count)};
  }

  void send(Run run, int32_t to) {
    forEachSegment(
        run, [&](Run segment) { builder_.send(bufferRegion(partial_, segment), to, written_.writersOf(segment)); });
  }

  /// Adds the arriving frames to the partial sums of `run`: into Output if that is this rank's result, else into
  /// scratch.
  void reduce(Run run, int32_t from, bool final, WriteLog& sums) {
    const Run own = parts_[request_.rank];
    const bool result = final && run.offset == own.offset && run.numel == own.numel;
    forEachSegment(run, [&](Run segment) {
      const Run placed = {segment.offset - (result ? own.offset : 0), segment.numel};
      const Region sum = bufferRegion(result ? Buffer::Output : scratch_, placed);
      const ScheduleBuilder::Operand local = {bufferRegion(partial_, segment), kNoStep};
      sums.add(segment, builder_.recvReduce(from, local, sum, final, written_.writersOf(segment)));
    });
  }

  void halve() {
    const int32_t member = members_.memberOf(request_.rank);
    for (int32_t half = members_.count / 2; half > 0; half /= 2) {
      const int32_t mine = member / half * half;
      const int32_t other = mine ^ half;
      const int32_t partner = members_.rankOf(member ^ half);
      for (const Run run : piecesOf(other, half)) {
        send(run, partner);
      }
      WriteLog sums;
      for (const Run run : piecesOf(mine, half)) {
        reduce(run, partner, /*final=*/half == 1, sums);
      }
      partial_ = scratch_;
      written_ = std::move(sums);
    }
  }

  const ScheduleRequest& request_; ///< outlives this object, which lives within one makeSchedule()
  ScheduleBuilder builder_;
  const Members members_;
  const Partition parts_;
  Buffer scratch_ = Buffer::None;
  Buffer partial_ = Buffer::Input; ///< where the partial sums are, with the input's offsets
  WriteLog written_; ///< the steps that wrote them
};

} // namespace

Schedule recursiveHalvingReduceScatter(const ScheduleRequest& request) {
  return RecursiveHalving(request).build();
}

} // namespace pycomm
