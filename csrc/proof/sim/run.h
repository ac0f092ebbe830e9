#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proof/sim/plan.h"
#include "proof/sim/user.h"
#include "proof/sim/wire_audit.h"

namespace pycomm::sim {

/// The virtual time in which every run must end.
inline constexpr Nanos kHorizon = std::chrono::seconds(300);
inline constexpr int64_t kMostEvents = 3000000;

/// A fault that has been injected.
struct FaultRecord {
  FaultPlan plan;
  TimePoint at{};
};

/// One rank after the run.
struct RankState {
  std::unique_ptr<SimProcess> own_process; ///< null in a cluster, which owns the processes
  std::unique_ptr<SimGroup> group;
  std::unique_ptr<User> user;
};

/// The parts that the groups of a cluster share.
struct Shared {
  Timeline* timeline = nullptr;
  Wires* wires = nullptr;
  std::vector<SimProcess*> processes; ///< by the group's rank
  int first_fd = 0;
  /// Injects a fault into a process or host, and so into all their groups.
  std::function<void(const FaultPlan&)> strike;
};

/// Runs a plan from the beginning to the end of virtual time.
class Run {
 public:
  Run(const Plan& plan, bool keeps_trace);
  /// One group of a cluster, which calls begin() and runs the timeline.
  Run(const Plan& plan, bool keeps_trace, Shared shared);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  void execute();
  /// Starts the programs and schedules the faults.
  void begin();
  /// True if every rank has closed or is dead.
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
  /// True if the run ended by itself.
  [[nodiscard]] bool cameToRest() const noexcept {
    return allClosed();
  }

 private:
  void order(const FaultPlan& fault);

  const Plan plan_;
  const Shared shared_;
  std::unique_ptr<Timeline> own_timeline_; ///< null in a cluster
  Timeline* const timeline_; ///< own_timeline_, or the cluster's
  Random random_;
  Network network_;
  WireAudit audit_;
  std::vector<RankState> ranks_; ///< destroyed before the network
  std::vector<FaultRecord> faults_;
};

} // namespace pycomm::sim
