#pragma once

#include "schedule/step.h"

namespace pycomm {

/// True where operands are combined, so that reduce_op has a meaning.
[[nodiscard]] bool isReduction(Collective kind) noexcept;

/// Throws Error(InvalidArgument | Unsupported) for a request without meaning. After it, no size in bytes overflows.
/// Whether an algorithm serves the collective is not its question.
void checkRequest(const ScheduleRequest& request);

} // namespace pycomm
