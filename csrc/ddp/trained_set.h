#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>
#include <string>
#include <vector>

#include "base/job_ranks.h"
#include "ddp/reduced_param.h"

namespace pycomm {

/// Which parameters are trained, on this rank and on the others.
///
/// Ranks that freeze or unfreeze different parameters cut different buckets, so their operations do not match. The mismatch itself names
/// no parameter. So a rank whose set has changed publishes it in the group's store, and a rank whose operation did not match compares
/// it with the others'. A rank whose set never changes writes nothing.
///
/// Not thread-safe.
class TrainedSet {
 public:
  /// `store`: shared by the ranks and by nothing else; null: sets are neither published nor compared.
  TrainedSet(c10::intrusive_ptr<c10d::Store> store, int rank, JobRanks job, const std::vector<ReducedParam>& params);

  /// By parameter.
  [[nodiscard]] const std::vector<bool>& trained() const noexcept {
    return trained_;
  }
  /// The first parameter that was frozen or unfrozen since the last take().
  [[nodiscard]] std::optional<size_t> changed(const std::vector<ReducedParam>& params) const;
  /// requires_grad of all parameters.
  [[nodiscard]] static std::vector<bool> read(const std::vector<ReducedParam>& params);
  /// What read() gave is the set from now on.
  void take(std::vector<bool> trained) noexcept;
  /// Writes this rank's set to the store. Throws the store's errors.
  void publish();
  /// The ranks are others from now on, and share no store.
  void changeRanks(int rank);

  /// A sentence about the first parameter that is trained here and frozen on another rank, or the reverse. Nothing if no difference is
  /// known, or if the store cannot be read.
  [[nodiscard]] std::optional<std::string> difference(const std::vector<ReducedParam>& params, int world_size) const;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  JobRanks job_;
  std::vector<bool> trained_;
  std::vector<bool> at_first_; ///< the same on all ranks: the wrapper has compared them
};

} // namespace pycomm
