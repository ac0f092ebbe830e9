#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/job_ranks.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// A message from a rank that ended before it could join: its secret is unusable, or a signal interrupted it. It cannot be sealed, in a sealed store either, so anybody who reaches
/// the store can write one. If a launcher starts the job again on the same store, each start has notices of its own; without a launcher that
/// says which start this is, a notice may be of an earlier run. Therefore a notice never ends the wait of another rank: that
/// rank logs it, and names it if the wait times out.
struct Notice {
  int rank = -1;
  std::string host;
  std::string reason; ///< may contain the path of the secret's file, never the secret
  int job_rank = -1; ///< of one that was read: what its text calls the rank

  /// "rank 3 on b has written into the store that it cannot join: REASON"
  [[nodiscard]] std::string text() const;
};

/// Writes a notice for the ranks that wait for this one in a group. `life`: RendezvousConfig::life. Ignores a store that fails: this rank
/// raises its own error in any case.
void postNotice(Store& store, const std::string& group_name, const std::string& life, const Notice& notice) noexcept;
/// For a rank that comes. `prefix`: see Notices.
void removeNotice(Store& store, const std::string& prefix, const std::string& life, int rank);

/// The notices of one group, as one waiting rank reads them.
class Notices {
 public:
  /// Whether a rank has not come yet. Is asked only of ranks that have a notice.
  using IsMissing = std::function<bool(int rank)>;

  /// `store` outlives this. `prefix` begins the group's keys, size is its number of ranks.
  Notices(Store& store, std::string prefix, std::string life, int size, JobRanks job = {});

  /// Logs a warning for each rank that is missing and has a notice, once, and at most 16 in all: a stranger who writes to the store must not
  /// fill the log. Reads first after kLongPauseMs and then every kLookAgainMs, however often it is called, and of 32 ranks at a time.
  void poll(const IsMissing& is_missing, TimePoint now = Clock::now());
  /// Reads the notice that a rank has now.
  [[nodiscard]] std::optional<Notice> of(int rank);

 private:
  Store& store_;
  const std::string prefix_;
  const std::string life_;
  const JobRanks job_;
  TimePoint next_look_;
  std::vector<bool> logged_; ///< by rank
  size_t next_ = 0; ///< the rank with which the next look begins
  int lines_ = 0;
};

} // namespace pycomm
