#pragma once

#include <string>
#include <vector>

#include "proof/sim/plan.h"

namespace pycomm::sim {

/// A call that makeSchedule accepts, on any rank.
[[nodiscard]] CallPlan drawCall(Random& random, int key, int size, int64_t window_nbytes);
/// What `rank` sends to each rank in an uneven all_to_all, or receives from each.
[[nodiscard]] std::vector<int64_t> allToAllCounts(int key, int rank, int size, bool receives);
/// Adds one fault to the plan, and changes the programs where it is one of theirs.
void drawFault(Random& random, Plan& plan);
/// A rank that leaves while operations are under way.
void drawLeaving(Random& random, Plan& plan);
/// Messages between ranks, and codecs.
void drawExtras(Random& random, Plan& plan);
[[nodiscard]] std::string callText(const CallPlan& call);

} // namespace pycomm::sim
