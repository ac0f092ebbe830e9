#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sim/plan.h"
#include "sim/user.h"
#include "sim/wire_audit.h"

namespace pycomm::sim {

/// A fault that has happened.
struct FaultRecord {
  FaultPlan plan;
  TimePoint at{};
};

/// One rank after the run.
struct RankState {
  std::unique_ptr<SimGroup> group;
  std::unique_ptr<User> user;
};

/// Runs a plan from the beginning to the end of virtual time.
class Run {
 public:
  Run(const Plan& plan, bool keeps_trace);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  void execute();

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
    return timeline_.elapsed();
  }
  [[nodiscard]] int64_t events() const noexcept {
    return timeline_.eventsRun();
  }
  /// It came to an end by itself: everybody closed.
  [[nodiscard]] bool cameToRest() const noexcept {
    return came_to_rest_;
  }

 private:
  void strike(const FaultPlan& fault);
  [[nodiscard]] bool allClosed() const;

  const Plan plan_;
  Timeline timeline_;
  Random random_;
  Network network_;
  WireAudit audit_;
  std::vector<RankState> ranks_; ///< before the network goes
  std::vector<FaultRecord> faults_;
  bool came_to_rest_ = false;
};

} // namespace pycomm::sim
