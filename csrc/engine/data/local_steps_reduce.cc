// The steps that add up.
#include <vector>

#include "base/fault_point.h"
#include "engine/data/local_steps.h"
#include "numeric/reduce.h"

namespace pycomm {

void LocalSteps::combine(const Step& step, void* dst, const void* arriving) const {
  PYCOMM_FAULT_POINT("reduce.step");
  const Operation::Request& request = operation_.request();
  const DType dtype = prepared_.dtypeOf(step.src.buffer);
  const ReduceOp op = request.descriptor.reduce_op;
  const auto numel = static_cast<size_t>(step.src.numel);
  const void* local = at(step.src);
  const void* lower = step.local_first ? local : arriving;
  const void* higher = step.local_first ? arriving : local;
  if (step.final && op == ReduceOp::Avg) {
    const void* both[] = {lower, higher};
    reduceMany(dtype, op, dst, both, 2, numel, size_);
    return;
  }
  reduce(dtype, op, dst, lower, higher, numel);
}

void LocalSteps::reduceSources(const Step& step, Slice slice) const {
  PYCOMM_FAULT_POINT("reduce.step");
  const Operation::Request& request = operation_.request();
  std::vector<const void*> sources;
  for (uint32_t i = step.sources_begin; i < step.sources_end; ++i) {
    sources.push_back(at(cut(prepared_.schedule.sources[i], slice)));
  }
  const ReduceOp op = request.descriptor.reduce_op;
  const bool divides = step.final && op == ReduceOp::Avg;
  reduceMany(
      prepared_.dtypeOf(step.dst.buffer),
      op,
      at(step.dst),
      sources.data(),
      sources.size(),
      static_cast<size_t>(step.dst.numel),
      divides ? size_ : 1);
}

} // namespace pycomm
