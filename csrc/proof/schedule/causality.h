#pragma once

#include <vector>

#include "proof/schedule/global_graph.h"
#include "proof/schedule/rank_image.h"

namespace pycomm {

/// Checks the properties that must hold in every order of execution, not only in the interpreted one. The causes of a
/// step are the steps that it depends on, the step that sent its frame, and their causes.
///  - An all_reduce, reduce or reduce_scatter output has causes on every rank; so has each rank's end of a barrier.
///  - If two steps of a rank touch the same bytes and one of them writes, one is a cause of the other.
/// `order` lists all steps, causes first. Throws Error(Internal).
/// Cost: O(steps * size / 64) for the first, O(size * steps * steps per rank / 64) for the second if steps share bytes.
void checkCausality(const GlobalGraph& graph, const std::vector<NodeId>& order, const std::vector<RankImage>& images);

} // namespace pycomm
