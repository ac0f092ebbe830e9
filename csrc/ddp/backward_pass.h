#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ddp/shared_state.h"

namespace pycomm {

/// The bookkeeping of one backward pass after another: whether gradients are reduced in this pass, and which of them are ready.
///
///     reset() [-> arm()] -> begin() by the first gradient -> completes() and markReady() per gradient -> reset()
///
/// It moves no gradient and talks to no rank. Not thread-safe.
class BackwardPass {
 public:
  enum class Phase {
    Idle, ///< no pass that reduces was begun since the last one
    Armed, ///< a pass may begin without a mark: a forward pass asked for a reduction, and none has begun since
    Accumulating, ///< a reduction was asked for, but more passes come before it
    Reducing,
  };

  /// `accumulate`: passes per reduction. `state`: outlives this.
  BackwardPass(SharedState& state, int64_t accumulate)
      : state_(state), accumulate_(accumulate), ready_(state.now().trained.size(), false) {}

  [[nodiscard]] Phase phase() const noexcept {
    return phase_;
  }
  [[nodiscard]] bool reducing() const noexcept {
    return phase_ == Phase::Reducing;
  }

  /// Idle, and no parameter is ready.
  void reset() {
    phase_ = Phase::Idle;
    ready_.assign(ready_.size(), false);
  }
  /// A forward pass asks for a reduction: a gradient begins it, unless it comes in a backward pass through a graph of no_sync().
  void arm() noexcept {
    phase_ = Phase::Armed;
  }
  /// Only a mark begins a pass.
  void disarm() noexcept {
    phase_ = phase_ == Phase::Armed ? Phase::Idle : phase_;
  }
  /// A pass that only accumulates is over.
  void endAccumulating() noexcept {
    phase_ = phase_ == Phase::Accumulating ? Phase::Idle : phase_;
  }
  /// The first gradient of a pass has come that a forward pass asked to reduce: it is Reducing, or Accumulating if more come first.
  void begin() {
    phase_ = countPass() ? Phase::Reducing : Phase::Accumulating;
    if (!reducing()) {
      state_.change([](SharedValues& values) { values.has_local = true; });
    }
    if (reducing() && static_graph_ && !counting()) {
      awaited_ = times_;
    }
  }
  /// A pass of a rank without data: Reducing, or over at once if it only accumulates. It counts nothing as this rank's own.
  void beginShadow() {
    phase_ = countPass() ? Phase::Reducing : Phase::Idle;
  }
  /// Counts a pass. True if it is the one that reduces: it counts once it is committed.
  [[nodiscard]] bool countPass() {
    if (state_.now().accumulated + 1 < accumulate_) {
      state_.change([](SharedValues& values) {
        ++values.accumulated;
        ++values.passes;
      });
      return false;
    }
    state_.next().accumulated = 0;
    state_.next().has_local = false;
    ++state_.next().passes;
    return true;
  }

  /// Whether this gradient is the last that its parameter gets in this reducing pass.
  [[nodiscard]] bool completes(size_t param) {
    return reducing() && (!static_graph_ || awaited_[param] <= 1 || --awaited_[param] == 0);
  }
  /// False if the parameter was ready before.
  [[nodiscard]] bool markReady(size_t param) {
    const bool before = ready_[param];
    ready_[param] = true;
    return !before;
  }
  /// The trained parameters that are not ready.
  [[nodiscard]] std::vector<size_t> missing() const {
    return trainedIf([this](size_t param) { return !ready_[param]; });
  }

  /// The parameters that this pass's graph does not reach: they are ready without a gradient.
  void setUnreachable(std::vector<size_t> params) {
    unreachable_ = std::move(params);
  }
  [[nodiscard]] const std::vector<size_t>& unreachable() const noexcept {
    return unreachable_;
  }

  // static_graph=True: the graph is the same in every pass. So the first one counts how often each parameter's gradient comes, and completes
  // none. After it a parameter is ready when its gradient has come for the last time. SharedValues has whether the first pass is over.
  void setStaticGraph() {
    static_graph_ = true;
    times_.assign(ready_.size(), 0);
    state_.change([](SharedValues& values) { values.counting = true; });
  }
  [[nodiscard]] bool hasStaticGraph() const noexcept {
    return static_graph_;
  }
  [[nodiscard]] bool counting() const noexcept {
    return state_.next().counting;
  }
  void count(size_t param) {
    ++times_[param];
  }
  /// Another call of backward() begins: of the first pass, only its own gradients count.
  void forgetCounts() {
    if (counting()) {
      times_.assign(times_.size(), 0);
    }
  }
  /// Ends the counting. Trained parameters without a gradient are unreachable from now on.
  void endCounting() {
    state_.next().counting = false;
    if (!reducing()) { // nothing is committed after it
      state_.change([](SharedValues& values) { values.counting = false; });
    }
    unreachable_ = trainedIf([this](size_t param) { return times_[param] == 0; });
  }

 private:
  template <typename Condition>
  [[nodiscard]] std::vector<size_t> trainedIf(const Condition& condition) const {
    const std::vector<bool>& trained = state_.now().trained;
    std::vector<size_t> params;
    for (size_t param = 0; param < trained.size(); ++param) {
      if (trained[param] && condition(param)) {
        params.push_back(param);
      }
    }
    return params;
  }

  SharedState& state_;
  int64_t accumulate_;
  Phase phase_ = Phase::Idle;
  std::vector<bool> ready_; ///< by parameter
  std::vector<size_t> unreachable_;
  bool static_graph_ = false;
  std::vector<int> times_; ///< of a static graph, by parameter: its gradients per pass
  std::vector<int> awaited_; ///< likewise: those still to come in this pass
};

} // namespace pycomm
