#pragma once

#include <cstdint>

#include "schedule/step.h"

namespace pycomm {

/// The schedule for a request; resolves Algorithm::Auto with the static table (select.h).
/// Pure: no I/O, no clock, no global state. Throws Error(InvalidArgument | Unsupported) for requests without meaning.
/// Cost: O(steps), which is O(size * segments of a chunk).
///
/// After the collective, Output holds the result on every rank that gets one. This includes a broadcast's root and each
/// rank's own part (a Copy step, which does nothing if both are the same memory). Input is never written. These may be
/// in place: all_reduce, reduce and broadcast with Input and Output the same memory; all_gather with Input this rank's
/// part of Output; reduce_scatter with Output this rank's part of Input.
[[nodiscard]] Schedule makeSchedule(const ScheduleRequest& request);

/// Its algorithm. Throws the same.
[[nodiscard]] Algorithm algorithmOf(const ScheduleRequest& request);

/// Elements of this rank's Input and Output; 0 if the collective does not use the buffer on this rank.
[[nodiscard]] int64_t inputNumel(const ScheduleRequest& request);
[[nodiscard]] int64_t outputNumel(const ScheduleRequest& request);

/// True if the collective combines operands, so that reduce_op has a meaning.
[[nodiscard]] bool isReduction(Collective kind) noexcept;

/// Throws Error(InvalidArgument | Unsupported) for a request without meaning. After it, no size in bytes overflows. It
/// does not check whether an algorithm serves the collective.
void checkRequest(const ScheduleRequest& request);

} // namespace pycomm
