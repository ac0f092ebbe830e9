#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "proof/sim/given_back.h"
#include "proof/sim/plan.h"
#include "proof/sim/sim_group.h"

namespace pycomm::sim {

/// One operation, as seen by its caller.
struct Outcome {
  CallPlan call;
  Descriptor descriptor;
  uint64_t op_id = 0; ///< of a collective: the same on all ranks; 0 for a message
  uint64_t name = 0; ///< at its end: op_id, or the id that a message got when it was matched
  int sender = -1; ///< the sender of a received message
  TimePoint issued{};
  TimePoint ended = TimePoint::max(); ///< max(): not ended
  bool group_had_failed = false; ///< at the time of the call
  std::optional<ErrorRecord> error;
  std::vector<std::byte> output; ///< at the end of the operation
  bool input_altered = false;
  std::vector<GivenBack> memory; ///< the operation's memory after its end
};

/// The thread of a rank's program: issues calls, waits for some of them, and closes the group in the end or after an
/// error. The memory of each operation is reused as soon as the operation has ended: see GivenBack.
class User {
 public:
  User(Timeline& timeline, SimGroup& group, int rank, const RankPlan& plan);

  void begin();
  /// Sets a listener for the program's actions, described in words.
  void onEvent(std::function<void(const std::string&)> listener) {
    on_event_ = std::move(listener);
  }
  /// Closes the group at once, also while operations are in flight.
  void leaveNow();
  void stop() noexcept {
    stopped_ = true;
  }
  void resume();

  [[nodiscard]] const std::vector<std::unique_ptr<Outcome>>& outcomes() const noexcept {
    return outcomes_;
  }
  /// This rank's outcome of the collective with this id; null if it has not issued it.
  [[nodiscard]] const Outcome* collective(uint64_t op_id) const noexcept;
  [[nodiscard]] bool closed() const noexcept {
    return closed_;
  }
  [[nodiscard]] TimePoint closingSince() const noexcept {
    return closing_since_;
  }
  /// The data plane's usage after the last operation, if none had failed.
  [[nodiscard]] const std::optional<DataPlane::Usage>& usageAtEnd() const noexcept {
    return usage_at_end_;
  }

 private:
  struct Memory {
    std::vector<std::byte> input;
    std::vector<std::byte> output;
  };

  void next();
  void issue(const CallPlan& call);
  void nameMessage(Operation::Request& request, const CallPlan& call) const;
  void ended(size_t index);
  void leave(Nanos delay);
  /// Runs `step` after `delay`; if the process is stopped then, after resume().
  void later(Nanos delay, std::function<void()> step);

  Timeline& timeline_; ///< the run's, as are the group and the plan
  SimGroup& group_;
  const int rank_;
  const RankPlan& plan_;
  std::function<void(const std::string&)> on_event_;
  size_t position_ = 0;
  size_t under_way_ = 0;
  uint64_t collectives_ = 0;
  bool blocked_ = false; ///< waits for the calls it has issued
  bool failed_ = false;
  bool leaving_ = false;
  bool closed_ = false;
  bool stopped_ = false;
  TimePoint closing_since_ = TimePoint::max();
  std::vector<std::function<void()>> delayed_; ///< steps that became due while the process was stopped
  std::vector<std::unique_ptr<Outcome>> outcomes_;
  std::vector<std::shared_ptr<Operation>> operations_;
  std::vector<std::unique_ptr<Memory>> memory_;
  const std::shared_ptr<CodecCounters> codec_counters_ = std::make_shared<CodecCounters>();
  std::optional<DataPlane::Usage> usage_at_end_;
};

} // namespace pycomm::sim
