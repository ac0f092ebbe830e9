#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proof/sim/run.h"

namespace pycomm::sim {

/// Several groups of the same ranks.
struct ClusterPlan {
  struct Group {
    std::vector<int> members; ///< the cluster's rank of each of the group's ranks
    Plan plan;
  };
  uint64_t seed = 0;
  int size = 2;
  std::vector<Group> groups;

  [[nodiscard]] std::string text() const;
};

[[nodiscard]] ClusterPlan makeClusterPlan(uint64_t seed);

/// Runs the groups of a plan at once. A rank's groups share its process and its native threads, and so the faults of
/// its process or host. Each group has its own connections and programs; their faults do not affect other groups.
class Cluster {
 public:
  Cluster(ClusterPlan plan, bool keeps_trace);

  void execute();

  [[nodiscard]] const ClusterPlan& plan() const noexcept {
    return plan_;
  }
  [[nodiscard]] const std::vector<std::unique_ptr<Run>>& runs() const noexcept {
    return runs_;
  }

 private:
  void strike(const ClusterPlan::Group& drawn_for, const FaultPlan& fault);
  [[nodiscard]] bool allClosed() const;

  const ClusterPlan plan_;
  Timeline timeline_;
  Wires wires_;
  std::vector<std::unique_ptr<SimProcess>> processes_; ///< destroyed after the runs, which use them
  std::vector<std::unique_ptr<Run>> runs_;
};

} // namespace pycomm::sim
