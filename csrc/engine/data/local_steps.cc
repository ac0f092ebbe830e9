#include "engine/data/local_steps.h"

#include <algorithm>
#include <cstring>

#include "base/codec.h"
#include "base/error.h"
#include "numeric/reduce.h"

namespace pycomm {
namespace {

// A slice that reads and writes less would cost more by being one.
constexpr size_t kLeastNbytes = 64 << 10;

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

size_t LocalSteps::valuesOf(const Step& step, const std::byte* arriving) const {
  switch (step.kind) {
    case StepKind::Send:
      return 0;
    case StepKind::Recv:
    case StepKind::RecvCopySend:
      return arriving == nullptr ? 0 : prepared_.nbytesOf(step.dst);
    case StepKind::Copy:
      return step.src.numel > 0 && at(step.dst) != at(step.src) ? prepared_.nbytesOf(step.src) : 0;
    case StepKind::RecvReduce:
    case StepKind::RecvReduceCopySend:
    case StepKind::RecvReduceSend:
    case StepKind::Scale:
    case StepKind::Encode:
      return static_cast<size_t>(step.src.numel);
    case StepKind::ReduceMany:
    case StepKind::Decode:
      return static_cast<size_t>(step.dst.numel);
    case StepKind::ReduceEncoded:
      return static_cast<size_t>(
          isEncoded(step.dst) ? encodedNumel(prepared_.schedule.codec, step.dst.numel) : step.dst.numel);
  }
  return 0;
}

std::pair<LocalSteps::Slice, size_t> LocalSteps::sliceOf(const Step& step, size_t values, size_t begin, size_t nbytes)
    const {
  size_t whole = prepared_.nbytesOf(step.dst) + (receives(step.kind) ? prepared_.frameNbytes(step) : 0);
  whole += step.kind == StepKind::ReduceEncoded ? 0 : prepared_.nbytesOf(step.src);
  for (uint32_t i = step.sources_begin; i < step.sources_end; ++i) {
    whole += prepared_.nbytesOf(prepared_.schedule.sources[i]);
  }
  const size_t each = whole / values + (whole % values == 0 ? 0 : 1);
  const size_t fit = std::max(nbytes, kLeastNbytes) / each / kCodecBlock * kCodecBlock;
  const size_t numel = std::min(values - begin, std::max<size_t>(fit, kCodecBlock));
  return {{begin, numel}, numel * each};
}

Region LocalSteps::cut(const Region& region, Slice slice) const {
  const auto begin = static_cast<int64_t>(slice.begin);
  const auto numel = static_cast<int64_t>(slice.numel);
  if (!isEncoded(region)) {
    return {region.buffer, region.offset + begin, numel};
  }
  const Codec codec = prepared_.schedule.codec;
  return {region.buffer, region.offset + encodedNbytes(codec, begin), encodedNbytes(codec, numel)};
}

void LocalSteps::copy(const Step& step, Slice slice) const {
  std::byte* const to = at(step.dst);
  const std::byte* const from = at(step.src);
  // If they overlap, no slice may overwrite what a later one reads.
  const size_t begin = to < from ? slice.begin : prepared_.nbytesOf(step.src) - slice.begin - slice.numel;
  std::memmove(to + begin, from + begin, slice.numel);
}

void LocalSteps::run(const Step& whole, Slice slice, std::byte* arriving) const {
  if (whole.kind == StepKind::Copy) {
    copy(whole, slice);
    return;
  }
  if (whole.kind == StepKind::Recv || whole.kind == StepKind::RecvCopySend) {
    std::memcpy(at(whole.dst) + slice.begin, arriving + slice.begin, slice.numel);
    return;
  }
  Step step = whole;
  step.src = cut(whole.src, slice);
  step.dst = cut(whole.dst, slice);
  switch (step.kind) {
    case StepKind::Send:
    case StepKind::Copy:
    case StepKind::Recv:
    case StepKind::RecvCopySend:
      break; // see above
    case StepKind::RecvReduce:
    case StepKind::RecvReduceCopySend:
    case StepKind::RecvReduceSend: {
      std::byte* const there = arriving + slice.begin * elementSize(prepared_.dtypeOf(step.src.buffer));
      combine(step, step.kind == StepKind::RecvReduceSend ? there : at(step.dst), there);
      break;
    }
    case StepKind::ReduceMany:
      reduceSources(step, slice);
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
      runCodec(step, slice);
      break;
  }
}

} // namespace pycomm
