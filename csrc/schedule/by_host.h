#pragma once

#include "schedule/step.h"

namespace pycomm {

/// Whether an algorithm is made host by host: those whose neighbours matter, and that do not need the parts of
/// neighbouring ranks to lie side by side.
[[nodiscard]] bool goesByHost(Collective kind, Algorithm algorithm) noexcept;

/// The schedule that `make` makes, with the ranks taken host by host instead of by number; that of `make` itself where
/// the request has no topology. The request's algorithm goesByHost().
[[nodiscard]] Schedule makeByHost(const ScheduleRequest& request, Schedule (*make)(const ScheduleRequest&));

} // namespace pycomm
