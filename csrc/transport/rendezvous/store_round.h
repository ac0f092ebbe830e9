#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/job_ranks.h"
#include "base/slow_wait.h"
#include "transport/rendezvous/notices.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// Upper bound of a group's size: so many records have been exchanged through one store in a test (StoreRound.TakesAsManyRanksAsAllowed).
inline constexpr int kMaxRanks = 1 << 16;
inline constexpr int kFirstStorePauseMs = 1; ///< between two polls of the store, doubled up to kLongPauseMs

/// gather() throws it if this generation was left to an earlier run (StoreRound::over).
struct GenerationOver {};

/// gather() throws it if the list that the other ranks take has another text in this rank's place.
class NotInList final : public Error {
 public:
  NotInList(const Error& error, std::vector<std::string> list) : Error(error), list_(std::move(list)) {}
  [[nodiscard]] const std::vector<std::string>& list() const noexcept {
    return list_;
  }

 private:
  std::vector<std::string> list_;
};

// All keys of a group in the store. Each begins with pycomm/GROUP/; GENERATION is RankClaim::generation, ROUND is `member`, or with
// StoreRound::binding before it `address`, `port` or `shared_memory`. "The last": forgetMeeting() on the last rank of those that met.
//
//   key                       written by                            deleted by                  belongs to
//   claim/RANK                a counter: each process that claims   nobody                      the store
//   owner/RANK/CLAIM          the process with that claim           the next that is not        one process and group
//                                                                   refused
//   end/RANK/CLAIM            the same, when it leaves or was       as owner                    one process and group
//                             refused
//   notice/RANK,              a rank that cannot join               that rank when it comes     one start of the job (life), if a
//   notice/LIFE/RANK                                                                            launcher says which; else the store
//   GENERATION/ROUND/RANK     each rank                             the last; member/0 stays    one group
//   GENERATION/ROUND/all,     rank 0                                the last                    one group
//     …/all/1, …
//   GENERATION/over           a counter: each rank that has made    the last                    one group
//                             the group, or could not after it met
//   GENERATION/made           the last                              nobody                      one group
//   GENERATION/error,         the rank that fails first, also       the last                    one group
//     BINDING/error           before all have met
//   GENERATION/errors         a counter: each rank that fails       the last                    one group
//   GENERATION/read/RANK      each rank that knows the error        the last                    one group
//
// Keys that the last does not delete, as not all ranks met, stay as long as the store. A group's life after that has keys of its own:
// pycomm/ddp/… (wrapper_store), pycomm/monitored_barrier/… (monitored.py), and those of NCCL's id and of call sites.

/// Exchanges texts in the store between the ranks of one generation of a group. Its references are valid for one call
/// of meet().
///
/// Each rank writes `KEY/RANK`. Rank 0 reads them all and writes the list, which the others read: `KEY/all`, and what does not fit into its
/// 1 MiB, before it, to `KEY/all/1`, `KEY/all/2`, … A list in one piece would outgrow what torch's store takes (8 MiB) at a few thousand
/// ranks. While they wait, the others read rank 0's text and those of the 32 ranks after their own, which is enough: in a ring in which each
/// rank compares itself with its neighbours no two kinds of ranks stay undiscovered.
struct StoreRound {
  Store& store;
  const AbortToken& abort;
  std::string prefix; ///< prefix of this generation's keys
  int rank = -1;
  int size = 0;
  Deadline deadline = Deadline::never();
  TimePoint begin{};
  /// Begins the name of every key. In a sealed store it has the hash of all member records, which have something
  /// fresh of each rank: so the seal of a record of another job does not fit.
  std::string binding = {};
  JobRanks job = {}; ///< what texts call the ranks
  /// In a sealed store, the digest of this rank's own member record; begins an error that it reports before it is bound.
  std::string self = {};
  /// In a sealed store, the digests of all member records, once they are known; errors of no other process count from then on.
  std::vector<std::string> members = {};
  /// Set on ranks other than 0 if the store may hold an earlier run's records. Returns true once rank 0 has gone on to another generation.
  /// Until rank 0's list is there, such a rank believes no single record.
  std::function<bool()> over = {};
  /// Why ranks that are missing cannot come; null: nobody looks. Outlives this.
  Notices* notices = nullptr;

  /// Throws Error if the text of a rank is not what this rank expects.
  using Judge = std::function<void(int rank, const std::string& text)>;
  /// Names a rank in a report: "rank 1 (host b, pid 77)".
  using Name = std::function<std::string(int rank, const std::string& text)>;

  /// Publishes `mine` under `key` and returns the texts of all ranks. Throws what `judge` throws, an error that another
  /// rank reported with failTogether(), Error(RendezvousTimeout) naming the missing and the present ranks, the
  /// token's reason, or GenerationOver.
  [[nodiscard]] std::vector<std::string> gather(
      const std::string& key,
      const std::string& mine,
      const Judge& judge,
      const Name& name) const;

  /// Ends this generation with `record` on all ranks, unless another record came first. Returns the record that counts.
  [[nodiscard]] ErrorRecord failTogether(ErrorRecord record) const noexcept;
  /// Throws an error that another rank reported with failTogether(), or the token's reason. Ranks of different world
  /// sizes may take part, so a record may name a rank that this rank's world does not have.
  void throwIfFailed() const;

 private:
  using Texts = std::vector<std::string>; // by rank; empty: not read yet

  [[nodiscard]] std::optional<ErrorRecord> findError() const;
  [[nodiscard]] std::optional<std::string> findErrorText() const;
  [[nodiscard]] ErrorRecord errorIn(const std::string& text) const;
  [[nodiscard]] std::string read(const std::string& key) const;
  void giveAll(const std::string& key, const Texts& texts) const;
  [[nodiscard]] bool takeAll(const std::string& key, Texts& texts, const Judge& judge) const;
  /// Looks for the texts of up to `budget` ranks that are not read yet, of `among` ranks: 0, and those after this one. True if one was there.
  bool look(const std::string& key, int budget, size_t among, size_t& next, Texts& texts, const Judge& judge) const;
  [[nodiscard]] Error timedOut(const std::string& key, Texts& texts, const Name& name) const;
  [[nodiscard]] bool isMissing(const std::string& key, const Texts& texts, size_t other) const;
  [[nodiscard]] std::string ofWhich() const; ///< of a group that is not the job: ": 1, 3"
  [[nodiscard]] std::string maybeEarlier() const; ///< the end of "rank 0 came": its record may be old
  void logSlow(SlowWait& slow, const std::string& key, const Texts& texts) const;
};

/// Deletes the list of a round that is over.
void removeList(Store& store, const std::string& prefix, const std::string& key);

} // namespace pycomm
