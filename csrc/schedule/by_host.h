#pragma once

#include "schedule/step.h"

namespace pycomm {

/// True if the algorithm is built host by host. It is if its cost depends on which ranks are neighbours, and if it does
/// not need the parts of neighbouring ranks to be adjacent in memory.
[[nodiscard]] bool goesByHost(Collective kind, Algorithm algorithm) noexcept;

/// The schedule of `make`, with the ranks in host order instead of rank order. Without a topology in the request, the
/// same as make(request). Requires goesByHost() for the request's algorithm.
[[nodiscard]] Schedule makeByHost(const ScheduleRequest& request, Schedule (*make)(const ScheduleRequest&));

} // namespace pycomm
