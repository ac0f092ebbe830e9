#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "transport/rendezvous/store_round.h"

namespace pycomm {

/// A generation of a group that a rank can join.
struct Generation {
  int64_t number = 0;
  std::function<bool()> over; ///< StoreRound::over; null: it has failed, and in this run
};

/// For ranks other than 0 of a run that a launcher has started on the store of an earlier one (Takeover::FromEndedRun).
///
/// Waits until rank 0 has begun a generation that this rank can join. Rank 0's claim may be of an earlier run, and no time that passes tells
/// the two apart. So a complete generation is never joined. One that failed is joined, for its error, only if it began after this rank came,
/// or if its rank 0 is known to live, and if this rank has not taken part in it. Any other looks like a new one: then this rank joins it,
/// believes nothing of it, and goes on when rank 0 comes. The rank 0 of this run finds it there, also if the two have different secrets.
/// `newest_before`: lastClaimOfRankZero() when this rank came. Throws Error(RendezvousTimeout) or the token's reason.
[[nodiscard]] Generation findGeneration(const StoreRound& round, const std::string& prefix, int64_t newest_before);

} // namespace pycomm
