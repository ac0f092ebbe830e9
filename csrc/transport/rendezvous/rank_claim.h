#pragma once

#include <cstdint>
#include <string>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// This process's claim to its rank in its group. Held until leave().
struct RankClaim {
  std::string prefix; ///< prefix of the group's keys in the store
  int rank = -1;
  int64_t number = 0; ///< number of this claim among those of this rank, counted by the store from 1
  int64_t generation = 0; ///< number of this group among those of its name on this store; the same on all ranks
  std::string binding = {}; ///< StoreRound::binding of the rounds after the first
};

/// Claims `rank` of the group whose keys begin with `prefix`. The process that held a rank may claim it again; any
/// process may once it was given back. That starts the next generation. Otherwise throws Error(DuplicateRank) naming
/// both processes; the holder is not affected.
[[nodiscard]] RankClaim claimRank(
    Store& store,
    const std::string& prefix,
    int rank,
    Deadline deadline,
    const AbortToken& abort);

/// Gives the rank back in good order, so that a later process or group may take it on the same store.
void leave(Store& store, const RankClaim& claim) noexcept;

} // namespace pycomm
