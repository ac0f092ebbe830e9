// Direct all_reduce and reduce_scatter of encoded values: every rank owns one part, receives every rank's contribution
// to it, decodes them and adds them in fp32, lower rank first. In an all_reduce it then encodes the sum once and sends
// it to all ranks. So a value is rounded once as a contribution and once as a result, for any number of ranks; a ring
// would round at every hop.
//
// The steps of rank 1 of three, with inputs a, b, c; e() encodes, d() decodes:
//
//   contribute  Encode and Send e(b0) to rank 0 and e(b2) to rank 2; Encode its own e(b1) as well
//   arrive      Recv e(a1) from rank 0 and e(c1) from rank 2
//   reduce      ReduceEncoded, in rank order: x = d(e(a1)) + d(e(b1)) + d(e(c1)), divided for Avg; reduce_scatter: that is Output
//   result      r = e(x); Send r to ranks 0 and 2; Decode r into Output's part 1
//   collect     Recv from ranks 0 and 2 their results, Decode them into Output's parts 0 and 2
//
// The owner, too, takes e(b1) for its own contribution and d(r) for the result. So all ranks hold the same bits, and
// these do not depend on the owners: the result of an all_reduce is d(e(sum of d(e(x)))) for any number of ranks and
// any cut, since parts and segments of an all_reduce are whole blocks of the codec. In a reduce_scatter blocks count
// from the start of each part.
//
// As in direct.cc, contributions are listed `pipeline_frames` segments ahead of sums, and scratch has a slot for each
// of those.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"

namespace pycomm {
namespace {

int64_t blocksOf(int64_t numel) {
  return numel / kCodecBlock + (numel % kCodecBlock == 0 ? 0 : 1);
}

/// Piece `index` of `whole` cut into `pieces` of whole blocks, counted from its beginning.
Run splitInBlocks(Run whole, int64_t pieces, int64_t index) {
  const Run blocks = splitBalanced({0, blocksOf(whole.numel)}, pieces, index);
  const int64_t begin = std::min(whole.numel, blocks.offset * kCodecBlock);
  const int64_t end = std::min(whole.numel, (blocks.offset + blocks.numel) * kCodecBlock);
  return {whole.offset + begin, end - begin};
}

class EncodedDirect {
 public:
  explicit EncodedDirect(const ScheduleRequest& request)
      : request_(request),
        builder_(request, Algorithm::Direct),
        shares_(request.kind == Collective::AllReduce),
        given_(Partition::ofParts(request.numel, request.size, request.counts)) {
    for (int32_t rank = 0; rank < request.size; ++rank) {
      const Run part = partOf(rank);
      const int64_t segments = segmentsOf(rank);
      rounds_ = std::max(rounds_, segments);
      stride_ = std::max(stride_, nbytesOf(splitInBlocks(part, segments, 0)));
    }
    ahead_ = std::min(builder_.pipelineFrames(), rounds_);
    slots_.assign(static_cast<size_t>(ahead_) + 1, Slot(static_cast<size_t>(request.size)));
    const int64_t nbytes = static_cast<int64_t>(slots_.size()) * request.size * stride_;
    arrivals_ = builder_.addScratch(DType::UInt8, nbytes);
    outgoing_ = builder_.addScratch(DType::UInt8, nbytes);
    results_ = shares_ ? builder_.addScratch(DType::UInt8, nbytes) : Buffer::None;
  }

  Schedule build() && {
    for (int64_t s = 0; s < rounds_ + ahead_; ++s) {
      if (s < rounds_) {
        contribute(s);
      }
      if (s >= ahead_) {
        reduce(s - ahead_);
        collect(s - ahead_);
      }
    }
    return std::move(builder_).finish();
  }

 private:
  /// The last steps that used one slot's scratch, by rank: the next user of the slot waits for them.
  struct Slot {
    explicit Slot(size_t size)
        : contributed(size, kNoStep), arrived(size, kNoStep), shared(size, kNoStep), collected(size, kNoStep) {}
    std::vector<StepId> contributed; ///< Send of a contribution
    std::vector<StepId> arrived; ///< Recv of one
    StepId reduced = kNoStep;
    std::vector<StepId> shared; ///< Send of the result; for this rank's own: Decode
    std::vector<StepId> collected; ///< Decode of another rank's result
  };

  [[nodiscard]] Run partOf(int32_t rank) const {
    return shares_ ? splitInBlocks({0, request_.numel}, request_.size, rank) : given_[rank];
  }
  [[nodiscard]] int64_t segmentsOf(int32_t rank) const {
    const int64_t segments = builder_.segmentCount(encodedNbytes(request_.codec, partOf(rank).numel), DType::UInt8);
    return std::min(segments, std::max<int64_t>(1, blocksOf(partOf(rank).numel)));
  }
  [[nodiscard]] bool has(int32_t rank, int64_t s) const {
    return s < segmentsOf(rank);
  }
  [[nodiscard]] Run segmentOf(int32_t owner, int64_t s) const {
    return splitInBlocks(partOf(owner), segmentsOf(owner), s);
  }
  [[nodiscard]] int64_t nbytesOf(Run run) const {
    return encodedNbytes(request_.codec, run.numel);
  }
  [[nodiscard]] Slot& slotOf(int64_t s) {
    return slots_[static_cast<size_t>(s) % slots_.size()];
  }
  [[nodiscard]] Region scratch(Buffer buffer, int64_t s, int32_t rank, Run run) const {
    const int64_t slot = s % static_cast<int64_t>(slots_.size());
    return {buffer, (slot * request_.size + rank) * stride_, nbytesOf(run)};
  }

  void contribute(int64_t s) {
    Slot& slot = slotOf(s);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t owner = builder_.around(distance);
      if (has(owner, s)) {
        const Run run = segmentOf(owner, s);
        StepId& sent = slot.contributed[static_cast<size_t>(owner)];
        const Region wire = scratch(outgoing_, s, owner, run);
        const auto mine = builder_.operand(run);
        sent = builder_.send(wire, owner, {builder_.encode(mine.region, wire, {mine.ready, sent})});
      }
    }
    if (!has(request_.rank, s)) {
      return;
    }
    const StepId reduced_before = slot.reduced;
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t from = builder_.around(-distance);
      slot.arrived[static_cast<size_t>(from)] =
          builder_.recv(from, scratch(arrivals_, s, from, segmentOf(request_.rank, s)), {reduced_before});
    }
  }

  void reduce(int64_t s) {
    if (!has(request_.rank, s)) {
      return;
    }
    Slot& slot = slotOf(s);
    const Run run = segmentOf(request_.rank, s);
    const auto mine = builder_.operand(run);
    const Region own = scratch(arrivals_, s, request_.rank, run);
    Deps deps = {builder_.encode(mine.region, own, {mine.ready, slot.reduced})};
    std::vector<Region> sources;
    for (int32_t rank = 0; rank < request_.size; ++rank) {
      sources.push_back(scratch(arrivals_, s, rank, run));
      deps.push_back(slot.arrived[static_cast<size_t>(rank)]);
    }
    if (!shares_) {
      const int64_t begin = run.offset - partOf(request_.rank).offset;
      const Region output = outputRegion({begin, run.numel});
      slot.reduced = builder_.reduceEncoded(sources, output, output, deps);
      return;
    }
    deps.insert(deps.end(), slot.shared.begin(), slot.shared.end());
    const Region result = scratch(results_, s, request_.rank, run);
    slot.reduced = builder_.reduceEncoded(sources, result, outputRegion(run), deps);
    for (int32_t distance = 1; distance < request_.size; ++distance) {
      const int32_t to = builder_.around(distance);
      slot.shared[static_cast<size_t>(to)] = builder_.send(result, to, {slot.reduced});
    }
    slot.shared[static_cast<size_t>(request_.rank)] = builder_.decode(result, outputRegion(run), {slot.reduced});
  }

  void collect(int64_t s) {
    Slot& slot = slotOf(s);
    for (int32_t distance = 1; shares_ && distance < request_.size; ++distance) {
      const int32_t owner = builder_.around(-distance);
      if (has(owner, s)) {
        const Run run = segmentOf(owner, s);
        const Region wire = scratch(results_, s, owner, run);
        StepId& decoded = slot.collected[static_cast<size_t>(owner)];
        decoded = builder_.decode(wire, outputRegion(run), {builder_.recv(owner, wire, {decoded})});
      }
    }
  }

  const ScheduleRequest& request_; ///< outlives this object, which lives within one makeSchedule()
  ScheduleBuilder builder_;
  const bool shares_; ///< all_reduce: sums are sent to all ranks
  const Partition given_; ///< a reduce_scatter's parts
  int64_t rounds_ = 1; ///< segments of the longest part
  int64_t stride_ = 0; ///< bytes of the longest segment
  int64_t ahead_ = 0; ///< segments between a contribution and its sum in the list
  std::vector<Slot> slots_;
  Buffer arrivals_ = Buffer::None; ///< contributions to this rank's part, one place per contributor
  Buffer outgoing_ = Buffer::None; ///< contributions to others, one place per owner
  Buffer results_ = Buffer::None; ///< one place per owner
};

} // namespace

Schedule encodedDirect(const ScheduleRequest& request) {
  // There are three of these buffers.
  return EncodedDirect(withScratchOf(request, 8 << 20)).build();
}

} // namespace pycomm
