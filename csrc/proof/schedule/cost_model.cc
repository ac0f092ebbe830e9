// A discrete event simulation. A step is ready when its dependencies have ended, the step before it on each of its
// edges has ended, and its frame has arrived. Then it takes its rank's processor, one step at a time in order of
// readiness. A frame that it sends takes the NIC of its host, and that of the other host, as they become free.
#include "proof/schedule/cost_model.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "proof/schedule/global_graph.h"
#include "schedule/make_schedule.h"
#include "schedule/topology_view.h"

namespace pycomm {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

/// The fields of a step that its cost needs.
struct Node {
  int32_t rank = 0;
  int32_t send_peer = -1;
  uint32_t waits_for = 0; ///< number of dependencies, predecessors and frames it still waits for
  uint32_t next_in = kNone; ///< the step after it on its incoming edge
  uint32_t next_out = kNone; ///< and on its outgoing one
  uint32_t receiver = kNone; ///< the step that gets its frame
  uint32_t first_dependent = 0; ///< in dependents_
  float work_s = 0; ///< of the processor
  int64_t frame_nbytes = 0;
};

struct CostEdge {
  uint32_t last_sender = kNone;
  uint32_t last_receiver = kNone;
  std::vector<uint32_t> unmatched; ///< senders without a receiver yet, or receivers without a sender
  size_t matched = 0;
  bool of_senders = false; ///< `unmatched` has senders
};

class Simulation {
 public:
  Simulation(const ScheduleRequest& request, const NetworkModel& network)
      : network_(network), topology_(request.topology), size_(request.size) {
    ScheduleRequest own = request;
    for (own.rank = 0; own.rank < size_; ++own.rank) {
      add(makeSchedule(own));
    }
    edges_.clear();
    const auto hosts = static_cast<size_t>(topology_ == nullptr ? size_ : topology_->hosts());
    cost_.sent_nbytes.assign(hosts, 0);
    cost_.received_nbytes.assign(hosts, 0);
    out_free_.assign(hosts, 0);
    in_free_.assign(hosts, 0);
    processor_free_.assign(static_cast<size_t>(size_), 0);
    memory_free_.assign(static_cast<size_t>(size_), 0);
  }

  Cost run() && {
    for (uint32_t node = 0; node < nodes_.size(); ++node) {
      if (nodes_[node].waits_for == 0) {
        events_.emplace(0.0, node, What::Ready);
      }
    }
    while (!events_.empty()) {
      const auto [time, node, what] = events_.top();
      events_.pop();
      switch (what) {
        case What::Ready: {
          double& free_at = processor_free_[static_cast<size_t>(nodes_[node].rank)];
          free_at = std::max(free_at, time) + static_cast<double>(nodes_[node].work_s);
          events_.emplace(free_at, node, What::Ended);
          break;
        }
        case What::Ended:
          end(node, time);
          break;
        case What::Arrived:
          release(node, time);
          break;
      }
    }
    return std::move(cost_);
  }

 private:
  enum class What : uint8_t { Ready, Ended, Arrived };
  using Event = std::tuple<double, uint32_t, What>; // also compared by node: equal times have one order

  void add(const Schedule& schedule) {
    cost_.algorithm = schedule.algorithm;
    const auto first = static_cast<uint32_t>(nodes_.size());
    const size_t count = schedule.steps.size();
    std::vector<uint32_t> begin(count + 1, 0); // of each step's dependents
    for (const uint32_t dep : schedule.deps) {
      ++begin[dep + 1];
    }
    const auto base = static_cast<uint32_t>(dependents_.size());
    for (size_t i = 0; i < count; ++i) {
      begin[i + 1] += begin[i];
    }
    dependents_.resize(base + schedule.deps.size());
    std::vector<uint32_t> next(begin.begin(), begin.end() - 1);
    for (size_t i = 0; i < count; ++i) {
      const Step& step = schedule.steps[i];
      const auto self = first + static_cast<uint32_t>(i);
      Node node;
      node.rank = schedule.rank;
      node.first_dependent = base + begin[i];
      node.waits_for = step.deps_end - step.deps_begin;
      for (uint32_t d = step.deps_begin; d < step.deps_end; ++d) {
        dependents_[base + next[schedule.deps[d]]++] = self;
      }
      node.work_s = static_cast<float>(workOf(schedule, step));
      if (sends(step.kind)) {
        node.send_peer = step.send_peer;
        node.frame_nbytes = network_.header_nbytes + nbytesOf(schedule, departingShape(step));
      }
      nodes_.push_back(node);
      if (receives(step.kind)) {
        join(step.recv_peer, schedule.rank, self, false);
      }
      if (sends(step.kind)) {
        join(schedule.rank, step.send_peer, self, true);
      }
    }
  }

  [[nodiscard]] static int64_t nbytesOf(const Schedule& schedule, const Region& region) {
    return region.buffer == Buffer::None
        ? 0
        : region.numel * static_cast<int64_t>(elementSize(dtypeOf(schedule, region.buffer)));
  }

  [[nodiscard]] double workOf(const Schedule& schedule, const Step& step) const {
    double work = (receives(step.kind) ? network_.message_s : 0) + (sends(step.kind) ? network_.message_s : 0);
    const bool moves =
        step.kind == StepKind::Send || step.kind == StepKind::Recv || step.kind == StepKind::RecvCopySend;
    if (!moves) {
      const Region& shape = step.dst.buffer == Buffer::None ? step.src : step.dst;
      const auto sources = std::max<int64_t>(1, step.sources_end - step.sources_begin);
      work += static_cast<double>(nbytesOf(schedule, shape) * sources) / network_.reduce_bytes_per_s;
    }
    return work;
  }

  /// A step is the next one on an edge: it follows the previous one there, and its frame is that of the other end.
  void join(int32_t from, int32_t to, uint32_t node, bool sender) {
    CostEdge& edge = edges_[(static_cast<uint64_t>(static_cast<uint32_t>(from)) << 32) | static_cast<uint32_t>(to)];
    uint32_t& last = sender ? edge.last_sender : edge.last_receiver;
    if (last != kNone) {
      (sender ? nodes_[last].next_out : nodes_[last].next_in) = node;
      ++nodes_[node].waits_for;
    }
    last = node;
    if (!sender) {
      ++nodes_[node].waits_for; // its frame
    }
    if (edge.matched == edge.unmatched.size() || edge.of_senders == sender) {
      edge.of_senders = sender;
      edge.unmatched.push_back(node);
      return;
    }
    const uint32_t other = edge.unmatched[edge.matched++];
    nodes_[sender ? node : other].receiver = sender ? other : node;
  }

  void end(uint32_t node, double time) {
    cost_.seconds = std::max(cost_.seconds, time);
    const Node& ended = nodes_[node];
    if (ended.send_peer >= 0) {
      transmit(ended, time);
    }
    const uint32_t stop =
        node + 1 < nodes_.size() ? nodes_[node + 1].first_dependent : static_cast<uint32_t>(dependents_.size());
    for (uint32_t d = ended.first_dependent; d < stop; ++d) {
      release(dependents_[d], time);
    }
    for (const uint32_t next : {ended.next_in, ended.next_out}) {
      if (next != kNone) {
        release(next, time);
      }
    }
  }

  void release(uint32_t node, double time) {
    if (--nodes_[node].waits_for == 0) {
      events_.emplace(time, node, What::Ready);
    }
  }

  void transmit(const Node& sender, double time) {
    const auto nbytes = static_cast<double>(sender.frame_nbytes);
    const auto from = static_cast<size_t>(hostOf(sender.rank));
    const auto to = static_cast<size_t>(hostOf(sender.send_peer));
    double arrival = 0;
    if (from == to) {
      double& free_at = memory_free_[static_cast<size_t>(sender.rank)];
      free_at = std::max(free_at, time) + nbytes / network_.local_bytes_per_s;
      arrival = free_at + network_.local_latency_s;
    } else {
      cost_.sent_nbytes[from] += sender.frame_nbytes;
      cost_.received_nbytes[to] += sender.frame_nbytes;
      const double took = nbytes / network_.nic_bytes_per_s;
      const double begin = std::max(out_free_[from], time);
      out_free_[from] = begin + took;
      in_free_[to] = std::max(in_free_[to], begin + network_.latency_s) + took;
      arrival = in_free_[to];
    }
    events_.emplace(arrival, sender.receiver, What::Arrived);
  }

  [[nodiscard]] int32_t hostOf(int32_t rank) const {
    return topology_ == nullptr ? rank : topology_->hostOf(rank);
  }

  const NetworkModel network_;
  const TopologyView* const topology_; ///< the request's, which outlives this
  const int32_t size_;
  std::vector<Node> nodes_;
  std::vector<uint32_t> dependents_;
  std::unordered_map<uint64_t, CostEdge> edges_;
  std::vector<double> out_free_; ///< by host
  std::vector<double> in_free_;
  std::vector<double> processor_free_; ///< by rank
  std::vector<double> memory_free_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Cost cost_;
};

} // namespace

Cost costOf(const ScheduleRequest& request, const NetworkModel& network) {
  return Simulation(request, network).run();
}

} // namespace pycomm
