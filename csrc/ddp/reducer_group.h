#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "c10d/backend.h"
#include "ddp/bucket_memory.h"
#include "ddp/pass_weights.h"
#include "ddp/reducer_options.h"
#include "ddp/shared_state.h"
#include "ddp/steps.h"

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
  /// What the codecs of its present members have counted, if these can change; else 0. See codec_stats.
  [[nodiscard]] int64_t codecOverflows() const noexcept {
    return counted_ == nullptr ? 0 : static_cast<int64_t>(counted_->codecCounters().overflows.load());
  }
  /// Where buckets get memory. Cut them again after the group has changed.
  [[nodiscard]] FlatMemory& memory() noexcept {
    return memory_;
  }

  /// Raises an InvalidArgument if the group was reconfigured since: what is divided by the number of ranks would be wrong.
  void requireSameMembers() const;

  /// Returns rank 0's `values` on all ranks. All pass the same number of values. Collective; throws.
  [[nodiscard]] std::vector<size_t> fromRank0(const std::vector<size_t>& values) const;
  /// Fails this group's operations on all ranks, because this one has failed. `what`: see PycommBackend::abortFor(). `others`: also if the
  /// backend is not pycomm's, and can.
  void abort(const std::string& what, bool others) const {
    abort(*group_, param_device_, what, others);
  }
  /// The same for any group: its operations of tensors on the CPU and on `device`.
  static void abort(c10d::ProcessGroup& group, at::Device device, const std::string& what, bool others);
  /// Where the parameters are.
  [[nodiscard]] at::Device paramDevice() const noexcept {
    return param_device_;
  }
  /// Of its collectives; none if the backend does not say.
  [[nodiscard]] static std::optional<std::chrono::milliseconds> timeoutOf(c10d::ProcessGroup& group, at::Device device);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  c10::Device param_device_;
  c10::intrusive_ptr<PycommBackend> codec_backend_;
  c10::intrusive_ptr<PycommBackend> changing_backend_; ///< pycomm's backend, if its members can change; else null
  std::shared_ptr<Group> counted_; ///< of those members, if a parameter has a codec; else null
  uint64_t run_ = 0; ///< GroupIdentity::run of its members then
  FlatMemory memory_{false};
  JobRanks job_;
};

/// That a reducer of this process has a group. Any thread.
class GroupUse {
 public:
  explicit GroupUse(const c10d::ProcessGroup& group);
  /// Whether another reducer has the same one now.
  [[nodiscard]] bool isShared() const noexcept {
    return users_.use_count() > 1;
  }

 private:
  std::shared_ptr<const c10d::ProcessGroup*> users_; ///< one for all of them
};

/// Which parameters had a gradient since the last reduction, on any rank: those that had none anywhere keep their .grad.
///
/// mark() collects on this rank, launch() starts the sum over ranks, anywhere() waits for it if this rank had no gradient itself.
/// Parameters are marked anew for each reduction, until SharedValues::knows_used: the graph is static, and the answer holds.
class UsedParams {
 public:
  /// `state`, `stats`: outlive this.
  UsedParams(const SharedState& state, ReducerStats& stats);

  void mark(size_t index);
  [[nodiscard]] bool marked(size_t index) const {
    return here_.const_data_ptr<int32_t>()[index] != 0;
  }
  /// Does nothing once the answer is known.
  void launch(const ReducerGroup& group);
  [[nodiscard]] bool anywhere(size_t index);
  /// As far as this rank knows now, without waiting.
  [[nodiscard]] bool mayBeUnused(size_t index) const;
  /// Waits for the sum that launch() started, if there is one.
  void await();

  /// Forgets the marks, unless the answer is known.
  void clear();
  /// Those of parameters without .grad, but for what PassWeights has taken from it: zero_grad() has taken back what marked them.
  void forgetGone(const std::vector<ReducedParam>& params, const std::optional<PassWeights>& weights);
  /// Whether anywhere() never waits.
  [[nodiscard]] bool kept() const noexcept {
    return state_.now().knows_used;
  }

 private:
  const SharedState& state_;
  ReducerStats& stats_;
  at::Tensor here_; ///< int32 by parameter: 1 if a gradient came
  at::Tensor sums_; ///< of here_, over ranks
  c10::intrusive_ptr<c10d::Work> work_; ///< null unless sums_ is reduced now
};

} // namespace pycomm
