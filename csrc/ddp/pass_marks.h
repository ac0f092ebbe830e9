#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <unordered_set>
#include <vector>

#include "ddp/graph_marks.h"

namespace pycomm {

/// Which marked graphs the present backward call goes through, so whether its gradients are reduced.
///
///     enterReducing() or enterLocal() by the graph's hooks -> begin() by the first gradient
///
/// The order may be the other way round: a loss of two forward passes gives a parameter that only the later one used its gradient before the
/// earlier one's outputs are reached. So gradients of a call that does not reduce yet are noted.
///
/// Not thread-safe, but it may be asked from several threads in turn.
class PassMarks {
 public:
  explicit PassMarks(const std::vector<at::Tensor>& params);

  /// A forward pass of the module has ended: no call that it is not a part of is under way, whatever an exception left.
  void forward();
  /// The call goes through a forward pass of no_sync(). True if it went through none before.
  bool enterLocal();
  /// The call goes through a forward pass that reduces. `begun`: its pass has begun already, without a mark.
  void enterReducing(bool begun);
  /// Whether enterReducing() came in this call.
  [[nodiscard]] bool reduces() const noexcept {
    return call_.running();
  }
  /// Whether enterLocal() came in this call.
  [[nodiscard]] bool isLocal() const noexcept {
    return local_call_.running();
  }
  /// Whether the last pass began in this call.
  [[nodiscard]] bool beganHere() const;

  /// The call reduces, and its pass has not begun.
  [[nodiscard]] bool pending() const noexcept {
    return call_.running() && !begun_;
  }
  /// Whether a pass may begin without a mark: the call goes through no graph of no_sync(), nor of another wrapper of this parameter.
  [[nodiscard]] bool mayBeginUnmarked(const at::Tensor& param) const;
  /// `any`: the next pass begins whatever graph it goes through.
  void expectAnyGraph(bool any) noexcept {
    any_graph_ = any;
  }
  [[nodiscard]] bool expectsAnyGraph() const noexcept {
    return any_graph_;
  }
  void begin();
  /// The call in which the last marked pass began is over.
  [[nodiscard]] bool cutOff() const noexcept {
    return begun_ && !call_.running();
  }

  /// A gradient came that is not reduced so far.
  void note(size_t param);
  /// The gradients that this call gave before its pass began.
  [[nodiscard]] std::vector<size_t> takeNoted();

 private:
  using Params = std::unordered_set<const c10::TensorImpl*>;

  void tellOthers(const BackwardCall& call) const;

  std::shared_ptr<const Params> params_;
  BackwardCall call_; ///< that reduces
  BackwardCall local_call_; ///< through a graph of no_sync()
  bool begun_ = false; ///< the pass of call_
  bool any_graph_ = false;
  int began_in_ = kNoCall; ///< autograd's number of the call in which the last pass began
  int noted_in_ = kNoCall; ///< likewise: noted_
  std::vector<size_t> noted_;

  static constexpr int kNoCall = -1;
};

} // namespace pycomm
