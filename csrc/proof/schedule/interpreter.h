#pragma once

#include <cstddef>
#include <vector>

#include "base/reduce_op.h"
#include "schedule/step.h"

namespace pycomm {

/// Memory of one rank while schedules are interpreted.
struct RankMemory {
  std::vector<std::byte> input;
  std::vector<std::byte> output;
};

/// Runs all ranks' schedules in memory, one frame at a time, and proves that they are sound in whatever order an
/// executor may run them:
///  - regions lie within their buffers and have matching element counts and dtypes; Input is never written out of
///    place;
///  - the k-th frame sent on an edge and the k-th received have the same number of elements, and none is left over;
///  - dependencies point back;
///  - no step waits for ever where an edge holds `window_frames` unread frames. Steps that receive from one edge run
///    one after the other, and one that passes its frame on has taken it out of the window, but ends only when it has
///    been handed over;
///  - two steps of one rank that touch the same memory, one of them writing, are ordered by dependencies or by
///    frames;
///  - no output of an all_reduce, of a reduce_scatter or of a reduce's root is written by a step whose causes lack a
///    rank, and a barrier ends on no rank before all have entered.
///
/// Reductions use scalar code of their own, so that the result is an oracle for the executor's; supported are
/// float16, bfloat16, float32, float64, (u)int8, int32 and int64. `premul_factors` has one factor a rank; empty: all
/// are 1.
///
/// `memory` has the inputs, and outputs of the right size. In place, Input and Output are the same memory
/// (all_gather: Input is the rank's part of Output; reduce_scatter: Output is its part of Input): the memory starts
/// with `input`, and both vectors show it in the end.
///
/// Throws Error(Internal) saying which rank and step broke which rule.
void interpret(
    const std::vector<Schedule>& schedules,
    ReduceOp op,
    std::vector<RankMemory>& memory,
    bool in_place = false,
    size_t window_frames = 1,
    const std::vector<double>& premul_factors = {});

} // namespace pycomm
