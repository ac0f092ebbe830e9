#include "engine/data/local_steps.h"

#include <cstring>

#include "base/error.h"
#include "numeric/reduce.h"

namespace pycomm {
namespace {

/// Where a region lies whose parts have buffers of their own. An empty one may lie nowhere.
template <typename View>
auto* placeIn(const std::vector<View>& parts, size_t offset, size_t nbytes) {
  for (const View& part : parts) {
    if (offset < part.nbytes) {
      if (nbytes > part.nbytes - offset) {
        throw Error(ErrorCode::Internal, "a step reaches from one rank's part into another's", "report this as a bug");
      }
      return part.ptr + offset;
    }
    offset -= part.nbytes;
  }
  return decltype(parts.front().ptr){nullptr};
}

} // namespace

LocalSteps::LocalSteps(const Operation& operation, int size, StagingPool& staging)
    : operation_(operation), prepared_(*operation.request().schedule), size_(size) {
  const Schedule& schedule = prepared_.schedule;
  for (size_t k = 0; k < schedule.scratch_numel.size(); ++k) {
    scratch_.push_back(
        staging.take(static_cast<size_t>(schedule.scratch_numel[k]) * elementSize(schedule.scratch_dtype[k])));
  }
}

std::byte* LocalSteps::at(const Region& region) const {
  const Operation::Request& request = operation_.request();
  const size_t offset = static_cast<size_t>(region.offset) * elementSize(prepared_.dtypeOf(region.buffer));
  switch (region.buffer) {
    case Buffer::None:
      return nullptr;
    case Buffer::Input:
      // Steps only read Input; the cast lets one function serve both directions.
      return const_cast<std::byte*>(
          request.extras().input_parts.empty()
              ? request.input.ptr + offset
              : placeIn(request.extras().input_parts, offset, prepared_.nbytesOf(region)));
    case Buffer::Output:
      return request.extras().output_parts.empty()
          ? request.output.ptr + offset
          : placeIn(request.extras().output_parts, offset, prepared_.nbytesOf(region));
    case Buffer::Scratch0:
      break;
  }
  const size_t k = static_cast<size_t>(region.buffer) - static_cast<size_t>(Buffer::Scratch0);
  return scratch_[k].view().ptr + offset;
}

void LocalSteps::run(const Step& step) const {
  switch (step.kind) {
    case StepKind::Send:
    case StepKind::Recv:
    case StepKind::RecvCopySend:
    case StepKind::RecvReduce:
    case StepKind::RecvReduceCopySend:
    case StepKind::RecvReduceSend:
      break; // Transfer runs them
    case StepKind::ReduceMany:
      reduceSources(step);
      break;
    case StepKind::Copy:
      if (step.src.numel > 0 && at(step.dst) != at(step.src)) {
        std::memmove(at(step.dst), at(step.src), prepared_.nbytesOf(step.src));
      }
      break;
    case StepKind::Scale:
      scale(
          prepared_.dtypeOf(step.dst.buffer),
          at(step.dst),
          at(step.src),
          static_cast<size_t>(step.src.numel),
          operation_.request().extras().premul_factor);
      break;
    case StepKind::Encode:
    case StepKind::Decode:
    case StepKind::ReduceEncoded:
      runCodec(step);
      break;
  }
}

} // namespace pycomm
