// A launcher may number ranks in any order: two hosts with two ranks each may be 0 1 | 2 3, or 0 2 | 1 3. A ring in
// rank order enters and leaves each host once in the first case and twice in the second, where each NIC then carries
// twice the bytes. So ranks are put into places, host by host. The algorithm is built for places as if they were ranks,
// and in the end every place is replaced by its rank:
//
//   hosts 0 2 | 1 3     places 0 1 2 3 are the ranks 0 2 1 3     ring 0 -> 2 -> 1 -> 3 -> 0
//
// Proofs about the algorithm's ranks hold for places, with one exception: parts of an all_gather or a reduce_scatter
// are in rank order. The algorithms here touch one part per step, so each region is moved to the place of its part.
#include "schedule/algorithms.h"

#include <algorithm>
#include <vector>

#include "schedule/partition.h"
#include "schedule/topology_view.h"

namespace pycomm {
namespace {

bool partPerRank(Collective kind) {
  return kind == Collective::AllGather || kind == Collective::ReduceScatter;
}

/// Moves regions from the order of places to that of ranks.
class Parts {
 public:
  Parts(const ScheduleRequest& request, const ScheduleRequest& placed, const std::vector<int32_t>& order)
      : buffer_(request.kind == Collective::AllGather ? Buffer::Output : Buffer::Input) {
    const Partition by_rank = Partition::ofParts(request.numel, request.size, request.counts);
    const Partition by_place = Partition::ofParts(placed.numel, placed.size, placed.counts);
    for (int32_t place = 0; place < placed.size; ++place) {
      begins_.push_back(by_place[place].offset);
      shifts_.push_back(by_rank[order[static_cast<size_t>(place)]].offset - by_place[place].offset);
    }
  }

  void move(Region& region) const {
    if (region.buffer == buffer_) {
      // The last part that begins at or before this offset: earlier ones that begin at the same offset are empty.
      const auto after = std::upper_bound(begins_.begin(), begins_.end(), region.offset);
      region.offset += shifts_[static_cast<size_t>(after - begins_.begin()) - 1];
    }
  }

 private:
  const Buffer buffer_; ///< the one that holds all parts
  std::vector<int64_t> begins_; ///< one per place
  std::vector<int64_t> shifts_;
};

} // namespace

bool goesByHost(Collective kind, Algorithm algorithm) noexcept {
  switch (algorithm) {
    case Algorithm::Ring:
    case Algorithm::BinomialTree:
      return true;
    case Algorithm::RecursiveDoubling:
      return kind != Collective::AllGather;
    case Algorithm::Auto:
    case Algorithm::Direct:
    case Algorithm::Pairwise:
    case Algorithm::Bruck:
    case Algorithm::RecursiveHalving:
    case Algorithm::SharedMemory:
    case Algorithm::Hierarchical:
    case Algorithm::Nccl:
      return false;
  }
  return false;
}

Schedule makeByHost(const ScheduleRequest& request, Schedule (*make)(const ScheduleRequest&)) {
  if (request.topology == nullptr) {
    return make(request);
  }
  const bool rooted = request.kind == Collective::Broadcast || request.kind == Collective::Reduce;
  const std::vector<int32_t> order = rooted ? request.topology->orderFrom(request.root) : request.topology->order();
  ScheduleRequest placed = request;
  placed.topology = nullptr;
  placed.rank = static_cast<int32_t>(std::find(order.begin(), order.end(), request.rank) - order.begin());
  placed.root = rooted ? 0 : request.root;
  if (!request.counts.empty()) {
    for (size_t place = 0; place < order.size(); ++place) {
      placed.counts[place] = request.counts[static_cast<size_t>(order[place])];
    }
  }
  Schedule schedule = make(placed);
  schedule.rank = request.rank;
  for (Step& step : schedule.steps) {
    step.recv_peer = step.recv_peer < 0 ? -1 : order[static_cast<size_t>(step.recv_peer)];
    step.send_peer = step.send_peer < 0 ? -1 : order[static_cast<size_t>(step.send_peer)];
  }
  if (partPerRank(request.kind)) {
    const Parts parts(request, placed, order);
    for (Step& step : schedule.steps) {
      parts.move(step.src);
      parts.move(step.dst);
    }
  }
  return schedule;
}

} // namespace pycomm
