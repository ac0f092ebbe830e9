#include "schedule/schedule_builder.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/error.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

// 4 Mi steps are 320 MiB of schedule. A larger schedule means a mistake in segment_nbytes, and would run out of memory
// first.
constexpr size_t kMaxSteps = size_t{4} << 20;
constexpr int64_t kShortestNbytes = 512; // of withScratchOf()

} // namespace

ScheduleRequest withScratchOf(const ScheduleRequest& request, int64_t nbytes) {
  ScheduleRequest bounded = request;
  const int64_t held = (int64_t{request.pipeline_frames} + 1) * request.size;
  const int64_t most =
      std::max(kShortestNbytes, nbytes / held - kShortestNbytes); // segments end with whole blocks of a codec
  bounded.segment_nbytes = std::min(request.segment_nbytes, most);
  return bounded;
}

ScheduleBuilder::ScheduleBuilder(const ScheduleRequest& request, Algorithm algorithm)
    : request_(request), kept_operands_(2 * pipelineFrames() + 2) {
  schedule_.kind = request.kind;
  schedule_.algorithm = algorithm;
  schedule_.rank = request.rank;
  schedule_.size = request.size;
  schedule_.dtype = request.dtype;
  schedule_.codec = request.codec;
}

int32_t ScheduleBuilder::around(int64_t distance) const noexcept {
  const int64_t rank = (request_.rank + distance) % request_.size;
  return static_cast<int32_t>(rank < 0 ? rank + request_.size : rank);
}

int64_t ScheduleBuilder::segmentNumel(DType dtype) const noexcept {
  const auto element_nbytes = static_cast<int64_t>(elementSize(dtype));
  return std::max<int64_t>(1, std::min(request_.segment_nbytes, kMaxSegmentNbytes) / element_nbytes);
}

int64_t ScheduleBuilder::segmentCount(int64_t numel, DType dtype) const noexcept {
  return numel == 0 ? 1 : (numel - 1) / segmentNumel(dtype) + 1;
}

int64_t ScheduleBuilder::pipelineFrames() const noexcept {
  const int64_t frame_nbytes = std::min(request_.segment_nbytes, kMaxSegmentNbytes);
  return std::min<int64_t>(request_.pipeline_frames, kEdgeRoomNbytes / frame_nbytes - 1);
}

Buffer ScheduleBuilder::addScratch(DType dtype, int64_t numel) {
  schedule_.scratch_numel.push_back(numel);
  schedule_.scratch_dtype.push_back(dtype);
  return static_cast<Buffer>(static_cast<size_t>(Buffer::Scratch0) + schedule_.scratch_numel.size() - 1);
}

ScheduleBuilder::Operand ScheduleBuilder::operand(Run input) {
  if (request_.reduce_op != ReduceOp::PremulSum) {
    return {inputRegion(input), kNoStep};
  }
  Place& place = places_[placeFor(input.numel)];
  const Region scaled = bufferRegion(scaled_, {place.run.offset, input.numel});
  const Deps readers = std::exchange(place.readers, {});
  return {scaled, scale(inputRegion(input), scaled, /*final=*/false, readers)};
}

ScheduleBuilder::Operand ScheduleBuilder::operandInPlace(Run input) {
  if (request_.reduce_op != ReduceOp::PremulSum) {
    return {inputRegion(input), kNoStep};
  }
  if (scaled_ == Buffer::None) {
    scaled_ = addScratch(request_.dtype, inputNumel(request_));
  }
  const Region scaled = bufferRegion(scaled_, input);
  return {scaled, scale(inputRegion(input), scaled)};
}

size_t ScheduleBuilder::placeFor(int64_t numel) {
  if (static_cast<int64_t>(places_.size()) >= kept_operands_) {
    const size_t first = next_place_ % places_.size();
    if (!places_[first].readers.empty() && places_[first].run.numel >= numel) {
      next_place_ = first + 1;
      return first;
    }
  }
  if (scaled_ == Buffer::None) {
    scaled_ = addScratch(request_.dtype, 0);
  }
  const size_t k = static_cast<size_t>(scaled_) - static_cast<size_t>(Buffer::Scratch0);
  int64_t& end = schedule_.scratch_numel[k];
  // As long as the longest of its kind: others come to the same place.
  const int64_t held = std::max(numel, std::min(segmentNumel(request_.dtype), inputNumel(request_)));
  places_.push_back({{end, held}, {}});
  end += held;
  return places_.size() - 1;
}

void ScheduleBuilder::addReader(const Region& region, StepId reader) {
  if (region.buffer != scaled_ || places_.empty()) {
    return;
  }
  const auto behind =
      std::upper_bound(places_.begin(), places_.end(), region.offset, [](int64_t offset, const Place& at) {
        return offset < at.run.offset;
      });
  std::prev(behind)->readers.push_back(reader);
}

StepId ScheduleBuilder::send(Region src, int32_t to, const Deps& deps) {
  Step step;
  step.kind = StepKind::Send;
  step.send_peer = to;
  step.src = src;
  return add(step, deps);
}

StepId ScheduleBuilder::recv(int32_t from, Region dst, const Deps& deps) {
  Step step = receiving(StepKind::Recv, from);
  step.dst = dst;
  return add(step, deps);
}

StepId ScheduleBuilder::recvCopySend(int32_t from, Region dst, int32_t to, const Deps& deps) {
  Step step = receiving(StepKind::RecvCopySend, from);
  step.send_peer = to;
  step.dst = dst;
  return add(step, deps);
}

StepId ScheduleBuilder::recvReduce(int32_t from, const Operand& local, Region dst, bool final, const Deps& deps) {
  Step step = receiving(StepKind::RecvReduce, from);
  step.final = final;
  step.src = local.region;
  step.dst = dst;
  Deps all = deps;
  all.push_back(local.ready);
  return add(step, all);
}

StepId ScheduleBuilder::recvReduceSend(int32_t from, const Operand& local, int32_t to, const Deps& deps) {
  Step step = receiving(StepKind::RecvReduceSend, from);
  step.send_peer = to;
  step.src = local.region;
  Deps all = deps;
  all.push_back(local.ready);
  return add(step, all);
}

StepId ScheduleBuilder::recvReduceCopySend(
    int32_t from,
    const Operand& local,
    Region dst,
    int32_t to,
    const Deps& deps) {
  Step step = receiving(StepKind::RecvReduceCopySend, from);
  step.final = true;
  step.send_peer = to;
  step.src = local.region;
  step.dst = dst;
  Deps all = deps;
  all.push_back(local.ready);
  return add(step, all);
}

StepId ScheduleBuilder::reduceMany(const std::vector<Region>& sources, Region dst, const Deps& deps) {
  Step step;
  step.kind = StepKind::ReduceMany;
  step.final = true;
  step.dst = dst;
  step.sources_begin = static_cast<uint32_t>(schedule_.sources.size());
  schedule_.sources.insert(schedule_.sources.end(), sources.begin(), sources.end());
  step.sources_end = static_cast<uint32_t>(schedule_.sources.size());
  return add(step, deps);
}

StepId ScheduleBuilder::reduceEncoded(const std::vector<Region>& sources, Region dst, Region output, const Deps& deps) {
  const StepId step = reduceMany(sources, dst, deps);
  schedule_.steps[step].kind = StepKind::ReduceEncoded;
  schedule_.steps[step].src = output;
  return step;
}

StepId ScheduleBuilder::copy(Region src, Region dst, bool final) {
  Step step;
  step.kind = StepKind::Copy;
  step.final = final;
  step.src = src;
  step.dst = dst;
  return add(step, {});
}

StepId ScheduleBuilder::scale(Region src, Region dst, bool final, const Deps& deps) {
  Step step;
  step.kind = StepKind::Scale;
  step.final = final;
  step.src = src;
  step.dst = dst;
  return add(step, deps);
}

StepId ScheduleBuilder::encode(Region src, Region dst, const Deps& deps) {
  Step step;
  step.kind = StepKind::Encode;
  step.src = src;
  step.dst = dst;
  return add(step, deps);
}

StepId ScheduleBuilder::decode(Region src, Region dst, const Deps& deps) {
  Step step;
  step.kind = StepKind::Decode;
  step.src = src;
  step.dst = dst;
  return add(step, deps);
}

Step ScheduleBuilder::receiving(StepKind kind, int32_t from) const {
  Step step;
  step.kind = kind;
  step.recv_peer = from;
  step.local_first = request_.rank < from;
  return step;
}

StepId ScheduleBuilder::add(Step step, const Deps& deps) {
  if (schedule_.steps.size() >= kMaxSteps) {
    throw Error(
        ErrorCode::InvalidArgument,
        std::string(collectiveName(request_.kind)) + " needs more than " + std::to_string(kMaxSteps) +
            " steps with segment_nbytes=" + std::to_string(request_.segment_nbytes),
        "raise segment_nbytes");
  }
  step.deps_begin = static_cast<uint32_t>(schedule_.deps.size());
  for (const StepId dep : deps) {
    if (dep != kNoStep) {
      schedule_.deps.push_back(dep);
    }
  }
  step.deps_end = static_cast<uint32_t>(schedule_.deps.size());
  schedule_.steps.push_back(step);
  const auto id = static_cast<StepId>(schedule_.steps.size() - 1);
  addReader(step.src, id);
  for (uint32_t i = step.sources_begin; i < step.sources_end; ++i) {
    addReader(schedule_.sources[i], id);
  }
  return id;
}

} // namespace pycomm
