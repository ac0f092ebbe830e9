#include "proof/schedule/rank_image.h"

#include <algorithm>
#include <string>

namespace pycomm {

RankImage::RankImage(const Schedule& schedule, const RankMemory& memory, bool in_place, int64_t own_offset) {
  const auto element_nbytes = static_cast<int64_t>(elementSize(schedule.dtype));
  input_ = {0, 0, static_cast<int64_t>(memory.input.size())};
  output_ = {1, 0, static_cast<int64_t>(memory.output.size())};
  if (in_place) {
    output_.space = 0;
    (output_.nbytes > input_.nbytes ? input_ : output_).begin = own_offset * element_nbytes;
  }
  const int64_t shared = std::max(input_.begin + input_.nbytes, output_.begin + output_.nbytes);
  spaces_.emplace_back(in_place ? static_cast<size_t>(shared) : memory.input.size());
  std::copy(memory.input.begin(), memory.input.end(), spaces_[0].begin() + input_.begin);
  spaces_.emplace_back(in_place ? std::vector<std::byte>() : memory.output);
  for (size_t k = 0; k < schedule.scratch_numel.size(); ++k) {
    // Filled with a value that no test computes, so that reads before writes are detected.
    spaces_.emplace_back(
        static_cast<size_t>(schedule.scratch_numel[k]) * elementSize(schedule.scratch_dtype[k]), std::byte{0xa5});
  }
}

RankImage::Place RankImage::place(Buffer buffer) const {
  if (buffer == Buffer::None) {
    return {};
  }
  if (buffer < Buffer::Scratch0) {
    return buffer == Buffer::Input ? input_ : output_;
  }
  const size_t space = 2 + static_cast<size_t>(buffer) - static_cast<size_t>(Buffer::Scratch0);
  return {space, 0, static_cast<int64_t>(spaces_[space].size())};
}

Extent RankImage::extent(const Schedule& schedule, const Region& region) const {
  const Place where = place(region.buffer);
  const auto element_nbytes = static_cast<int64_t>(elementSize(dtypeOf(schedule, region.buffer)));
  const int64_t begin = where.begin + region.offset * element_nbytes;
  return {where.space, begin, begin + region.numel * element_nbytes};
}

std::byte* RankImage::at(const Schedule& schedule, const Region& region) {
  const Extent where = extent(schedule, region);
  return spaces_[where.space].data() + where.begin;
}

void RankImage::check(const GlobalGraph& graph, NodeId node) const {
  const Schedule& schedule = graph.scheduleOf(node);
  const Step& step = graph.step(node);
  const auto checkInside = [&](const Region& region) {
    const Place where = place(region.buffer);
    const Extent used = extent(schedule, region);
    if (region.numel > 0 && used.end > where.begin + where.nbytes) {
      graph.fail(node, "leaves its buffer at element " + std::to_string(region.offset + region.numel));
    }
  };
  if (usesSrc(step.kind)) {
    checkInside(step.src);
  }
  for (uint32_t k = step.sources_begin; k < step.sources_end; ++k) {
    checkInside(schedule.sources[k]);
  }
  if (!usesDst(step.kind)) {
    return;
  }
  checkInside(step.dst);
  if (step.dst.buffer == Buffer::Input && step.dst.numel > 0) {
    graph.fail(node, "writes Input");
  }
  const Extent written = extent(schedule, step.dst);
  for (const Access& access : accesses(schedule, step)) {
    if (!access.writes && access.extent.overlaps(written) && !(access.extent == written)) {
      graph.fail(node, "writes over a part of what it reads");
    }
  }
}

std::vector<Access> RankImage::accesses(const Schedule& schedule, const Step& step) const {
  std::vector<Access> list;
  if (step.kind == StepKind::Copy && extent(schedule, step.src) == extent(schedule, step.dst)) {
    return list;
  }
  const auto add = [&](const Region& region, bool writes) {
    if (region.numel > 0) {
      list.push_back({extent(schedule, region), writes});
    }
  };
  if (usesSrc(step.kind)) {
    add(step.src, false);
  }
  for (uint32_t k = step.sources_begin; k < step.sources_end; ++k) {
    add(schedule.sources[k], false);
  }
  if (usesDst(step.kind)) {
    add(step.dst, true);
  }
  return list;
}

void RankImage::copyTo(RankMemory& memory) const {
  const auto copyOut = [&](const Place& from, std::vector<std::byte>& to) {
    const auto begin = spaces_[from.space].begin() + from.begin;
    to.assign(begin, begin + from.nbytes);
  };
  copyOut(input_, memory.input);
  copyOut(output_, memory.output);
}

} // namespace pycomm
