#pragma once

#include "schedule/step.h"

namespace pycomm {

// One function per algorithm, in the file of that name. The request has been checked, and size is at least 2. Only makeSchedule() calls
// these.

[[nodiscard]] Schedule ringAllReduce(const ScheduleRequest& request);
[[nodiscard]] Schedule ringReduceScatter(const ScheduleRequest& request);
[[nodiscard]] Schedule ringAllGather(const ScheduleRequest& request);

[[nodiscard]] Schedule recursiveDoublingAllReduce(const ScheduleRequest& request);
[[nodiscard]] Schedule recursiveDoublingAllGather(const ScheduleRequest& request);
[[nodiscard]] Schedule recursiveHalvingReduceScatter(const ScheduleRequest& request);
[[nodiscard]] Schedule bruckAllGather(const ScheduleRequest& request);
[[nodiscard]] Schedule disseminationBarrier(const ScheduleRequest& request);

[[nodiscard]] Schedule binomialBroadcast(const ScheduleRequest& request);
[[nodiscard]] Schedule binomialReduce(const ScheduleRequest& request);
[[nodiscard]] Schedule chainBroadcast(const ScheduleRequest& request);
[[nodiscard]] Schedule chainReduce(const ScheduleRequest& request);

/// all_reduce and reduce_scatter.
[[nodiscard]] Schedule direct(const ScheduleRequest& request);
/// The same for requests with a codec.
[[nodiscard]] Schedule encodedDirect(const ScheduleRequest& request);

/// The hierarchical ones use request.topology.
[[nodiscard]] Schedule hierarchicalAllReduce(const ScheduleRequest& request);
[[nodiscard]] Schedule hierarchicalReduceScatter(const ScheduleRequest& request);
[[nodiscard]] Schedule hierarchicalAllGather(const ScheduleRequest& request);

[[nodiscard]] Schedule pairwiseAllToAll(const ScheduleRequest& request);
[[nodiscard]] Schedule directGather(const ScheduleRequest& request);
[[nodiscard]] Schedule directScatter(const ScheduleRequest& request);
[[nodiscard]] Schedule pointToPoint(const ScheduleRequest& request);

// ---- in the order of hosts (by_host.cc)

/// True if the algorithm is built host by host. It is if its cost depends on which ranks are neighbours, and if it does
/// not need the parts of neighbouring ranks to be adjacent in memory.
[[nodiscard]] bool goesByHost(Collective kind, Algorithm algorithm) noexcept;

/// The schedule of `make`, with the ranks in host order instead of rank order. Without a topology in the request, the
/// same as make(request). Requires goesByHost() for the request's algorithm.
[[nodiscard]] Schedule makeByHost(const ScheduleRequest& request, Schedule (*make)(const ScheduleRequest&));

} // namespace pycomm
