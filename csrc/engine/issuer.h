#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/call.h"
#include "engine/operation/codec_counters.h"
#include "engine/operation/flight_log.h"
#include "engine/operation/operation.h"
#include "engine/operation/roster.h"
#include "engine/operation/schedule_cache.h"

namespace pycomm {

/// Makes an operation of each call on this rank: checks the call, gives the operation its id, its schedule, and its place in the flight
/// log. Nothing here begins to run.
///
/// Ids follow the order in which operations are made, which must be the same on all ranks (IssueContext). All functions that take a call
/// throw Error(InvalidArgument | Unsupported) for one without meaning, and take no id then.
///
/// Any thread.
class Issuer final {
 public:
  /// `roster` outlives this.
  Issuer(const Roster& roster, std::shared_ptr<FlightLog> log)
      : roster_(roster), log_(std::move(log)), schedules_(roster) {}

  /// One that runs over links. A message gets no id here: the data loop names it.
  [[nodiscard]] std::shared_ptr<Operation> overLinks(const Call& call);

  /// One that runs in shared memory, in two steps: HostPlane makes the operation where its ticket is given.
  [[nodiscard]] Operation::Request requestOnHost(const Call& call);
  [[nodiscard]] std::shared_ptr<Operation> onHost(Operation::Request request, bool held);

  /// One that another library runs (Group::follow).
  [[nodiscard]] std::shared_ptr<Operation> followed(const Call& call);

  /// Whether a call over links may have its parts in buffers of their own.
  [[nodiscard]] bool keepsParts(const ScheduleRequest& schedule);

  /// How many operations user threads have issued on this rank.
  [[nodiscard]] int64_t issued() const noexcept {
    return counter_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] const CodecCounters& codecCounters() const noexcept {
    return *codec_counters_;
  }

 private:
  [[nodiscard]] Operation::Request requestOf(const Call& call) const;
  void fillCollective(Operation::Request& request, const Call& call);
  void fillMessage(Operation::Request& request, const Call& call);
  [[nodiscard]] OperationId takeId();
  [[nodiscard]] std::shared_ptr<Operation> recorded(Operation::Request request) const;

  const Roster& roster_;
  const std::shared_ptr<FlightLog> log_;
  const std::shared_ptr<CodecCounters> codec_counters_ = std::make_shared<CodecCounters>();
  ScheduleCache schedules_;
  std::atomic<int64_t> counter_{0}; ///< operations issued by user threads
};

} // namespace pycomm
