#include "schedule/topology_view.h"

#include <algorithm>
#include <unordered_map>

namespace pycomm {

TopologyView::TopologyView(const std::vector<int32_t>& host_of_rank) {
  std::unordered_map<int32_t, int32_t> numbers;
  for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const auto [found, is_new] = numbers.try_emplace(host_of_rank[rank], static_cast<int32_t>(numbers.size()));
    if (is_new) {
      ranks_of_.emplace_back();
    }
    auto& local_peers = ranks_of_[static_cast<size_t>(found->second)];
    host_of_.push_back(found->second);
    local_index_.push_back(static_cast<int32_t>(local_peers.size()));
    local_peers.push_back(static_cast<int32_t>(rank));
  }
  for (const auto& local_peers : ranks_of_) {
    const auto count = static_cast<int32_t>(local_peers.size());
    fewest_ranks_ = fewest_ranks_ == 0 ? count : std::min(fewest_ranks_, count);
    most_ranks_ = std::max(most_ranks_, count);
  }
}

std::vector<int32_t> TopologyView::order() const {
  std::vector<int32_t> ranks;
  for (const auto& local_peers : ranks_of_) {
    ranks.insert(ranks.end(), local_peers.begin(), local_peers.end());
  }
  return ranks;
}

std::vector<int32_t> TopologyView::orderFrom(int32_t root) const {
  std::vector<int32_t> ranks;
  for (int32_t i = 0; i < hosts(); ++i) {
    const auto& local_peers = ranksOf((hostOf(root) + i) % hosts());
    const auto first = i == 0 ? local_peers.begin() + localIndex(root) : local_peers.begin();
    ranks.insert(ranks.end(), first, local_peers.end());
    ranks.insert(ranks.end(), local_peers.begin(), first);
  }
  return ranks;
}

std::string TopologyView::text() const {
  const std::string hosts_text = std::to_string(hosts()) + (hosts() == 1 ? " host with " : " hosts with ");
  const std::string each = hosts() == 1 ? "" : " each";
  if (fewest_ranks_ == most_ranks_) {
    return hosts_text + std::to_string(most_ranks_) + (most_ranks_ == 1 ? " rank" : " ranks") + each;
  }
  return hosts_text + std::to_string(fewest_ranks_) + " to " + std::to_string(most_ranks_) + " ranks" + each;
}

} // namespace pycomm
