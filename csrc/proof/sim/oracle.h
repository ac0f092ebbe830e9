#pragma once

#include <cstddef>
#include <vector>

#include "proof/sim/plan.h"

namespace pycomm::sim {

/// The bytes of a rank's input: a function of the call, the rank and the index alone. Numbers are small integers, so
/// that sums are exact in every order and every dtype of the simulation.
[[nodiscard]] std::vector<std::byte> inputOf(const CallPlan& call, int rank);

/// The expected output of rank `call.request.rank` if all ranks made the call: a plain loop over the ranks, element by
/// element.
[[nodiscard]] std::vector<std::byte> expectedOutput(const CallPlan& call);

} // namespace pycomm::sim
