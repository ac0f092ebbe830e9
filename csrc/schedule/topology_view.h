#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pycomm {

/// Maps ranks to hosts. Hosts are numbered by their lowest rank, and the ranks of a host are in ascending order. So all
/// ranks that start from the same list have the same view.
class TopologyView {
 public:
  /// `host_of_rank`: any number per rank, equal for the ranks of one host.
  explicit TopologyView(const std::vector<int32_t>& host_of_rank);

  [[nodiscard]] int32_t size() const noexcept {
    return static_cast<int32_t>(host_of_.size());
  }
  [[nodiscard]] int32_t hosts() const noexcept {
    return static_cast<int32_t>(ranks_of_.size());
  }
  [[nodiscard]] int32_t hostOf(int32_t rank) const {
    return host_of_[static_cast<size_t>(rank)];
  }
  /// The index of `rank` among the ranks of its host, from 0.
  [[nodiscard]] int32_t localIndex(int32_t rank) const {
    return local_index_[static_cast<size_t>(rank)];
  }
  /// In ascending order.
  [[nodiscard]] const std::vector<int32_t>& ranksOf(int32_t host) const {
    return ranks_of_[static_cast<size_t>(host)];
  }
  /// Ranks on the host that has the fewest.
  [[nodiscard]] int32_t fewestRanks() const noexcept {
    return fewest_ranks_;
  }
  [[nodiscard]] int32_t mostRanks() const noexcept {
    return most_ranks_;
  }

  /// All ranks, host by host. A ring in this order enters and leaves each host once.
  [[nodiscard]] std::vector<int32_t> order() const;
  /// The same, starting at `root`: root first, then the other ranks of its host, then the following hosts.
  [[nodiscard]] std::vector<int32_t> orderFrom(int32_t root) const;

  /// "2 hosts with 4 ranks each", "3 hosts with 2 to 4 ranks each", "1 host with 4 ranks"
  [[nodiscard]] std::string text() const;

 private:
  std::vector<int32_t> host_of_; ///< the host of each rank
  std::vector<int32_t> local_index_; ///< the index of each rank on its host
  std::vector<std::vector<int32_t>> ranks_of_; ///< the ranks of each host
  int32_t fewest_ranks_ = 0;
  int32_t most_ranks_ = 0;
};

} // namespace pycomm
