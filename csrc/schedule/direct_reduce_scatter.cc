// Direct reduce_scatter: every rank sends to every other one its contribution to the other's part, and each adds all of
// them at once. One hop, one fp32 accumulator and one rounding (ReduceMany), while a ring would round at every hop. The
// bytes are the ring's, in one message per other rank.
//
// The steps of rank 1 of three, with inputs a, b, c:
//
//   contribute  Send b2 to rank 2 and b0 to rank 0
//   arrive      Recv a1 from rank 0 and c1 from rank 2
//   reduce      ReduceMany, in rank order: Output = a1 + b1 + c1, divided before rounding for Avg
//
// Parts are cut into segments, `pipeline_frames` of which are listed ahead of their sums. Scratch has a slot for each
// of those and is reused after that, so it does not grow with the tensor; many ranks make segments shorter, so that it
// does not grow with them either.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"

namespace pycomm {
namespace {

class DirectReduceScatter {
 public:
  explicit DirectReduceScatter(const ScheduleRequest& request)
      : request_(request),
        builder_(request, Algorithm::Direct),
        parts_(Partition::ofParts(request.numel, request.size, request.counts)),
        own_(parts_[request.rank]),
        segments_(builder_.segmentCount(own_.numel, request.dtype)),
        segment_numel_(splitBalanced(own_, segments_, 0).numel) {
    int64_t longest = 1;
    for (int32_t rank = 0; rank < request.size; ++rank) {
      longest = std::max(longest, segmentsOf(rank));
    }
    rounds_ = longest;
    ahead_ = std::min(builder_.pipelineFrames(), longest);
    slots_.assign(
        static_cast<size_t>(ahead_) + 1, Slot{std::vector<StepId>(static_cast<size_t>(request.size), kNoStep)});
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
    }
    return std::move(builder_).finish();
  }

 private:
  struct Slot {
    std::vector<StepId> arrived; ///< one per contributing rank
    StepId reduced = kNoStep; ///< the last step that read this slot
  };

  [[nodiscard]] int64_t segmentsOf(int32_t rank) const {
    return builder_.segmentCount(parts_[rank].numel, request_.dtype);
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
        const auto mine = builder_.operand(splitBalanced(parts_[owner], segmentsOf(owner), s));
        builder_.send(mine.region, owner, {mine.ready});
      }
    }
  }

  void receive(int64_t s) {
    Slot& slot = slotOf(s);
    const int64_t numel = splitBalanced(own_, segments_, s).numel;
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t from = builder_.around(-distance);
      slot.arrived[static_cast<size_t>(from)] = builder_.recv(from, arrival(s, from, numel), {slot.reduced});
    }
  }

  void reduce(int64_t s) {
    Slot& slot = slotOf(s);
    const Run run = splitBalanced(own_, segments_, s);
    const auto mine = builder_.operand(run);
    std::vector<Region> sources;
    Deps deps = {mine.ready};
    for (int32_t rank = 0; rank < request_.size; ++rank) {
      const bool own = rank == request_.rank;
      sources.push_back(own ? mine.region : arrival(s, rank, run.numel));
      deps.push_back(own ? kNoStep : slot.arrived[static_cast<size_t>(rank)]);
    }
    slot.reduced = builder_.reduceMany(sources, outputRegion({run.offset - own_.offset, run.numel}), deps);
  }

  const ScheduleRequest& request_; ///< outlives this object, which lives within one makeSchedule()
  ScheduleBuilder builder_;
  const Partition parts_;
  const Run own_;
  const int64_t segments_; ///< of this rank's part
  const int64_t segment_numel_; ///< the longest segment
  int64_t rounds_ = 0; ///< segments of the longest part
  int64_t ahead_ = 0; ///< segments between a contribution and its sum in the list
  std::vector<Slot> slots_;
  Buffer arrivals_ = Buffer::None; ///< contributions to this rank's part, one place per contributor
};

} // namespace

Schedule directReduceScatter(const ScheduleRequest& request) {
  return DirectReduceScatter(withScratchOf(request, 16 << 20)).build();
}

} // namespace pycomm
