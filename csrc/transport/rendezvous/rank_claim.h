#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/job_ranks.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

struct StoreRound;

/// This process's claim to its rank in its group. Held until leave().
struct RankClaim {
  std::string prefix; ///< prefix of the group's keys in the store
  int rank = -1;
  JobRanks job; ///< what texts call the ranks of the group
  int64_t number = 0; ///< number of this claim among those of this rank, counted by the store from 1
  int64_t generation = 0; ///< number of this group among those of its name on this store; the same on all ranks
  std::string binding = {}; ///< StoreRound::binding of the rounds after the first
};

/// What a claim may take from a process that did not give its rank back.
enum class Takeover : uint8_t {
  Never, ///< the ranks of an earlier run may still be there
  /// A launcher has started this run on the store of an earlier one, after it ended all processes of that one (torchrun's restarts). So a
  /// rank is free unless its holder is known to live: on this host, in this pid namespace.
  FromEndedRun,
};

/// A key of a generation whose ranks have all met and read what they needed: nobody joins it any more.
inline constexpr const char* kMade = "made";

/// Claims `rank` of the group whose keys begin with `prefix`. The process that held a rank may claim it again; any
/// process may once it was given back. That starts the next generation. Otherwise, and if `takeover` does not allow it,
/// throws Error(DuplicateRank) naming both processes; the holder is not affected.
///
/// With Takeover::FromEndedRun the generation is the number of rank 0's claim. Other ranks do not know it here, and get 0.
[[nodiscard]] RankClaim claimRank(
    Store& store,
    const std::string& prefix,
    int rank,
    const JobRanks& job,
    Takeover takeover,
    Deadline deadline,
    const AbortToken& abort);

/// The number of the claim with which a process holds rank 0 now, as far as the store knows: the newest that was not refused. 0 if there is
/// none, or if it was given back. In a sealed store, of those that a process with the secret made.
[[nodiscard]] int64_t claimOfRankZero(Store& store, const std::string& prefix);
/// The newest claim of rank 0 that was not refused, also if it was given back, or if its owner's record has no seal or another secret's. 0
/// if there is none.
[[nodiscard]] int64_t lastClaimOfRankZero(Store& store, const std::string& prefix);

/// Whether the process that made this claim of rank 0 is known to live. No statement about processes of other hosts or pid namespaces.
[[nodiscard]] bool knownToLive(Store& store, const std::string& prefix, int64_t claim_of_rank_zero);

/// Gives the rank back in good order, so that a later process or group may take it on the same store.
void leave(Store& store, const RankClaim& claim) noexcept;

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
