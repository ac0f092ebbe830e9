// Direct all_reduce: each rank owns one slice of the tensor, gets everyone's contribution to it, adds all of them up
// at once and sends the result to everyone. Two hops whatever the size, one rounding of the sum in one fp32
// accumulator (ReduceMany), and where wire_dtype differs from dtype a value is encoded twice however many ranks there
// are: once as a contribution, once as a result. A ring would encode at every hop, so that the error would grow with
// size.
//
// Three ranks with inputs a, b, c in float32, wire float16; e() encodes, d() decodes. What rank 1, the owner of slice
// 1, does:
//
//   contribute  Encode and Send e(b0) to rank 0 and e(b2) to rank 2; Encode its own e(b1) as well
//   arrive      Recv e(a1) from rank 0 and e(c1) from rank 2
//   reduce      ReduceMany, in rank order: x = round16(e(a1) + e(b1) + e(c1)), divided before rounding for Avg
//   result      Send x to ranks 0 and 2; Decode d(x) into Output's slice 1
//   collect     Recv from ranks 0 and 2 their results, Decode them into Output's slices 0 and 2
//
// The owner takes d(x) too, not its exact sum: so all ranks hold the same bits. With wire_dtype equal to dtype
// nothing is encoded: contributions leave from Input, ReduceMany writes Output, results arrive in Output.
//
// Slices are cut into segments. Contributions are listed `pipeline_frames` segments ahead of results, since a result
// has to wait for the slowest rank's contribution. Scratch has one slot for each of those segments and is used again
// after that: up to (pipeline_frames + 1) * size segments for arrivals, and the same again twice where values are
// encoded.
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
        encoded_(request.wire_dtype != request.dtype),
        segments_(builder_.segmentCount(slices_[0].numel, request.wire_dtype)), // slice 0 is a longest one
        ahead_(std::min(builder_.pipelineFrames(), segments_)),
        segment_numel_(splitBalanced(slices_[0], segments_, 0).numel),
        slots_(static_cast<size_t>(ahead_) + 1, Slot(static_cast<size_t>(request.size))) {
    const int64_t scratch_numel = static_cast<int64_t>(slots_.size()) * request.size * segment_numel_;
    arrivals_ = builder_.addScratch(request.wire_dtype, scratch_numel);
    if (encoded_) {
      outgoing_ = builder_.addScratch(request.wire_dtype, scratch_numel);
      results_ = builder_.addScratch(request.wire_dtype, scratch_numel);
    }
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
  /// The last steps that used one slot's scratch, by rank: what uses it next has to wait for them.
  struct Slot {
    explicit Slot(size_t size)
        : contributed(size, kNoStep), arrived(size, kNoStep), shared(size, kNoStep), collected(size, kNoStep) {}
    std::vector<StepId> contributed; ///< Send of a contribution
    std::vector<StepId> arrived; ///< Recv of one, or for this rank's own: whatever made it ready
    StepId reduced = kNoStep;
    std::vector<StepId> shared; ///< Send of the result; for this rank's own: Decode
    std::vector<StepId> collected; ///< Decode of another rank's result
  };

  [[nodiscard]] Slot& slotOf(int64_t s) {
    return slots_[static_cast<size_t>(s) % slots_.size()];
  }
  [[nodiscard]] Run segmentOf(int32_t owner, int64_t s) const {
    return splitBalanced(slices_[owner], segments_, s);
  }
  [[nodiscard]] Region scratch(Buffer buffer, int64_t s, int32_t rank, int64_t numel) const {
    const int64_t slot = s % static_cast<int64_t>(slots_.size());
    return {buffer, (slot * request_.size + rank) * segment_numel_, numel};
  }

  void contribute(int64_t s) {
    Slot& slot = slotOf(s);
    const StepId reduced_before = slot.reduced;
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t owner = builder_.around(distance);
      const Run run = segmentOf(owner, s);
      auto mine = builder_.operand(run);
      StepId& sent = slot.contributed[static_cast<size_t>(owner)];
      if (encoded_) {
        const Region wire = scratch(outgoing_, s, owner, run.numel);
        mine = {wire, builder_.encode(mine.region, wire, {mine.ready, sent})};
      }
      sent = builder_.send(mine.region, owner, {mine.ready});
    }
    const Run own = segmentOf(request_.rank, s);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t from = builder_.around(-distance);
      slot.arrived[static_cast<size_t>(from)] =
          builder_.recv(from, scratch(arrivals_, s, from, own.numel), {reduced_before});
    }
  }

  void reduceAndShare(int64_t s) {
    Slot& slot = slotOf(s);
    const Run run = segmentOf(request_.rank, s);
    auto mine = builder_.operand(run);
    if (encoded_) {
      const Region wire = scratch(arrivals_, s, request_.rank, run.numel);
      mine = {wire, builder_.encode(mine.region, wire, {mine.ready, slot.reduced})};
    }
    std::vector<Region> sources;
    Deps deps = {mine.ready};
    for (int32_t rank = 0; rank < request_.size; ++rank) {
      const bool own = rank == request_.rank;
      sources.push_back(own ? mine.region : scratch(arrivals_, s, rank, run.numel));
      deps.push_back(own ? kNoStep : slot.arrived[static_cast<size_t>(rank)]);
    }
    deps.insert(deps.end(), slot.shared.begin(), slot.shared.end());
    const Region result = encoded_ ? scratch(results_, s, request_.rank, run.numel) : outputRegion(run);
    slot.reduced = builder_.reduceMany(sources, result, deps);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t to = builder_.around(distance);
      slot.shared[static_cast<size_t>(to)] = builder_.send(result, to, {slot.reduced});
    }
    if (encoded_) {
      slot.shared[static_cast<size_t>(request_.rank)] = builder_.decode(result, outputRegion(run), {slot.reduced});
    }
  }

  void collect(int64_t s) {
    Slot& slot = slotOf(s);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t owner = builder_.around(-distance);
      const Run run = segmentOf(owner, s);
      if (!encoded_) {
        builder_.recv(owner, outputRegion(run));
        continue;
      }
      StepId& decoded = slot.collected[static_cast<size_t>(owner)];
      const Region wire = scratch(results_, s, owner, run.numel);
      const StepId arrived = builder_.recv(owner, wire, {decoded});
      decoded = builder_.decode(wire, outputRegion(run), {arrived});
    }
  }

  const ScheduleRequest& request_; ///< outlives this object, which lives within one makeSchedule()
  ScheduleBuilder builder_;
  const Partition slices_;
  const bool encoded_;
  const int64_t segments_; ///< of every slice
  const int64_t ahead_; ///< segments between a contribution and its result in the list
  const int64_t segment_numel_; ///< the longest segment
  std::vector<Slot> slots_;
  Buffer arrivals_ = Buffer::None; ///< contributions to this rank's slice, by contributor
  Buffer outgoing_ = Buffer::None; ///< encoded contributions, by owner
  Buffer results_ = Buffer::None; ///< encoded results, by owner
};

} // namespace

Schedule directAllReduce(const ScheduleRequest& request) {
  return DirectAllReduce(request).build();
}

} // namespace pycomm
