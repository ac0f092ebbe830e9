#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/step.h"

namespace pycomm {

/// One step of one rank, numbered over all ranks.
using NodeId = uint32_t;
inline constexpr NodeId kNoNode = UINT32_MAX;

[[nodiscard]] constexpr bool usesSrc(StepKind kind) noexcept {
  return kind != StepKind::Recv && kind != StepKind::RecvCopySend && kind != StepKind::ReduceMany &&
      kind != StepKind::ReduceEncoded;
}
[[nodiscard]] constexpr bool usesDst(StepKind kind) noexcept {
  return kind != StepKind::Send && kind != StepKind::RecvReduceSend;
}
/// The region with the shape of the arriving frame, or of the frame that is sent.
[[nodiscard]] constexpr const Region& arrivingShape(const Step& step) noexcept {
  return step.kind == StepKind::Recv || step.kind == StepKind::RecvCopySend ? step.dst : step.src;
}
[[nodiscard]] constexpr const Region& departingShape(const Step& step) noexcept {
  return step.kind == StepKind::Send || step.kind == StepKind::RecvReduceSend ? step.src : step.dst;
}

/// The dtype of a buffer's elements. The buffer must exist, as GlobalGraph has checked.
[[nodiscard]] DType dtypeOf(const Schedule& schedule, Buffer buffer) noexcept;

/// All ranks' schedules as one graph: steps, joined by dependencies within a rank and by frames between ranks. The
/// constructor throws Error(Internal) if they do not fit together: a dependency that does not point back, a peer or
/// buffer that does not exist, an edge whose two ends list different frames.
class GlobalGraph {
 public:
  /// `schedules` outlives the graph.
  explicit GlobalGraph(const std::vector<Schedule>& schedules);

  struct Edge {
    int32_t from = 0;
    int32_t to = 0;
    std::vector<NodeId> sends; ///< in listed order; the k-th send's frame goes to the k-th receive
    std::vector<NodeId> recvs;
  };

  [[nodiscard]] NodeId nodeCount() const noexcept {
    return static_cast<NodeId>(rank_of_.size());
  }
  [[nodiscard]] NodeId firstNode(int32_t rank) const {
    return first_node_[static_cast<size_t>(rank)];
  }
  [[nodiscard]] int32_t rankOf(NodeId node) const {
    return rank_of_[node];
  }
  [[nodiscard]] const Schedule& scheduleOf(NodeId node) const {
    return schedules_[static_cast<size_t>(rank_of_[node])];
  }
  [[nodiscard]] const Step& step(NodeId node) const {
    return scheduleOf(node).steps[node - firstNode(rank_of_[node])];
  }
  [[nodiscard]] const std::vector<Schedule>& schedules() const noexcept {
    return schedules_;
  }
  [[nodiscard]] const std::vector<Edge>& edges() const noexcept {
    return edges_;
  }
  /// Indices into edges(); only for steps that receive, or that send.
  [[nodiscard]] size_t inEdge(NodeId node) const {
    return in_edge_[node];
  }
  [[nodiscard]] size_t outEdge(NodeId node) const {
    return out_edge_[node];
  }
  /// The step that sends the frame that this one receives; kNoNode if it receives none.
  [[nodiscard]] NodeId frameSource(NodeId node) const {
    return frame_source_[node];
  }

  template <typename F>
  void forEachDep(NodeId node, F&& use) const {
    const Schedule& schedule = scheduleOf(node);
    const Step& at = step(node);
    for (uint32_t d = at.deps_begin; d < at.deps_end; ++d) {
      use(firstNode(rank_of_[node]) + schedule.deps[d]);
    }
  }

  /// "rank 2, step 17 (recv_reduce_send 1 -> 2 -> 3, 64 elements)".
  [[nodiscard]] std::string describe(NodeId node) const;
  /// Throws Error(Internal) that names this step.
  [[noreturn]] void fail(NodeId node, const std::string& why) const;

 private:
  void checkStep(NodeId node) const;
  void checkEncoded(NodeId node) const;
  void checkRegion(NodeId node, const char* name, const Region& region) const;
  void joinEdges();

  const std::vector<Schedule>& schedules_; ///< must outlive the graph
  std::vector<NodeId> first_node_; ///< one per rank
  std::vector<int32_t> rank_of_; ///< one per node, as in all members below
  std::vector<size_t> in_edge_;
  std::vector<size_t> out_edge_;
  std::vector<NodeId> frame_source_;
  std::vector<Edge> edges_;
};

} // namespace pycomm
