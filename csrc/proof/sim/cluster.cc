#include "proof/sim/cluster.h"

#include <algorithm>
#include <utility>

namespace pycomm::sim {
namespace {

/// The group's own number of a rank of the cluster; -1 if the rank is not in the group.
int memberOf(const ClusterPlan::Group& group, int rank) {
  const auto found = std::find(group.members.begin(), group.members.end(), rank);
  return found == group.members.end() ? -1 : static_cast<int>(found - group.members.begin());
}

} // namespace

Cluster::Cluster(ClusterPlan plan, bool keeps_trace) : plan_(std::move(plan)) {
  Random random(plan_.seed ^ 0x5eed);
  for (int rank = 0; rank < plan_.size; ++rank) {
    processes_.push_back(std::make_unique<SimProcess>(timeline_, wires_, random.fork()));
  }
  for (const ClusterPlan::Group& group : plan_.groups) {
    Shared shared;
    shared.timeline = &timeline_;
    shared.wires = &wires_;
    shared.first_fd = static_cast<int>(runs_.size()) * Wires::kFdsPerNetwork;
    for (const int rank : group.members) {
      shared.processes.push_back(processes_[static_cast<size_t>(rank)].get());
    }
    shared.strike = [this, &group](const FaultPlan& fault) { strike(group, fault); };
    runs_.push_back(std::make_unique<Run>(group.plan, keeps_trace, std::move(shared)));
  }
}

void Cluster::execute() {
  for (const auto& run : runs_) {
    run->begin();
  }
  const TimePoint horizon = timeline_.now() + kHorizon;
  while (!allClosed() && timeline_.eventsRun() < kMostEvents && timeline_.step(horizon)) {
  }
}

bool Cluster::allClosed() const {
  return std::all_of(runs_.begin(), runs_.end(), [](const auto& run) { return run->allClosed(); });
}

void Cluster::strike(const ClusterPlan::Group& drawn_for, const FaultPlan& fault) {
  const int rank = drawn_for.members[static_cast<size_t>(fault.rank)];
  const int other = fault.other < 0 ? -1 : drawn_for.members[static_cast<size_t>(fault.other)];
  for (size_t i = 0; i < runs_.size(); ++i) {
    FaultPlan theirs = fault;
    theirs.rank = memberOf(plan_.groups[i], rank);
    theirs.other = other < 0 ? -1 : memberOf(plan_.groups[i], other);
    if (fault.kind == FaultKind::Sleep) { // of all ranks: any rank that is still alive represents it
      const auto& ranks = runs_[i]->ranks();
      const auto open = std::find_if(ranks.begin(), ranks.end(), [](const auto& each) { return !each.user->closed(); });
      theirs.rank = open == ranks.end() ? -1 : static_cast<int>(open - ranks.begin());
    }
    if (theirs.rank >= 0 && (other < 0 || theirs.other >= 0)) {
      runs_[i]->strike(theirs);
    }
  }
}

} // namespace pycomm::sim
