#include "engine/operation/prepared_schedule.h"

#include <utility>

#include "base/error.h"
#include "transport/frame_header.h"

namespace pycomm {
namespace {

int32_t edgeIndex(std::vector<Edge>& edges, int32_t peer) {
  for (size_t i = 0; i < edges.size(); ++i) {
    if (edges[i].peer == peer) {
      return static_cast<int32_t>(i);
    }
  }
  edges.push_back(Edge{peer, 0, {}});
  return static_cast<int32_t>(edges.size() - 1);
}

template <typename T>
size_t nbytesIn(const std::vector<T>& list) noexcept {
  return list.capacity() * sizeof(T);
}

size_t nbytesOf(const PreparedSchedule& prepared) noexcept {
  const Schedule& schedule = prepared.schedule;
  size_t nbytes = sizeof(PreparedSchedule) + nbytesIn(schedule.steps) + nbytesIn(schedule.deps) +
      nbytesIn(schedule.sources) + nbytesIn(prepared.dependents) + nbytesIn(prepared.dependents_begin) +
      nbytesIn(prepared.incoming_of_step) + nbytesIn(prepared.outgoing_of_step);
  for (const std::vector<Edge>* edges : {&prepared.incoming, &prepared.outgoing}) {
    for (const Edge& edge : *edges) {
      nbytes += sizeof(Edge) + nbytesIn(edge.steps);
    }
  }
  return nbytes;
}

[[noreturn]] void refuse(const Schedule& schedule, size_t step, const std::string& why) {
  throw Error(
      ErrorCode::Internal,
      "the schedule of " + std::string(collectiveName(schedule.kind)) + " for rank " + std::to_string(schedule.rank) +
          " is broken at step " + std::to_string(step) + ": " + why,
      "report this as a bug");
}

} // namespace

DType PreparedSchedule::dtypeOf(Buffer buffer) const {
  if (buffer < Buffer::Scratch0) {
    return schedule.dtype;
  }
  return schedule.scratch_dtype[static_cast<size_t>(buffer) - static_cast<size_t>(Buffer::Scratch0)];
}

size_t PreparedSchedule::nbytesOf(const Region& region) const {
  return static_cast<size_t>(region.numel) * elementSize(dtypeOf(region.buffer));
}

size_t PreparedSchedule::encodedOffset(int64_t value, int64_t part_numel) const {
  const Codec codec = schedule.codec;
  const int64_t part = part_numel == 0 ? 0 : value / part_numel;
  const int64_t within = value - part * part_numel;
  return static_cast<size_t>(part * encodedNbytes(codec, part_numel) + encodedNbytes(codec, within));
}

size_t PreparedSchedule::frameNbytes(const Step& step) const {
  // Pure receives and receive-and-copy are described by where they write; everything else by what it reads.
  const bool by_destination = step.kind == StepKind::Recv || step.kind == StepKind::RecvCopySend;
  return nbytesOf(by_destination ? step.dst : step.src);
}

std::shared_ptr<const PreparedSchedule> prepare(Schedule source) {
  auto prepared = std::make_shared<PreparedSchedule>();
  prepared->schedule = std::move(source);
  const Schedule& schedule = prepared->schedule;
  const size_t count = schedule.steps.size();

  prepared->dependents_begin.assign(count + 1, 0);
  prepared->incoming_of_step.assign(count, -1);
  prepared->outgoing_of_step.assign(count, -1);
  for (size_t i = 0; i < count; ++i) {
    const Step& step = schedule.steps[i];
    for (uint32_t d = step.deps_begin; d < step.deps_end; ++d) {
      if (schedule.deps[d] >= i) {
        refuse(schedule, i, "it depends on a later step");
      }
      ++prepared->dependents_begin[schedule.deps[d] + 1];
    }
    const size_t nbytes = prepared->frameNbytes(step);
    if ((receives(step.kind) || sends(step.kind)) && nbytes > kMaxPayloadNbytes) {
      refuse(schedule, i, "a frame of " + std::to_string(nbytes) + " bytes is over the limit");
    }
    if (receives(step.kind)) {
      const int32_t edge = edgeIndex(prepared->incoming, step.recv_peer);
      prepared->incoming_of_step[i] = edge;
      prepared->incoming[static_cast<size_t>(edge)].steps.push_back(static_cast<uint32_t>(i));
      prepared->incoming[static_cast<size_t>(edge)].nbytes += static_cast<int64_t>(nbytes);
    }
    if (sends(step.kind)) {
      const int32_t edge = edgeIndex(prepared->outgoing, step.send_peer);
      prepared->outgoing_of_step[i] = edge;
      prepared->outgoing[static_cast<size_t>(edge)].steps.push_back(static_cast<uint32_t>(i));
      prepared->outgoing[static_cast<size_t>(edge)].nbytes += static_cast<int64_t>(nbytes);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    prepared->dependents_begin[i + 1] += prepared->dependents_begin[i];
  }
  prepared->dependents.resize(prepared->dependents_begin[count]);
  std::vector<uint32_t> at(prepared->dependents_begin.begin(), prepared->dependents_begin.end() - 1);
  for (size_t i = 0; i < count; ++i) {
    const Step& step = schedule.steps[i];
    for (uint32_t d = step.deps_begin; d < step.deps_end; ++d) {
      prepared->dependents[at[schedule.deps[d]]++] = static_cast<uint32_t>(i);
    }
  }
  prepared->nbytes = nbytesOf(*prepared);
  return prepared;
}

} // namespace pycomm
