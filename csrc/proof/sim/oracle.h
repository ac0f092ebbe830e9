#pragma once

#include <cstddef>
#include <vector>

#include "proof/sim/plan.h"

namespace pycomm::sim {

/// The bytes of a rank's input: a function of the call, the rank and the place alone. Numbers are small integers, so
/// that sums are exact in every order and every dtype drawn here.
[[nodiscard]] std::vector<std::byte> inputOf(const CallPlan& call, int rank);

/// What the call has to leave in a rank's output if all ranks made it: a plain loop over the ranks, elements one by
/// one. `call.request.rank` says whose output.
[[nodiscard]] std::vector<std::byte> expectedOutput(const CallPlan& call);

} // namespace pycomm::sim
