#pragma once

#include "schedule/step.h"

namespace pycomm {

/// True if the collective combines operands, so that reduce_op has a meaning.
[[nodiscard]] bool isReduction(Collective kind) noexcept;

/// Throws Error(InvalidArgument | Unsupported) for a request without meaning. After it, no size in bytes overflows. It
/// does not check whether an algorithm serves the collective.
void checkRequest(const ScheduleRequest& request);

} // namespace pycomm
