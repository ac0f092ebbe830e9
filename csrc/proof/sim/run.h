#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proof/sim/plan.h"
#include "proof/sim/user.h"
#include "proof/sim/wire_audit.h"

namespace pycomm::sim {

/// Virtual time in which every run must have come to its end, and events.
inline constexpr Nanos kHorizon = std::chrono::seconds(300);
inline constexpr int64_t kMostEvents = 3000000;

/// A fault that has happened.
struct FaultRecord {
  FaultPlan plan;
  TimePoint at{};
};

/// One rank after the run.
struct RankState {
  std::unique_ptr<SimProcess> own_process; ///< of a run by itself
  std::unique_ptr<SimGroup> group;
  std::unique_ptr<User> user;
};

/// What the groups of a cluster have in common.
struct Shared {
  Timeline* timeline = nullptr;
  Wires* wires = nullptr;
  std::vector<SimProcess*> processes; ///< by the group's rank
  int first_fd = 0;
  /// What strikes processes and hosts, and so all their groups.
  std::function<void(const FaultPlan&)> strike;
};

/// Runs a plan from the beginning to the end of virtual time.
class Run {
 public:
  Run(const Plan& plan, bool keeps_trace);
  /// One group of several: the cluster calls begin() and lets time pass.
  Run(const Plan& plan, bool keeps_trace, Shared shared);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  void execute();
  /// Starts the programs and sets the faults going.
  void begin();
  /// Everybody has closed, or is dead.
  [[nodiscard]] bool allClosed() const;
  void strike(const FaultPlan& fault);

  [[nodiscard]] const Plan& plan() const noexcept {
    return plan_;
  }
  [[nodiscard]] const std::vector<RankState>& ranks() const noexcept {
    return ranks_;
  }
  [[nodiscard]] const std::vector<FaultRecord>& faults() const noexcept {
    return faults_;
  }
  [[nodiscard]] const WireAudit& audit() const noexcept {
    return audit_;
  }
  [[nodiscard]] Nanos elapsed() const noexcept {
    return timeline_->elapsed();
  }
  [[nodiscard]] int64_t events() const noexcept {
    return timeline_->eventsRun();
  }
  /// It came to an end by itself.
  [[nodiscard]] bool cameToRest() const noexcept {
    return allClosed();
  }

 private:
  void order(const FaultPlan& fault);

  const Plan plan_;
  const Shared shared_;
  std::unique_ptr<Timeline> own_timeline_; ///< of a run by itself
  Timeline* const timeline_; ///< its own, or the cluster's
  Random random_;
  Network network_;
  WireAudit audit_;
  std::vector<RankState> ranks_; ///< before the network goes
  std::vector<FaultRecord> faults_;
};

} // namespace pycomm::sim
