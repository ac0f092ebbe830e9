#include "proof/schedule/global_graph.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"

namespace pycomm {
namespace {

[[noreturn]] void failSchedule(const Schedule& schedule, int32_t rank, const std::string& why) {
  ErrorRecord record;
  record.code = ErrorCode::Internal;
  record.op = collectiveName(schedule.kind);
  record.rank = rank;
  record.summary = record.op + " schedule (" + algorithmName(schedule.algorithm) + ") is broken: " + why;
  record.hint = "this is a mistake in the schedule, not in its use: please report it";
  throw Error(record);
}

} // namespace

DType dtypeOf(const Schedule& schedule, Buffer buffer) noexcept {
  if (buffer < Buffer::Scratch0) {
    return schedule.dtype;
  }
  return schedule.scratch_dtype[static_cast<size_t>(buffer) - static_cast<size_t>(Buffer::Scratch0)];
}

GlobalGraph::GlobalGraph(const std::vector<Schedule>& schedules) : schedules_(schedules) {
  for (size_t rank = 0; rank < schedules.size(); ++rank) {
    const Schedule& schedule = schedules[rank];
    const Schedule& first = schedules.front();
    if (schedule.rank != static_cast<int32_t>(rank) || schedule.size != static_cast<int32_t>(schedules.size()) ||
        schedule.kind != first.kind || schedule.algorithm != first.algorithm || schedule.dtype != first.dtype ||
        schedule.codec != first.codec) {
      const std::string why = "rank " + std::to_string(rank) + " has one of another operation";
      failSchedule(schedule, static_cast<int32_t>(rank), why);
    }
    first_node_.push_back(nodeCount());
    rank_of_.insert(rank_of_.end(), schedule.steps.size(), static_cast<int32_t>(rank));
  }
  for (NodeId node = 0; node < nodeCount(); ++node) {
    checkStep(node);
  }
  joinEdges();
}

void GlobalGraph::checkStep(NodeId node) const {
  const Schedule& schedule = scheduleOf(node);
  const Step& at = step(node);
  if (at.deps_begin > at.deps_end || at.deps_end > schedule.deps.size() || at.sources_begin > at.sources_end ||
      at.sources_end > schedule.sources.size()) {
    fail(node, "its dependencies or sources lie outside the schedule's");
  }
  forEachDep(node, [&](NodeId dep) {
    if (dep >= node) {
      const std::string index = std::to_string(dep - firstNode(rank_of_[node]));
      fail(node, "depends on step " + index + ", which does not come before it");
    }
  });
  for (const int32_t peer : {receives(at.kind) ? at.recv_peer : -1, sends(at.kind) ? at.send_peer : -1}) {
    if (peer == schedule.rank || peer >= schedule.size) {
      fail(node, "has no such peer: " + std::to_string(peer));
    }
  }
  if ((receives(at.kind) && at.recv_peer < 0) || (sends(at.kind) && at.send_peer < 0)) {
    fail(node, "lacks a peer");
  }
  if (usesSrc(at.kind)) {
    checkRegion(node, "src", at.src);
  }
  if (usesDst(at.kind)) {
    checkRegion(node, "dst", at.dst);
  }
  if (at.kind == StepKind::Encode || at.kind == StepKind::Decode || at.kind == StepKind::ReduceEncoded) {
    checkEncoded(node);
    return;
  }
  if (usesSrc(at.kind) && usesDst(at.kind)) {
    if (at.src.numel != at.dst.numel) {
      const std::string counts = std::to_string(at.src.numel) + " elements in src and " + std::to_string(at.dst.numel);
      fail(node, "has " + counts + " in dst");
    }
    if (dtypeOf(schedule, at.src.buffer) != dtypeOf(schedule, at.dst.buffer)) {
      fail(node, "mixes two dtypes");
    }
  }
  if (at.kind != StepKind::ReduceMany) {
    return;
  }
  if (at.sources_begin == at.sources_end) {
    fail(node, "has no sources");
  }
  for (uint32_t k = at.sources_begin; k < at.sources_end; ++k) {
    checkRegion(node, "source", schedule.sources[k]);
    if (schedule.sources[k].numel != at.dst.numel ||
        dtypeOf(schedule, schedule.sources[k].buffer) != dtypeOf(schedule, at.dst.buffer)) {
      fail(node, "has a source of another count or dtype than dst");
    }
  }
}

void GlobalGraph::checkEncoded(NodeId node) const {
  const Schedule& schedule = scheduleOf(node);
  const Step& at = step(node);
  const auto isEncoded = [&](const Region& region) { return dtypeOf(schedule, region.buffer) == DType::UInt8; };
  const auto valuesOf = [&](const Region& region) {
    return isEncoded(region) ? encodedNumel(schedule.codec, region.numel) : region.numel;
  };
  if (schedule.codec == Codec::None || schedule.dtype == DType::UInt8) {
    fail(node, "has no codec");
  }
  if (at.kind != StepKind::ReduceEncoded) {
    const bool right_way = isEncoded(at.dst) == (at.kind == StepKind::Encode) && isEncoded(at.src) != isEncoded(at.dst);
    if (!right_way || valuesOf(at.src) != valuesOf(at.dst)) {
      fail(node, "converts between the wrong dtypes or counts");
    }
    return;
  }
  if (at.sources_begin == at.sources_end) {
    fail(node, "has no sources");
  }
  for (uint32_t k = at.sources_begin; k < at.sources_end; ++k) {
    checkRegion(node, "source", schedule.sources[k]);
    if (!isEncoded(schedule.sources[k]) || valuesOf(schedule.sources[k]) != valuesOf(at.dst)) {
      fail(node, "has a source that is not encoded, or of another count than dst");
    }
  }
}

void GlobalGraph::checkRegion(NodeId node, const char* name, const Region& region) const {
  const Schedule& schedule = scheduleOf(node);
  if (region.offset < 0 || region.numel < 0 || (region.buffer == Buffer::None && region.numel > 0)) {
    fail(node, std::string(name) + " is not a region");
  }
  if (region.buffer == Buffer::None || region.buffer == Buffer::Input || region.buffer == Buffer::Output) {
    return; // RankImage knows how large these are
  }
  const size_t index = static_cast<size_t>(region.buffer) - static_cast<size_t>(Buffer::Scratch0);
  if (region.buffer < Buffer::Scratch0 || index >= schedule.scratch_numel.size() ||
      index >= schedule.scratch_dtype.size()) {
    fail(node, std::string(name) + " is in a buffer that does not exist");
  }
}

void GlobalGraph::joinEdges() {
  in_edge_.assign(nodeCount(), 0);
  out_edge_.assign(nodeCount(), 0);
  frame_source_.assign(nodeCount(), kNoNode);
  std::map<std::pair<int32_t, int32_t>, size_t> index_of;
  const auto edgeIndex = [&](int32_t from, int32_t to) {
    const auto found = index_of.emplace(std::make_pair(from, to), edges_.size());
    if (found.second) {
      edges_.push_back({from, to, {}, {}});
    }
    return found.first->second;
  };
  for (NodeId node = 0; node < nodeCount(); ++node) {
    const Step& at = step(node);
    if (receives(at.kind)) {
      in_edge_[node] = edgeIndex(at.recv_peer, rank_of_[node]);
      edges_[in_edge_[node]].recvs.push_back(node);
    }
    if (sends(at.kind)) {
      out_edge_[node] = edgeIndex(rank_of_[node], at.send_peer);
      edges_[out_edge_[node]].sends.push_back(node);
    }
  }
  for (const Edge& edge : edges_) {
    const size_t both = std::min(edge.sends.size(), edge.recvs.size());
    for (size_t k = 0; k < both; ++k) {
      const Region& sent = departingShape(step(edge.sends[k]));
      const Region& expected = arrivingShape(step(edge.recvs[k]));
      if (sent.numel != expected.numel ||
          dtypeOf(scheduleOf(edge.sends[k]), sent.buffer) != dtypeOf(scheduleOf(edge.recvs[k]), expected.buffer)) {
        fail(edge.recvs[k], "gets a frame of another count or dtype from " + describe(edge.sends[k]));
      }
      frame_source_[edge.recvs[k]] = edge.sends[k];
    }
    if (edge.sends.size() > both) {
      fail(edge.sends[both], "sends a frame that nobody receives");
    }
    if (edge.recvs.size() > both) {
      fail(edge.recvs[both], "waits for a frame that nobody sends");
    }
  }
}

std::string GlobalGraph::describe(NodeId node) const {
  const Step& at = step(node);
  std::string text = "rank " + std::to_string(rank_of_[node]) + ", step " +
      std::to_string(node - firstNode(rank_of_[node])) + " (" + stepKindName(at.kind);
  if (receives(at.kind) || sends(at.kind)) {
    text += receives(at.kind) ? " " + std::to_string(at.recv_peer) + " -> " : " ";
    text += std::to_string(rank_of_[node]);
    text += sends(at.kind) ? " -> " + std::to_string(at.send_peer) : "";
    text += ",";
  }
  return text + " " + std::to_string(usesDst(at.kind) ? at.dst.numel : at.src.numel) + " elements)";
}

void GlobalGraph::fail(NodeId node, const std::string& why) const {
  failSchedule(scheduleOf(node), rank_of_[node], describe(node) + " " + why);
}

} // namespace pycomm
