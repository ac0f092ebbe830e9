#pragma once

#include <string>
#include <vector>

#include "proof/sim/run.h"

namespace pycomm::sim {

/// Checks that groups failed only if they may, soon enough, and with the right cause, the same on all ranks.
[[nodiscard]] std::vector<std::string> failureViolations(const Run& run);

} // namespace pycomm::sim
