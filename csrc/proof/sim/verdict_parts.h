#pragma once

#include <string>
#include <vector>

#include "proof/sim/run.h"

namespace pycomm::sim {

/// Whether groups failed only where they may, soon enough, and of the right cause, the same on all ranks.
[[nodiscard]] std::vector<std::string> failureViolations(const Run& run);

} // namespace pycomm::sim
