#pragma once

#include <cstddef>
#include <vector>

#include "base/reduce_op.h"
#include "schedule/step.h"

namespace pycomm {

/// Memory of one rank during the interpretation.
struct RankMemory {
  std::vector<std::byte> input;
  std::vector<std::byte> output;
};

/// Runs all ranks' schedules in memory, one frame at a time, and proves that they are sound in every order of
/// execution:
///  - regions lie within their buffers and have matching element counts and dtypes; Input is never written out of
///    place;
///  - the k-th frame sent on an edge and the k-th received have the same number of elements, and none is left over;
///  - dependencies point back;
///  - no step waits for ever if an edge holds `window_frames` unread frames. Steps that receive from one edge run one
///    after the other. A step that passes its frame on has taken it out of the window, but ends only when the frame
///    has been handed over;
///  - if two steps of one rank touch the same memory and one of them writes, dependencies or frames order them;
///  - no output of an all_reduce, of a reduce_scatter or of a reduce's root is written by a step whose causes lack a
///    rank, and a barrier ends on no rank before all have entered.
///
/// Reductions use scalar code of their own, so that the result is an oracle for the executor's. Supported dtypes are
/// float16, bfloat16, float32, float64, (u)int8, int32 and int64. `premul_factors` has one factor per rank; empty: all
/// are 1.
///
/// `memory` has the inputs, and outputs of the right size. In place, Input and Output are the same memory (all_gather:
/// Input is the rank's part of Output; reduce_scatter: Output is its part of Input). The memory then starts with
/// `input`, and both vectors have the result in the end.
///
/// Throws Error(Internal) naming the rank, the step and the rule that it broke.
/// Throws Error(Internal) saying which rank and step broke which rule.
void interpret(
    const std::vector<Schedule>& schedules,
    ReduceOp op,
    std::vector<RankMemory>& memory,
    bool in_place = false,
    size_t window_frames = 1,
    const std::vector<double>& premul_factors = {});

} // namespace pycomm
