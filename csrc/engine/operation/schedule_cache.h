#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "engine/operation/prepared_schedule.h"
#include "engine/operation/roster.h"
#include "schedule/select.h"
#include "schedule/step.h"

namespace pycomm {

/// The schedules of a group's calls on this rank. The last 64 distinct ones are kept, or fewer if they are large, so that a call in a
/// training step makes none. (A ring's takes 0.7 MB for each GiB of the tensor, with segments of 256 KiB.)
/// Logs (info) which algorithm each collective uses and why: once per collective and power of two of bytes.
///
/// Any thread.
class ScheduleCache final {
 public:
  static constexpr size_t kKept = 64;
  static constexpr size_t kKeptNbytes = 32 << 20; ///< of memory; a larger one is made for each call

  /// `roster` outlives this.
  explicit ScheduleCache(const Roster& roster) noexcept : roster_(roster) {}

  /// With this rank and what the group knows filled in.
  [[nodiscard]] ScheduleRequest ours(const ScheduleRequest& schedule) const;
  /// Throws Error(InvalidArgument | Unsupported) for a request without meaning. `request`: one of ours().
  [[nodiscard]] std::shared_ptr<const PreparedSchedule> get(const ScheduleRequest& request);

 private:
  void logChoice(const ScheduleRequest& request, Algorithm algorithm);

  struct Entry {
    ScheduleRequest request;
    std::shared_ptr<const PreparedSchedule> prepared;
  };

  const Roster& roster_;
  std::mutex mutex_; ///< guards the rest
  std::list<Entry> entries_; ///< most recently used first
  size_t nbytes_ = 0; ///< of their schedules
  std::set<std::pair<Collective, int>> logged_; ///< kind and power of two of what logChoice() has logged
};

} // namespace pycomm
