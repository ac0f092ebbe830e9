#pragma once

#include <vector>

#include "proof/schedule/global_graph.h"
#include "proof/schedule/rank_image.h"

namespace pycomm {

/// Checks what has to hold in every order of execution, not only in the interpreted one. A step's causes are the
/// steps that it depends on, the one that sent its frame, and their causes.
///  - An all_reduce, reduce or reduce_scatter output has causes on every rank; so has each rank's end of a barrier.
///  - Of two steps of a rank that touch the same bytes, one of them writing, one is a cause of the other.
/// `order` lists all steps, causes first. Throws Error(Internal).
/// Cost: O(steps * size / 64) for the first, O(size * steps * steps of a rank / 64) for the second where bytes are
/// shared.
void checkCausality(const GlobalGraph& graph, const std::vector<NodeId>& order, const std::vector<RankImage>& images);

} // namespace pycomm
