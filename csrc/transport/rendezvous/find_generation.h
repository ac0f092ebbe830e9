#pragma once

#include <cstdint>
#include <string>

#include "transport/rendezvous/store_round.h"

namespace pycomm {

/// A generation of a group that a rank can join.
struct Generation {
  int64_t number = 0;
  bool may_be_over = true; ///< a newer one may still begin
};

/// For ranks other than 0 of a run that a launcher has started on the store of an earlier one (Takeover::FromEndedRun).
///
/// Waits until rank 0 has begun a generation that this rank can join. Rank 0's claim may be of an earlier run, which this rank cannot know.
/// Then the generation may be complete, and never is joined. It may have failed: then this rank gives the new rank 0 some time before it
/// believes the failure. Or it may look like a new one: then this rank joins it, and goes on when rank 0 comes.
/// Throws Error(RendezvousTimeout) or the token's reason.
[[nodiscard]] Generation findGeneration(const StoreRound& round, const std::string& prefix);

} // namespace pycomm
