#pragma once

#include <cstdint>
#include <string>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// This process's right to be its rank of its group. Kept until leave().
struct RankClaim {
  std::string prefix; ///< of the group's keys in the store
  int rank = -1;
  int64_t number = 0; ///< which claim of this rank it is, counted by the store from 1
  int64_t generation = 0; ///< which group of this name on this store; the same on all ranks
};

/// Takes `rank` of the group whose keys begin with `prefix`. A rank may be taken again by the process that had it, or
/// by any once it was given back; that begins the next generation. Otherwise Error(DuplicateRank) names both processes,
/// and the holder notices nothing.
[[nodiscard]] RankClaim claimRank(
    Store& store,
    const std::string& prefix,
    int rank,
    Deadline deadline,
    const AbortToken& abort);

/// Gives the rank back in good order, so that a later process or group may take it on the same store.
void leave(Store& store, const RankClaim& claim) noexcept;

} // namespace pycomm
