// Draws several groups of the same ranks, as data, tensor and pipeline parallel training has them.
#include <algorithm>
#include <utility>

#include "proof/sim/cluster.h"

namespace pycomm::sim {
namespace {

/// `count` ranks from `first` on, `step` apart.
std::vector<int> every(int step, int first, int count) {
  std::vector<int> members;
  for (int i = 0; i < count; ++i) {
    members.push_back(first + i * step);
  }
  return members;
}

std::vector<std::vector<int>> drawMembers(Random& random, int size) {
  std::vector<std::vector<int>> groups = {every(1, 0, size)};
  if (random.chance(30)) {
    groups.push_back(groups[0]); // two of all ranks, as for two models
  }
  if (size % 2 == 0 && size > 2) {
    for (int i = 0; i < size / 2; ++i) {
      groups.push_back(every(1, 2 * i, 2)); // neighbours: tensor parallel
    }
    for (int i = 0; i < 2 && random.chance(70); ++i) {
      groups.push_back(every(2, i, size / 2)); // across them: data parallel
    }
  } else {
    groups.push_back(every(1, static_cast<int>(random.below(2)), size - 1)); // all but one
  }
  // A group of one rank needs no network.
  const auto alone = [](const std::vector<int>& members) { return members.size() < 2; };
  groups.erase(std::remove_if(groups.begin(), groups.end(), alone), groups.end());
  return groups;
}

} // namespace

ClusterPlan makeClusterPlan(uint64_t seed) {
  Random random(seed);
  ClusterPlan cluster;
  cluster.seed = seed;
  cluster.size = random.pick({3, 4, 4, 4, 6});
  // One network under all groups, and one pace for each rank's threads.
  const Plan common = makePlan(random.next());
  std::vector<SimLoop::Pace> paces;
  const std::vector<std::vector<int>> members = drawMembers(random, cluster.size);
  const auto faulty = static_cast<size_t>(random.below(static_cast<int64_t>(members.size())));
  for (size_t i = 0; i < members.size(); ++i) {
    GroupFrame frame;
    frame.size = static_cast<int>(members[i].size());
    frame.prompt = common.prompt;
    frame.weather = common.weather;
    frame.faulty = i == faulty;
    ClusterPlan::Group group{members[i], makePlan(random.next(), frame)};
    if (!frame.faulty) {
      group.plan.faults.clear(); // a host that sleeps, which changes no program
    }
    for (size_t rank = 0; rank < members[i].size(); ++rank) {
      SimLoop::Pace& pace = group.plan.ranks[rank].data_loop_pace;
      if (i == 0) {
        paces.push_back(pace); // the first has all ranks
      }
      pace = paces[static_cast<size_t>(members[i][rank])];
    }
    cluster.groups.push_back(std::move(group));
  }
  return cluster;
}

std::string ClusterPlan::text() const {
  std::string out = "seed " + std::to_string(seed) + ": " + std::to_string(size) + " ranks in " +
      std::to_string(groups.size()) + " groups\n";
  for (size_t i = 0; i < groups.size(); ++i) {
    out += "group " + std::to_string(i) + " of";
    for (const int rank : groups[i].members) {
      out += ' ' + std::to_string(rank);
    }
    const std::string plan = groups[i].plan.text();
    out += plan.substr(plan.find(':')); // its seed cannot be replayed by itself
  }
  return out;
}

} // namespace pycomm::sim
