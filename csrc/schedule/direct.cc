// Direct all_reduce: each rank owns one slice of the tensor, receives every rank's contribution to it, adds all of them
// at once and sends the result to all ranks. It takes two hops for any size, and the sum is rounded once, from one fp32
// accumulator (ReduceMany).
//
// Three ranks with inputs a, b, c. The steps of rank 1, the owner of slice 1:
//
//   contribute  Send b0 to rank 0 and b2 to rank 2
//   arrive      Recv a1 from rank 0 and c1 from rank 2
//   reduce      ReduceMany, in rank order, into Output's slice 1: x = a1 + b1 + c1, divided before rounding for Avg
//   result      Send x to ranks 0 and 2
//   collect     Recv from ranks 0 and 2 their results into Output's slices 0 and 2
//
// Slices are cut into segments. Contributions are listed `pipeline_frames` segments ahead of results, since a result
// has to wait for the slowest rank's contribution. Scratch has one slot for each of those segments and is reused after
// that: (pipeline_frames + 1) * size segments, which many ranks make shorter so that they fit into 16 MiB.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"

namespace pycomm {
namespace {

class DirectAllReduce {
 public:
  explicit DirectAllReduce(const ScheduleRequest& request)
      : request_(request),
        builder_(request, Algorithm::Direct),
        slices_(Partition::balanced(request.numel, request.size)),
        segments_(builder_.segmentCount(slices_[0].numel, request.dtype)), // slice 0 is a longest one
        ahead_(std::min(builder_.pipelineFrames(), segments_)),
        segment_numel_(splitBalanced(slices_[0], segments_, 0).numel),
        slots_(static_cast<size_t>(ahead_) + 1, Slot(static_cast<size_t>(request.size))) {
    const int64_t scratch_numel = static_cast<int64_t>(slots_.size()) * request.size * segment_numel_;
    arrivals_ = builder_.addScratch(request.dtype, scratch_numel);
    builder_.keepOperands(2 * int64_t{request.size});
  }

  Schedule build() && {
    for (int64_t s = 0; s < segments_ + ahead_; ++s) {
      if (s < segments_) {
        contribute(s);
      }
      if (s >= ahead_) {
        reduceAndShare(s - ahead_);
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

  [[nodiscard]] Slot& slotOf(int64_t s) {
    return slots_[static_cast<size_t>(s) % slots_.size()];
  }
  [[nodiscard]] Run segmentOf(int32_t owner, int64_t s) const {
    return splitBalanced(slices_[owner], segments_, s);
  }
  [[nodiscard]] Region arrival(int64_t s, int32_t rank, int64_t numel) const {
    const int64_t slot = s % static_cast<int64_t>(slots_.size());
    return {arrivals_, (slot * request_.size + rank) * segment_numel_, numel};
  }

  void contribute(int64_t s) {
    Slot& slot = slotOf(s);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t owner = builder_.around(distance);
      const auto mine = builder_.operand(segmentOf(owner, s));
      builder_.send(mine.region, owner, {mine.ready});
    }
    const Run own = segmentOf(request_.rank, s);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t from = builder_.around(-distance);
      slot.arrived[static_cast<size_t>(from)] = builder_.recv(from, arrival(s, from, own.numel), {slot.reduced});
    }
  }

  void reduceAndShare(int64_t s) {
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
    const Region result = outputRegion(run);
    slot.reduced = builder_.reduceMany(sources, result, deps);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
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
  const Partition slices_;
  const int64_t segments_; ///< of every slice
  const int64_t ahead_; ///< segments between a contribution and its result in the list
  const int64_t segment_numel_; ///< the longest segment
  std::vector<Slot> slots_;
  Buffer arrivals_ = Buffer::None; ///< contributions to this rank's slice, one place per contributor
};

} // namespace

Schedule directAllReduce(const ScheduleRequest& request) {
  return DirectAllReduce(withScratchOf(request, 16 << 20)).build();
}

} // namespace pycomm
