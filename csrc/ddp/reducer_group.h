#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

#include "c10d/backend.h"
#include "ddp/reducer_options.h"

namespace pycomm {

/// The process group that a reducer reduces over, and the services of its backend.
class ReducerGroup {
 public:
  /// `backend`: pycomm's in `group`, or null. Throws a ValueError if a parameter has a codec and there is no such backend.
  ReducerGroup(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      const c10::intrusive_ptr<c10d::Backend>& backend,
      const std::vector<ReducedParam>& params);
  /// With the backend that `group` has for these parameters.
  [[nodiscard]] static ReducerGroup withItsBackend(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      const std::vector<ReducedParam>& params);

  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& get() const noexcept {
    return group_;
  }
  [[nodiscard]] int rank() const {
    return group_->getRank();
  }
  /// What errors call its ranks; of a group that is not pycomm's, the group's own numbers.
  [[nodiscard]] const JobRanks& job() const noexcept {
    return job_;
  }
  [[nodiscard]] int jobRank() const {
    return job_.of(rank());
  }
  [[nodiscard]] int size() const {
    return group_->getSize();
  }
  /// For the reducer's own small tensors: the CPU, so that reading them waits for no device; the parameters' device if the group
  /// serves nothing else.
  [[nodiscard]] c10::Device device() const noexcept {
    return device_;
  }
  /// Runs encoded sums; null if no parameter has a codec.
  [[nodiscard]] const c10::intrusive_ptr<PycommBackend>& codecBackend() const noexcept {
    return codec_backend_;
  }
  /// Whether the ranks can reach each other's tensors in place: see FlatMemory.
  [[nodiscard]] bool sharesTensors() const noexcept {
    return shares_tensors_;
  }

  /// Returns rank 0's `values` on all ranks. All pass the same number of values. Collective; throws.
  [[nodiscard]] std::vector<size_t> fromRank0(const std::vector<size_t>& values) const;
  /// Fails this group's operations on all ranks, if the backend can; else nothing happens.
  void abort() const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  c10::intrusive_ptr<PycommBackend> codec_backend_;
  bool shares_tensors_ = false;
  JobRanks job_;
};

} // namespace pycomm
