#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "proof/sim/given_back.h"
#include "proof/sim/plan.h"
#include "proof/sim/sim_group.h"

namespace pycomm::sim {

/// One operation as its caller saw it.
struct Outcome {
  CallPlan call;
  Descriptor descriptor;
  uint64_t op_id = 0; ///< of a collective, the same on all ranks; 0 for a message
  int sender = -1; ///< of a message that was received
  TimePoint issued{};
  TimePoint ended = TimePoint::max(); ///< max: it has not
  bool group_had_failed = false; ///< when it was issued
  std::optional<ErrorRecord> error;
  std::vector<std::byte> output; ///< as it was when the operation ended
  bool input_altered = false;
  std::vector<GivenBack> memory; ///< of the operation, once it has ended
};

/// The thread of a rank's program: issues calls, waits for some of them, closes the group in the end or after an error.
/// Each operation's memory is used for something else the moment it has ended: see GivenBack.
class User {
 public:
  User(Timeline& timeline, SimGroup& group, int rank, const RankPlan& plan);

  void begin();
  /// Told in words what the program does.
  void onEvent(std::function<void(const std::string&)> listener) {
    on_event_ = std::move(listener);
  }
  /// Closes the group in the middle.
  void leaveNow();
  void stop() noexcept {
    stopped_ = true;
  }
  void resume();

  [[nodiscard]] const std::vector<std::unique_ptr<Outcome>>& outcomes() const noexcept {
    return outcomes_;
  }
  /// What this rank made of the collective that others call so; null if it has not come to it.
  [[nodiscard]] const Outcome* collective(uint64_t op_id) const noexcept;
  [[nodiscard]] bool closed() const noexcept {
    return closed_;
  }
  [[nodiscard]] TimePoint closingSince() const noexcept {
    return closing_since_;
  }
  /// What the data plane kept when the last operation had ended and none had failed.
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
  /// Runs `step` after `delay`, not while the process is stopped.
  void later(Nanos delay, std::function<void()> step);

  Timeline& timeline_; ///< the run's, as are the group and the plan
  SimGroup& group_;
  const int rank_;
  const RankPlan& plan_;
  std::function<void(const std::string&)> on_event_;
  size_t position_ = 0;
  size_t under_way_ = 0;
  uint64_t collectives_ = 0;
  bool blocked_ = false; ///< waits for what it has issued
  bool failed_ = false;
  bool leaving_ = false;
  bool closed_ = false;
  bool stopped_ = false;
  TimePoint closing_since_ = TimePoint::max();
  std::vector<std::function<void()>> delayed_; ///< came due while stopped
  std::vector<std::unique_ptr<Outcome>> outcomes_;
  std::vector<std::shared_ptr<Operation>> operations_;
  std::vector<std::unique_ptr<Memory>> memory_;
  const std::shared_ptr<CodecCounters> codec_counters_ = std::make_shared<CodecCounters>();
  std::optional<DataPlane::Usage> usage_at_end_;
};

} // namespace pycomm::sim
