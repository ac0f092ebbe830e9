// all_reduce over hosts with several ranks: every byte crosses each NIC once, and all local ranks share the work. The
// tensor is cut into one slice for each rank of the host that has the fewest; rank k of every host carries slice k. For
// each slice:
//
//   gather    the other ranks of a host send the slice to its carrier, which adds them up in scratch
//   ring      the carriers run a ring (ring.cc) over the hosts: chunk h of the slice becomes complete on host h
//   spread    the carrier sends the sum to the other ranks of its host
//
// Two hosts with the ranks 0 1 | 2 3, slices A (ranks 0 and 2) and B (ranks 1 and 3):
//
//   gather    0 -B-> 1, 1 -A-> 0                 2 -B-> 3, 3 -A-> 2
//   ring      0 <-A-> 2, 1 <-B-> 3               half of each chunk one way, half the other: 2 * (hosts - 1) / hosts
//   spread    0 -A-> 1, 1 -B-> 0                 2 -A-> 3, 3 -B-> 2
//
// A flat ring over all ranks sends 2 * (ranks - 1) / ranks of the tensor through each NIC: half as much again here.
//
// reduce_scatter is the first half. If every host has the same number of ranks, slice k is the parts of rank k of every
// host, and a part becomes complete on the rank that it belongs to. all_gather is the other half.
//
// Bits: one carrier makes each sum and all ranks copy it. Small floats are rounded once per local rank and once per
// host.
//
// Output is written only by the ring's complete sums and by copies of them, so only after every rank is among the
// causes. In place: a rank's input is overwritten only by a sum that contains it.
//
// Order of the steps: waves of `pipeline_frames` segments of each chunk, as in the ring. The gathering of a wave is
// listed before the ring of the wave before it. So the ring never waits for the host, and the frames of both directions
// of an edge are in the same order at both ends. Scratch holds two waves: a wave's sums are written after the ring has
// read those of two waves ago.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "schedule/algorithms.h"
#include "schedule/schedule_builder.h"
#include "schedule/topology_view.h"

namespace pycomm {
namespace {

constexpr int64_t kScratchWaves = 2;

/// One rank's part in a hierarchical all_reduce, reduce_scatter or all_gather.
class Hierarchical {
 public:
  Hierarchical(const ScheduleRequest& request, const TopologyView& topology)
      : builder_(request, Algorithm::Hierarchical),
        topology_(topology),
        kind_(request.kind),
        whole_{0, request.numel},
        parts_(Partition::ofParts(request.numel, request.size, request.counts)),
        dtype_(request.dtype),
        rank_(request.rank),
        host_(topology.hostOf(request.rank)),
        slice_(topology.localIndex(request.rank)),
        slices_(topology.fewestRanks()),
        hosts_(topology.hosts()),
        most_segments_(builder_.segmentCount(longestChunk(), dtype_)),
        wave_(std::min(builder_.pipelineFrames(), most_segments_)),
        segment_numel_(std::min(longestChunk(), builder_.segmentNumel(dtype_))) {
    const size_t held = static_cast<size_t>(kScratchWaves * hosts_ * wave_);
    partial_.resize(held);
    read_by_.assign(held, kNoStep);
    if (kind_ != Collective::AllGather && carries() && localRanks().size() > 1 &&
        hosts_ * (localRanks().size() - 1) > 1) { // else the only sum is the result
      sums_ = builder_.addScratch(dtype_, static_cast<int64_t>(held) * segment_numel_);
    }
  }

  Schedule make() && {
    const int64_t waves = (most_segments_ - 1) / wave_ + 1;
    const bool adds = kind_ != Collective::AllGather;
    for (int64_t wave = 0; wave < waves; ++wave) {
      if (adds && wave == 0) {
        gather(0);
      }
      if (adds && wave + 1 < waves) {
        gather(wave + 1);
      }
      std::vector<StepId> complete;
      if (carries() && (hosts_ > 1 || !adds)) {
        complete = adds ? ring(wave) : ringOfParts(wave);
      }
      if (kind_ != Collective::ReduceScatter) {
        spread(wave, complete);
      }
    }
    if (!adds) {
      builder_.copy(inputRegion({0, parts_[rank_].numel}), outputRegion(parts_[rank_])); // no step waits for this
    }
    return std::move(builder_).finish();
  }

 private:
  [[nodiscard]] bool carries() const {
    return slice_ < slices_;
  }
  [[nodiscard]] const std::vector<int32_t>& localRanks() const {
    return topology_.ranksOf(host_);
  }
  [[nodiscard]] int32_t carrier(int32_t host, int32_t slice) const {
    return topology_.ranksOf((host + hosts_) % hosts_)[static_cast<size_t>(slice)];
  }
  [[nodiscard]] Run chunk(int32_t slice, int32_t host) const {
    if (kind_ != Collective::AllReduce) {
      return parts_[carrier(host, slice)];
    }
    return splitBalanced(splitBalanced(whole_, slices_, slice), hosts_, host);
  }
  [[nodiscard]] int64_t longestChunk() const {
    int64_t longest = 0;
    for (int32_t slice = 0; slice < slices_; ++slice) {
      for (int32_t host = 0; host < hosts_; ++host) {
        longest = std::max(longest, chunk(slice, host).numel);
      }
    }
    return longest;
  }
  /// The place of a segment if Input or Output is this rank's part alone.
  [[nodiscard]] Run withinOwn(Run segment) const {
    return {segment.offset - parts_[rank_].offset, segment.numel};
  }
  /// The destination of a complete sum.
  [[nodiscard]] Region result(Run segment) const {
    return outputRegion(kind_ == Collective::ReduceScatter ? withinOwn(segment) : segment);
  }
  [[nodiscard]] int32_t chunkAt(int32_t round) const {
    return ((host_ - 1 - round) % hosts_ + hosts_) % hosts_;
  }
  /// use(segment, where it is held in scratch), for a slice's segments of a wave in the chunk of one round.
  template <typename Use>
  void forEachSegment(int64_t wave, int32_t round, int32_t slice, Use use) const {
    const Run run = chunk(slice, chunkAt(round));
    const int64_t segments = builder_.segmentCount(run.numel, dtype_);
    for (int64_t s = wave * wave_; s < std::min((wave + 1) * wave_, segments); ++s) {
      const int64_t held = (wave % kScratchWaves * hosts_ + chunkAt(round)) * wave_ + s % wave_;
      use(splitBalanced(run, segments, s), static_cast<size_t>(held));
    }
  }

  /// In the order in which the ring needs the chunks.
  void gather(int64_t wave) {
    for (int32_t round = 0; round < hosts_; ++round) {
      for (int32_t i = 1; i <= slices_; ++i) { // each rank begins with another carrier
        const int32_t slice = (slice_ + i) % slices_;
        if (slice != slice_) {
          forEachSegment(wave, round, slice, [&](Run segment, size_t) {
            const auto local = builder_.operand(segment);
            builder_.send(local.region, carrier(host_, slice), {local.ready});
          });
        }
      }
      if (carries()) {
        forEachSegment(wave, round, slice_, [&](Run segment, size_t held) { add(segment, held); });
      }
    }
  }

  void add(Run segment, size_t held) {
    auto& partial = partial_[held];
    partial = builder_.operand(segment);
    size_t left = localRanks().size() - 1;
    for (const int32_t local_peer : localRanks()) {
      if (local_peer == rank_) {
        continue;
      }
      --left;
      const bool final = hosts_ == 1 && left == 0;
      const Run sum = {static_cast<int64_t>(held) * segment_numel_, segment.numel};
      const Region dst = final ? result(segment) : bufferRegion(sums_, sum);
      partial = {dst, builder_.recvReduce(local_peer, partial, dst, final, {read_by_[held]})};
    }
    read_by_[held] = hosts_ == 1 ? partial.ready : kNoStep; // with several hosts, the ring's step
  }

  /// Returns the steps that made the results, in listed order.
  std::vector<StepId> ring(int64_t wave) {
    const int32_t left = carrier(host_ - 1, slice_);
    const int32_t right = carrier(host_ + 1, slice_);
    const int32_t last = 2 * hosts_ - 2;
    const int32_t rounds = kind_ == Collective::ReduceScatter ? hosts_ : last + 1;
    std::vector<StepId> complete;
    for (int32_t round = 0; round < rounds; ++round) {
      forEachSegment(wave, round, slice_, [&](Run segment, size_t held) {
        const auto& partial = partial_[held];
        if (round == 0) {
          read_by_[held] = builder_.send(partial.region, right, {partial.ready});
        } else if (round < hosts_ - 1) {
          read_by_[held] = builder_.recvReduceSend(left, partial, right);
        } else if (round == hosts_ - 1 && kind_ == Collective::ReduceScatter) {
          read_by_[held] = builder_.recvReduce(left, partial, result(segment), /*final=*/true);
        } else if (round == hosts_ - 1) {
          read_by_[held] = builder_.recvReduceCopySend(left, partial, outputRegion(segment), right);
          complete.push_back(read_by_[held]);
        } else if (round < last) {
          complete.push_back(builder_.recvCopySend(left, outputRegion(segment), right));
        } else {
          complete.push_back(builder_.recv(left, outputRegion(segment)));
        }
      });
    }
    return complete;
  }

  /// The same for parts that are complete from the start: the ring's second half.
  std::vector<StepId> ringOfParts(int64_t wave) {
    const int32_t left = carrier(host_ - 1, slice_);
    const int32_t right = carrier(host_ + 1, slice_);
    const int32_t last = 2 * hosts_ - 2;
    std::vector<StepId> complete;
    for (int32_t round = hosts_ - 1; round <= last; ++round) {
      forEachSegment(wave, round, slice_, [&](Run segment, size_t) {
        if (round == hosts_ - 1) {
          if (hosts_ > 1) {
            builder_.send(inputRegion(withinOwn(segment)), right);
          }
          complete.push_back(kNoStep); // it is in Input
        } else if (round < last) {
          complete.push_back(builder_.recvCopySend(left, outputRegion(segment), right));
        } else {
          complete.push_back(builder_.recv(left, outputRegion(segment)));
        }
      });
    }
    return complete;
  }

  /// In the order in which the ring completes the chunks.
  void spread(int64_t wave, const std::vector<StepId>& complete) {
    size_t next = 0;
    for (int32_t round = hosts_ - 1; round <= 2 * hosts_ - 2; ++round) {
      if (carries()) {
        forEachSegment(wave, round, slice_, [&](Run segment, size_t held) {
          const bool in_ring = hosts_ > 1 || kind_ == Collective::AllGather;
          const StepId made = in_ring ? complete[next++] : partial_[held].ready;
          const bool own = kind_ == Collective::AllGather && made == kNoStep;
          const Region whole = own ? inputRegion(withinOwn(segment)) : outputRegion(segment);
          for (const int32_t local_peer : localRanks()) {
            if (local_peer != rank_) {
              builder_.send(whole, local_peer, {made});
            }
          }
        });
      }
      for (int32_t slice = 0; slice < slices_; ++slice) {
        if (slice != slice_) {
          forEachSegment(wave, round, slice, [&](Run segment, size_t) {
            builder_.recv(carrier(host_, slice), outputRegion(segment));
          });
        }
      }
    }
  }

  ScheduleBuilder builder_;
  const TopologyView& topology_; ///< outlives this: both live within one makeSchedule()
  const Collective kind_;
  const Run whole_;
  const Partition parts_; ///< not of an all_reduce
  const DType dtype_;
  const int32_t rank_;
  const int32_t host_;
  const int32_t slice_; ///< the slice that this rank carries, if it carries one
  const int32_t slices_;
  const int32_t hosts_;
  const int64_t most_segments_; ///< of a chunk
  const int64_t wave_; ///< segments of a chunk
  const int64_t segment_numel_; ///< at most
  Buffer sums_ = Buffer::None;
  std::vector<ScheduleBuilder::Operand> partial_; ///< this host's sums, by place in scratch
  std::vector<StepId> read_by_; ///< the ring's step that reads such a sum
};

/// If hosts have different numbers of ranks, their parts do not form slices.
Schedule partsOrRing(const ScheduleRequest& request, Schedule (*ring)(const ScheduleRequest&)) {
  const TopologyView* topology = request.topology;
  if (topology == nullptr || topology->fewestRanks() != topology->mostRanks()) {
    return makeByHost(request, ring);
  }
  return Hierarchical(request, *topology).make();
}

} // namespace

Schedule hierarchicalReduceScatter(const ScheduleRequest& request) {
  return partsOrRing(request, ringReduceScatter);
}

Schedule hierarchicalAllGather(const ScheduleRequest& request) {
  return partsOrRing(request, ringAllGather);
}

Schedule hierarchicalAllReduce(const ScheduleRequest& request) {
  if (request.topology != nullptr) {
    return Hierarchical(request, *request.topology).make();
  }
  std::vector<int32_t> alone(static_cast<size_t>(request.size));
  for (int32_t rank = 0; rank < request.size; ++rank) {
    alone[static_cast<size_t>(rank)] = rank;
  }
  const TopologyView topology(alone);
  return Hierarchical(request, topology).make();
}

} // namespace pycomm
