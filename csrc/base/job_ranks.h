#pragma once

#include <string>
#include <utility>
#include <vector>

namespace pycomm {

/// The numbers that the ranks of a group have in the job, by their number in the group. Errors, logs and files call a rank by its number in
/// the job alone: nobody but the group's own code knows the other one. It is converted here, where a record or a text is made; a record
/// that comes from another rank or from the store has numbers of the job already.
class JobRanks {
 public:
  JobRanks() = default; ///< the same numbers: the group is the job
  explicit JobRanks(std::vector<int> by_rank) noexcept : by_rank_(std::move(by_rank)) {}

  /// -1, ErrorRecord::kThisEnd and numbers that no rank of the group has stay as they are.
  [[nodiscard]] int of(int rank) const noexcept {
    const auto index = static_cast<size_t>(rank);
    return rank >= 0 && index < by_rank_.size() ? by_rank_[index] : rank;
  }
  /// The other way; -1 for a number that is not of a rank of this group.
  [[nodiscard]] int inGroup(int job_rank) const noexcept;
  /// "rank 3"
  [[nodiscard]] std::string text(int rank) const {
    return "rank " + std::to_string(of(rank));
  }
  /// All of them: "1, 3", "0-7, 16-23"; after eight such parts "and 5 more". Empty: the group is the job.
  [[nodiscard]] std::string list() const;
  [[nodiscard]] const std::vector<int>& numbers() const noexcept {
    return by_rank_;
  }

 private:
  std::vector<int> by_rank_;
};

} // namespace pycomm
