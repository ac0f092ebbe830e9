#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/loop/callback_pool.h"
#include "engine/operation/flight_log.h"

namespace pycomm {

/// The flight logs of all groups of a process, and how they get to disk.
///
/// Groups that are closed are kept for a while, as an error is often looked at after `destroy_process_group`. When a group fails, the
/// whole record goes once to a file, written by a thread of the callback pool: never by a data loop, the control loop or a caller, so
/// that a slow or full disk delays and breaks nothing.
/// Any thread.
class FlightRecorder {
 public:
  /// `callbacks` outlives the recorder.
  explicit FlightRecorder(CallbackPool& callbacks);

  /// A log for a group that is about to be joined.
  [[nodiscard]] std::shared_ptr<FlightLog> open(FlightLog::Subject subject);

  /// Notes why the group of `log` failed, and has a file written if its options name one. Returns at once.
  void failed(const std::shared_ptr<FlightLog>& log, const ErrorRecord& record) noexcept;

  /// Why another group of this process has failed since the group of `log` was made: the first one that did.
  [[nodiscard]] std::optional<ErrorRecord> failedBeside(const FlightLog& log) const;

  /// The record as JSON: of all groups, or of one.
  [[nodiscard]] std::string json(const FlightLog* only = nullptr) const;

  /// The same of the groups that are not closed, but of each no more than the kReportPending oldest operations that have not ended, the
  /// kReportEnded last that have, and the last that was issued.
  [[nodiscard]] std::string report() const;
  static constexpr size_t kReportPending = 64;
  static constexpr size_t kReportEnded = 8;

  /// Writes the whole record to `path`, which appears there complete or not at all; its folder is made where there is none. Blocks.
  /// Throws Error(SystemError).
  void write(const std::string& path) const;

 private:
  void dump(const FlightLog& failed) noexcept;
  using Logs = std::vector<std::shared_ptr<FlightLog>>;
  [[nodiscard]] Logs logs() const;
  [[nodiscard]] std::string jsonOfLogs(const Logs& logs, int job_rank, bool brief) const;

  CallbackPool& callbacks_;
  // One pair of readings of both clocks. All times of a process are computed from it, so that they do not jump when somebody sets the
  // clock.
  const TimePoint steady_anchor_;
  const int64_t wall_anchor_ns_;
  mutable std::mutex mutex_; ///< guards logs_
  Logs logs_; ///< oldest first
  mutable std::mutex
      write_mutex_; ///< one writer at a time: a program may ask for the very file that a failure has written
  std::atomic<bool> dump_waits_{false}; ///< a dump is queued and will see what has happened until it begins
  std::atomic<bool> told_{false}; ///< where the dump is, or why there is none
};

} // namespace pycomm
