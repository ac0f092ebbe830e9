#pragma once

#include <string>
#include <vector>

#include "proof/sim/plan.h"

namespace pycomm::sim {

/// Draws a call that makeSchedule() accepts on every rank.
[[nodiscard]] CallPlan drawCall(Random& random, int key, int size, int64_t window_nbytes);
/// The elements that `rank` sends to each rank in an uneven all_to_all, or receives from each.
[[nodiscard]] std::vector<int64_t> allToAllCounts(int key, int rank, int size, bool receives);
/// Adds one fault to the plan, and changes the programs if the fault is in a program.
void drawFault(Random& random, Plan& plan);
/// Adds a rank that leaves while operations are in flight.
void drawLeaving(Random& random, Plan& plan);
/// Adds messages between ranks, and codecs.
void drawExtras(Random& random, Plan& plan);
[[nodiscard]] std::string callText(const CallPlan& call);

} // namespace pycomm::sim
