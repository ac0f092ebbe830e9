#include "proof/schedule/causality.h"

#include <algorithm>
#include <string>
#include <utility>

#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

/// For each step, a set of bits: those given at `origin(step)` and those of all its causes.
class CauseSets {
 public:
  template <typename Origin>
  CauseSets(const GlobalGraph& graph, const std::vector<NodeId>& order, size_t bits, Origin origin)
      : words_((bits + 63) / 64), sets_(graph.nodeCount() * words_) {
    for (const NodeId node : order) {
      const int64_t bit = origin(node);
      if (bit >= 0) {
        row(node)[bit / 64] |= uint64_t{1} << (bit % 64);
      }
      const auto take = [&](NodeId cause) {
        for (size_t w = 0; w < words_; ++w) {
          row(node)[w] |= row(cause)[w];
        }
      };
      graph.forEachDep(node, take);
      if (graph.frameSource(node) != kNoNode) {
        take(graph.frameSource(node));
      }
    }
  }

  [[nodiscard]] bool has(NodeId node, size_t bit) const {
    return (sets_[node * words_ + bit / 64] >> (bit % 64) & 1) != 0;
  }

 private:
  uint64_t* row(NodeId node) {
    return sets_.data() + node * words_;
  }

  size_t words_;
  std::vector<uint64_t> sets_;
};

void checkOutputsHearAll(const GlobalGraph& graph, const std::vector<NodeId>& order) {
  const Collective kind = graph.schedules().front().kind;
  const auto size = static_cast<int32_t>(graph.schedules().size());
  if (!isReduction(kind) && kind != Collective::Barrier) {
    return;
  }
  const CauseSets heard(
      graph, order, static_cast<size_t>(size), [&](NodeId node) { return static_cast<int64_t>(graph.rankOf(node)); });
  for (NodeId node = 0; node < graph.nodeCount(); ++node) {
    const Step& step = graph.step(node);
    if (!isReduction(kind) || !usesDst(step.kind) || step.dst.buffer != Buffer::Output) {
      continue;
    }
    for (int32_t rank = 0; rank < size; ++rank) {
      if (!heard.has(node, static_cast<size_t>(rank))) {
        graph.fail(node, "writes Output before it has heard of rank " + std::to_string(rank));
      }
    }
  }
  for (int32_t rank = 0; kind == Collective::Barrier && rank < size; ++rank) {
    const NodeId begin = graph.firstNode(rank);
    const auto end = static_cast<NodeId>(begin + graph.schedules()[static_cast<size_t>(rank)].steps.size());
    for (int32_t other = 0; other < size && size > 1; ++other) {
      bool found = false;
      for (NodeId node = begin; node < end; ++node) {
        found = found || heard.has(node, static_cast<size_t>(other));
      }
      if (!found) {
        graph.fail(end > begin ? end - 1 : 0, "ends the barrier without having heard of rank " + std::to_string(other));
      }
    }
  }
}

/// Pairs of this rank's steps that touch the same bytes, if one of them writes.
std::vector<std::pair<NodeId, NodeId>> conflictsOf(const GlobalGraph& graph, int32_t rank, const RankImage& image) {
  struct Use {
    Access access;
    NodeId node;
  };
  const Schedule& schedule = graph.schedules()[static_cast<size_t>(rank)];
  std::vector<Use> uses;
  for (size_t s = 0; s < schedule.steps.size(); ++s) {
    for (const Access& access : image.accesses(schedule, schedule.steps[s])) {
      uses.push_back({access, graph.firstNode(rank) + static_cast<NodeId>(s)});
    }
  }
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
    return a.access.extent.space != b.access.extent.space ? a.access.extent.space < b.access.extent.space
                                                          : a.access.extent.begin < b.access.extent.begin;
  });
  std::vector<std::pair<NodeId, NodeId>> conflicts;
  std::vector<const Use*> open; // those that may reach beyond the current one's begin
  for (const Use& use : uses) {
    const auto isPast = [&](const Use* earlier) { return !earlier->access.extent.overlaps(use.access.extent); };
    open.erase(std::remove_if(open.begin(), open.end(), isPast), open.end());
    for (const Use* earlier : open) {
      if (earlier->node != use.node && (earlier->access.writes || use.access.writes)) {
        conflicts.emplace_back(std::min(earlier->node, use.node), std::max(earlier->node, use.node));
      }
    }
    open.push_back(&use);
  }
  return conflicts;
}

} // namespace

void checkCausality(const GlobalGraph& graph, const std::vector<NodeId>& order, const std::vector<RankImage>& images) {
  checkOutputsHearAll(graph, order);
  for (size_t r = 0; r < graph.schedules().size(); ++r) {
    const auto rank = static_cast<int32_t>(r);
    const auto conflicts = conflictsOf(graph, rank, images[r]);
    if (conflicts.empty()) {
      continue;
    }
    const NodeId begin = graph.firstNode(rank);
    const CauseSets causes(graph, order, graph.schedules()[r].steps.size(), [&](NodeId node) {
      return graph.rankOf(node) == rank ? static_cast<int64_t>(node - begin) : int64_t{-1};
    });
    for (const auto& [earlier, later] : conflicts) {
      if (!causes.has(later, earlier - begin) && !causes.has(earlier, later - begin)) {
        graph.fail(later, "shares memory with " + graph.describe(earlier) + ", and nothing says which one comes first");
      }
    }
  }
}

} // namespace pycomm
