// The interpreter runs a marked graph: every edge is a queue with one writer and one reader, both in fixed orders. So
// the set of steps that can end does not depend on the order in which they are tried, and one run decides whether a
// schedule can wait for ever. The values, however, could depend on the order if steps race for memory; checkCausality()
// excludes that.
#include "proof/schedule/interpreter.h"

#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "base/error.h"
#include "proof/schedule/causality.h"
#include "proof/schedule/global_graph.h"
#include "proof/schedule/rank_image.h"
#include "proof/schedule/scalar_codec.h"
#include "proof/schedule/scalar_math.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

using Bytes = std::vector<std::byte>;
using Operands = std::vector<const std::byte*>; ///< in the order in which they are folded

class Interpretation {
 public:
  Interpretation(
      const GlobalGraph& graph,
      ReduceOp op,
      std::vector<RankImage>& images,
      size_t window_frames,
      const std::vector<double>& premul_factors)
      : graph_(graph),
        op_(op),
        images_(images),
        window_frames_(window_frames),
        premul_factors_(premul_factors),
        state_(graph.nodeCount(), State::Waiting),
        missing_deps_(graph.nodeCount(), 0),
        dependents_(graph.nodeCount()),
        held_(graph.nodeCount()),
        queues_(graph.edges().size()) {
    for (NodeId node = 0; node < graph.nodeCount(); ++node) {
      graph.forEachDep(node, [&](NodeId dep) {
        ++missing_deps_[node];
        dependents_[dep].push_back(node);
      });
    }
  }

  /// Returns the steps in the order in which they ended.
  std::vector<NodeId> run() {
    for (NodeId node = 0; node < graph_.nodeCount(); ++node) {
      ready_.push_back(node);
    }
    while (!ready_.empty()) {
      const NodeId node = ready_.front();
      ready_.pop_front();
      advance(node);
    }
    if (ended_.size() < graph_.nodeCount()) {
      failStuck();
    }
    return std::move(ended_);
  }

 private:
  enum class State : uint8_t { Waiting, Holding, Ended }; ///< Holding: has its frame, waits to hand it over

  struct Queue {
    std::deque<Bytes> unread;
    size_t sent = 0;
    size_t taken = 0; ///< receives that have begun
    bool busy = false; ///< the last one that began has not ended
  };

  void advance(NodeId node) {
    const Step& step = graph_.step(node);
    if (state_[node] == State::Waiting && missing_deps_[node] == 0) {
      if (!receives(step.kind)) {
        if (!sends(step.kind)) {
          compute(node);
          end(node);
          return;
        }
      } else if (!take(node)) {
        return;
      }
    } else if (state_[node] != State::Holding) {
      return;
    }
    if (!sends(step.kind) || handOver(node)) {
      end(node);
    }
  }

  /// Starts a receiving step if its frame is the next one of its edge.
  bool take(NodeId node) {
    const GlobalGraph::Edge& edge = graph_.edges()[graph_.inEdge(node)];
    Queue& queue = queues_[graph_.inEdge(node)];
    if (queue.busy || queue.taken == queue.sent || edge.recvs[queue.taken] != node) {
      return false;
    }
    held_[node] = std::move(queue.unread.front());
    queue.unread.pop_front();
    ++queue.taken;
    queue.busy = true;
    state_[node] = State::Holding;
    if (queue.sent < edge.sends.size()) {
      ready_.push_back(edge.sends[queue.sent]); // there is room for it now
    }
    receive(node);
    return true;
  }

  /// Puts a step's frame on its edge if it is its turn and there is room.
  bool handOver(NodeId node) {
    const GlobalGraph::Edge& edge = graph_.edges()[graph_.outEdge(node)];
    Queue& queue = queues_[graph_.outEdge(node)];
    if (edge.sends[queue.sent] != node || queue.unread.size() >= window_frames_) {
      return false;
    }
    const Step& step = graph_.step(node);
    Bytes frame = std::move(held_[node]);
    if (step.kind == StepKind::Send) {
      const std::byte* from = local(node, step.src);
      frame.assign(from, from + nbytesOf(node, step.src));
    }
    queue.unread.push_back(std::move(frame));
    ready_.push_back(edge.recvs[queue.sent]);
    ++queue.sent;
    if (queue.sent < edge.sends.size()) {
      ready_.push_back(edge.sends[queue.sent]);
    }
    return true;
  }

  void end(NodeId node) {
    state_[node] = State::Ended;
    ended_.push_back(node);
    for (const NodeId dependent : dependents_[node]) {
      --missing_deps_[dependent];
      ready_.push_back(dependent);
    }
    if (receives(graph_.step(node).kind)) {
      const GlobalGraph::Edge& edge = graph_.edges()[graph_.inEdge(node)];
      Queue& queue = queues_[graph_.inEdge(node)];
      queue.busy = false;
      if (queue.taken < edge.recvs.size()) {
        ready_.push_back(edge.recvs[queue.taken]);
      }
    }
  }

  /// Applies a receiving step to its frame: afterwards held_ is the frame that it passes on.
  void receive(NodeId node) {
    const Step& step = graph_.step(node);
    Bytes& frame = held_[node];
    const Region& shape = arrivingShape(step);
    const bool reduces = step.kind != StepKind::Recv && step.kind != StepKind::RecvCopySend;
    if (reduces && shape.numel > 0) {
      const std::byte* mine = local(node, step.src);
      Operands operands = {frame.data(), mine};
      if (step.local_first) {
        std::swap(operands[0], operands[1]);
      }
      fold(node, step.src, frame.data(), operands);
    }
    if (usesDst(step.kind) && step.dst.numel > 0) {
      std::memcpy(local(node, step.dst), frame.data(), frame.size());
    }
  }

  void compute(NodeId node) {
    const Step& step = graph_.step(node);
    const Schedule& schedule = graph_.scheduleOf(node);
    if (step.dst.numel == 0) {
      return;
    }
    std::byte* dst = local(node, step.dst);
    const auto numel = static_cast<size_t>(step.dst.numel);
    if (step.kind == StepKind::ReduceMany) {
      Operands sources;
      for (uint32_t k = step.sources_begin; k < step.sources_end; ++k) {
        sources.push_back(local(node, schedule.sources[k]));
      }
      fold(node, step.dst, dst, sources);
      return;
    }
    if (step.kind == StepKind::ReduceEncoded) {
      foldEncoded(node);
      return;
    }
    const std::byte* src = local(node, step.src);
    if (step.kind == StepKind::Encode) {
      encodeElements(schedule.codec, dst, dtypeOf(schedule, step.src.buffer), src, static_cast<size_t>(step.src.numel));
    } else if (step.kind == StepKind::Decode) {
      decodeElements(schedule.codec, dtypeOf(schedule, step.dst.buffer), dst, src, numel);
    } else if (step.kind == StepKind::Copy) {
      std::memmove(dst, src, nbytesOf(node, step.src)); // in place, both may be the same
    } else {
      const auto rank = static_cast<size_t>(graph_.rankOf(node));
      const double factor = premul_factors_.empty() ? 1.0 : premul_factors_[rank];
      scaleElements(dtypeOf(schedule, step.dst.buffer), dst, src, numel, factor);
    }
  }

  void fold(NodeId node, const Region& shape, std::byte* dst, const Operands& operands) {
    const Schedule& schedule = graph_.scheduleOf(node);
    const int64_t divisor = graph_.step(node).final && op_ == ReduceOp::Avg ? schedule.size : 1;
    foldElements(dtypeOf(schedule, shape.buffer), op_, dst, operands, static_cast<size_t>(shape.numel), divisor);
  }

  /// Through fp32 for any dtype, as in the executor.
  void foldEncoded(NodeId node) {
    const Step& step = graph_.step(node);
    const Schedule& schedule = graph_.scheduleOf(node);
    const bool encodes = dtypeOf(schedule, step.dst.buffer) == DType::UInt8;
    const auto numel = static_cast<size_t>(encodes ? encodedNumel(schedule.codec, step.dst.numel) : step.dst.numel);
    std::vector<Bytes> rows;
    Operands operands;
    for (uint32_t k = step.sources_begin; k < step.sources_end; ++k) {
      rows.emplace_back(numel * sizeof(float));
      decodeElements(schedule.codec, DType::Float32, rows.back().data(), local(node, schedule.sources[k]), numel);
    }
    for (const Bytes& row : rows) {
      operands.push_back(row.data());
    }
    Bytes sum(numel * sizeof(float));
    const int64_t divisor = op_ == ReduceOp::Avg ? schedule.size : 1;
    foldElements(DType::Float32, op_, sum.data(), operands, numel, divisor);
    if (encodes) {
      encodeElements(schedule.codec, local(node, step.dst), DType::Float32, sum.data(), numel);
    } else {
      castElements(dtypeOf(schedule, step.dst.buffer), local(node, step.dst), DType::Float32, sum.data(), numel);
    }
  }

  std::byte* local(NodeId node, const Region& region) {
    return images_[static_cast<size_t>(graph_.rankOf(node))].at(graph_.scheduleOf(node), region);
  }
  [[nodiscard]] size_t nbytesOf(NodeId node, const Region& region) const {
    return static_cast<size_t>(region.numel) * elementSize(dtypeOf(graph_.scheduleOf(node), region.buffer));
  }

  [[noreturn]] void failStuck() const {
    NodeId stuck = 0;
    // A rank's first step that has not ended waits for another rank, unless it waits for its turn to send.
    while (state_[stuck] == State::Ended) {
      ++stuck;
    }
    std::string why = "waits for ever for ";
    if (state_[stuck] == State::Waiting && missing_deps_[stuck] > 0) {
      why += "the steps that it depends on";
    } else if (state_[stuck] == State::Waiting && receives(graph_.step(stuck).kind)) {
      why += "its frame, which " + graph_.describe(graph_.frameSource(stuck)) + " sends";
    } else {
      why += "its turn, or for room on its edge";
    }
    graph_.fail(stuck, why + " (window of " + std::to_string(window_frames_) + " frames)");
  }

  const GlobalGraph& graph_; ///< these two live in interpret(), as this object does
  const ReduceOp op_;
  std::vector<RankImage>& images_;
  const size_t window_frames_;
  const std::vector<double>& premul_factors_; ///< interpret()'s argument
  std::vector<State> state_; ///< by node, like the next three
  std::vector<uint32_t> missing_deps_;
  std::vector<std::vector<NodeId>> dependents_;
  std::vector<Bytes> held_;
  std::vector<Queue> queues_; ///< by edge
  std::deque<NodeId> ready_; ///< steps that may be able to advance; duplicates do no harm
  std::vector<NodeId> ended_;
};

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::InvalidArgument, "interpret(): " + why, "see interpreter.h");
}

bool canBeInPlace(Collective kind) noexcept {
  return isReduction(kind) || kind == Collective::Broadcast || kind == Collective::AllGather;
}

} // namespace

void interpret(
    const std::vector<Schedule>& schedules,
    ReduceOp op,
    std::vector<RankMemory>& memory,
    bool in_place,
    size_t window_frames,
    const std::vector<double>& premul_factors) {
  if (schedules.empty() || memory.size() != schedules.size() || window_frames == 0 ||
      (!premul_factors.empty() && premul_factors.size() != schedules.size())) {
    refuse("one schedule, memory and factor a rank, and a window of at least one frame");
  }
  const Collective kind = schedules.front().kind;
  if (in_place && !canBeInPlace(kind)) {
    refuse(std::string(collectiveName(kind)) + " has no in-place form");
  }
  const GlobalGraph graph(schedules);
  std::vector<RankImage> images;
  int64_t own_offset = 0;
  for (size_t rank = 0; rank < schedules.size(); ++rank) {
    images.emplace_back(schedules[rank], memory[rank], in_place, own_offset);
    const bool parts = kind == Collective::AllGather || kind == Collective::ReduceScatter;
    const Bytes& part = kind == Collective::AllGather ? memory[rank].input : memory[rank].output;
    own_offset += parts ? static_cast<int64_t>(part.size() / elementSize(schedules[rank].dtype)) : 0;
  }
  for (NodeId node = 0; node < graph.nodeCount(); ++node) {
    images[static_cast<size_t>(graph.rankOf(node))].check(graph, node);
  }
  const std::vector<NodeId> order = Interpretation(graph, op, images, window_frames, premul_factors).run();
  checkCausality(graph, order, images);
  for (size_t rank = 0; rank < schedules.size(); ++rank) {
    images[rank].copyTo(memory[rank]);
  }
}

} // namespace pycomm
