// Direct all_reduce and reduce_scatter: each rank owns one part of the tensor, receives every rank's contribution to it and adds all of
// them at once, from one fp32 accumulator, so that the sum is rounded once (ReduceMany); a ring would round at every hop. In an all_reduce
// the owner then sends the result to all ranks. That takes two hops for any size, a reduce_scatter one; the bytes are the ring's.
//
// Three ranks with inputs a, b, c. The steps of rank 1, the owner of part 1:
//
//   contribute  Send b2 to rank 2 and b0 to rank 0
//   arrive      Recv a1 from rank 0 and c1 from rank 2
//   reduce      ReduceMany, in rank order: x = a1 + b1 + c1, divided before rounding for Avg; in a reduce_scatter x is Output
//   result      Send x, which is Output's part 1, to ranks 2 and 0
//   collect     Recv from ranks 0 and 2 their results into Output's parts 0 and 2
//
// Parts are cut into segments. Contributions are listed `pipeline_frames` segments ahead of results, since a result
// has to wait for the slowest rank's contribution. Scratch has one slot for each of those segments and is reused after
// that, so it does not grow with the tensor: (pipeline_frames + 1) * size segments, which many ranks make shorter so
// that they fit into 16 MiB.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"

namespace pycomm {
namespace {

class Direct {
 public:
  explicit Direct(const ScheduleRequest& request)
      : request_(request),
        builder_(request, Algorithm::Direct),
        shares_(request.kind == Collective::AllReduce),
        parts_(
            shares_ ? Partition::balanced(request.numel, request.size)
                    : Partition::ofParts(request.numel, request.size, request.counts)),
        own_(parts_[request.rank]),
        segments_(segmentsOf(request.rank)),
        segment_numel_(splitBalanced(asLongAs(request.rank), segments_, 0).numel) {
    for (int32_t rank = 0; rank < request.size; ++rank) {
      rounds_ = std::max(rounds_, segmentsOf(rank));
    }
    ahead_ = std::min(builder_.pipelineFrames(), rounds_);
    slots_.assign(static_cast<size_t>(ahead_) + 1, Slot(static_cast<size_t>(request.size)));
    arrivals_ = builder_.addScratch(request.dtype, static_cast<int64_t>(slots_.size()) * request.size * segment_numel_);
    builder_.keepOperands(2 * int64_t{request.size});
  }

  Schedule build() && {
    for (int64_t s = 0; s < rounds_ + ahead_; ++s) {
      if (s < rounds_) {
        contribute(s);
      }
      if (s < segments_) {
        receive(s);
      }
      if (s >= ahead_ && s - ahead_ < segments_) {
        reduce(s - ahead_);
      }
      if (shares_ && s >= ahead_) {
        collect(s - ahead_);
      }
    }
    return std::move(builder_).finish();
  }

 private:
  /// The last steps that used one slot's scratch: the next user of the slot waits for them.
  struct Slot {
    explicit Slot(size_t size) : arrived(size, kNoStep) {}
    std::vector<StepId> arrived; ///< by rank: Recv of a contribution
    StepId reduced = kNoStep;
  };

  /// The part that decides how a rank's is cut. In an all_reduce all are cut like the first, which is a longest one: every rank then has
  /// as many results.
  [[nodiscard]] Run asLongAs(int32_t rank) const {
    return parts_[shares_ ? 0 : rank];
  }
  [[nodiscard]] int64_t segmentsOf(int32_t rank) const {
    return builder_.segmentCount(asLongAs(rank).numel, request_.dtype);
  }
  [[nodiscard]] Run segmentOf(int32_t owner, int64_t s) const {
    return splitBalanced(parts_[owner], segmentsOf(owner), s);
  }
  [[nodiscard]] Slot& slotOf(int64_t s) {
    return slots_[static_cast<size_t>(s) % slots_.size()];
  }
  [[nodiscard]] Region arrival(int64_t s, int32_t from, int64_t numel) const {
    const int64_t slot = s % static_cast<int64_t>(slots_.size());
    return {arrivals_, (slot * request_.size + from) * segment_numel_, numel};
  }

  void contribute(int64_t s) {
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t owner = builder_.around(distance);
      if (s < segmentsOf(owner)) {
        const auto mine = builder_.operand(segmentOf(owner, s));
        builder_.send(mine.region, owner, {mine.ready});
      }
    }
  }

  void receive(int64_t s) {
    Slot& slot = slotOf(s);
    const int64_t numel = segmentOf(request_.rank, s).numel;
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t from = builder_.around(-distance);
      slot.arrived[static_cast<size_t>(from)] = builder_.recv(from, arrival(s, from, numel), {slot.reduced});
    }
  }

  void reduce(int64_t s) {
    Slot& slot = slotOf(s);
    const Run run = segmentOf(request_.rank, s);
    const auto mine = builder_.operand(run);
    std::vector<Region> sources;
    Deps deps = {mine.ready};
    for (int32_t rank = 0; rank < request_.size; ++rank) {
      const bool own = rank == request_.rank;
      sources.push_back(own ? mine.region : arrival(s, rank, run.numel));
      deps.push_back(own ? kNoStep : slot.arrived[static_cast<size_t>(rank)]);
    }
    const Region result = outputRegion({run.offset - (shares_ ? 0 : own_.offset), run.numel});
    slot.reduced = builder_.reduceMany(sources, result, deps);
    for (int32_t distance = 1; shares_ && distance < request_.size; ++distance) {
      builder_.send(result, builder_.around(distance), {slot.reduced});
    }
  }

  void collect(int64_t s) {
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t owner = builder_.around(-distance);
      builder_.recv(owner, outputRegion(segmentOf(owner, s)));
    }
  }

  const ScheduleRequest& request_; ///< outlives this object, which lives within one makeSchedule()
  ScheduleBuilder builder_;
  const bool shares_; ///< all ranks get every result: an all_reduce
  const Partition parts_;
  const Run own_;
  const int64_t segments_; ///< of this rank's part
  const int64_t segment_numel_; ///< the longest segment
  int64_t rounds_ = 1; ///< segments of the longest part
  int64_t ahead_ = 0; ///< segments between a contribution and its sum in the list
  std::vector<Slot> slots_;
  Buffer arrivals_ = Buffer::None; ///< contributions to this rank's part, one place per contributor
};

} // namespace

Schedule direct(const ScheduleRequest& request) {
  return Direct(withScratchOf(request, 16 << 20)).build();
}

} // namespace pycomm
