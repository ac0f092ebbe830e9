#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/wait_clock.h"
#include "c10d/torch_compat.h"
#include "ddp/reducer_options.h"

namespace pycomm {

// The reducer's hooks on autograd's graph, and what they tell: which gradient has come, and which forward passes a call of backward() goes through.

/// Calls back when autograd has accumulated a parameter's gradient, and finds parameters that a graph does not reach.
///
/// Each leaf has one gradient accumulator, a graph node that autograd itself holds only weakly. This object keeps
/// them alive; otherwise the hooks would vanish with the first graph.
class GradHooks {
 public:
  /// Called with the parameter's index on the thread that runs backward, without the GIL. It may throw: the error comes
  /// out of backward(). `defined`: false for a parameter that does not matter to the loss, though its graph leads there.
  using OnGradient = std::function<void(size_t index, bool defined)>;
  /// Likewise, before autograd accumulates `grad`, which is defined.
  using OnComing = std::function<void(size_t index, const at::Tensor& grad)>;

  /// `hooked`: by parameter, whether it gets a hook. `on_coming`: may be empty. If it throws, no hook is left.
  GradHooks(
      const std::vector<ReducedParam>& params,
      const std::vector<bool>& hooked,
      const OnGradient& on_gradient,
      const OnComing& on_coming = {});
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;
  ~GradHooks();

  /// Whether the hooks are on the accumulators that autograd uses: it makes new ones for parameters whose `data` was of another
  /// dtype or device in between.
  /// Cost: a comparison of pointers for each parameter.
  [[nodiscard]] bool reach() const;

  /// Indices of hooked parameters that no path from `outputs` leads to, ascending. Cost: one visit to each node of the graph.
  [[nodiscard]] std::vector<size_t> unreachableFrom(const std::vector<at::Tensor>& outputs) const;

 private:
  void addHook(const at::Tensor& param, size_t index, const OnGradient& on_gradient, const OnComing& on_coming);
  void remove();

  struct Hooked {
    size_t index; ///< of the parameter
    at::Tensor param;
    NodePtr accumulator;
    uintptr_t key; ///< what del_post_hook() takes
    const torch::autograd::FunctionPreHook* coming; ///< null: it has none. The accumulator owns it
  };
  std::vector<Hooked> hooked_;
};

/// One call of backward(), followed by a hook that runs in it. Calls nested in it, as those of reentrant checkpoints, are part of it.
///
/// autograd runs the callbacks queued on a call when its last gradient has come, and destroys them with the call, also after an exception.
/// So a queued callback tells when the call is over. Not their destruction alone, as a thread may keep the call's state for a while: a
/// device's worker, or the thread that is in a later callback of it. After an exception it is that alone, so the owner of this forgets
/// the call with the next forward pass.
class BackwardCall {
 public:
  /// Only in a hook: follows the call that runs it.
  void follow();
  void forget() noexcept {
    *this = {};
  }
  [[nodiscard]] bool running() const noexcept {
    const auto over = over_.lock();
    return over != nullptr && !over->load(std::memory_order_acquire);
  }
  /// The same, or it is over and its callbacks run, of which some are behind the one that this has queued.
  [[nodiscard]] bool present() const noexcept;
  /// autograd's, as long as follow() was not followed by forget(). The later a call begins, the larger its number.
  [[nodiscard]] int number() const noexcept {
    return number_;
  }
  static constexpr int kNone = -1; ///< the number that autograd gives outside any call
  /// Whether the call is over, and was nested in another one.
  [[nodiscard]] bool endedWithin() const noexcept {
    return within_ != nullptr && within_->load(std::memory_order_acquire);
  }
  /// Whether both follow one call, which may be over.
  [[nodiscard]] bool sameAs(const BackwardCall& other) const noexcept {
    return within_ != nullptr && within_ == other.within_;
  }

 private:
  std::weak_ptr<const std::atomic<bool>> over_; ///< the queued callback has it
  std::shared_ptr<const std::atomic<bool>> within_;
  int number_ = kNone;
};

/// The call of backward() that gave a gradient whose pass has not begun.
struct GradientCall {
  int number; ///< autograd's, of the innermost call. One that is nested in another call has a larger number
  bool may_begin; ///< its pass may begin without a mark
  bool in_another; ///< it goes through a forward pass of another wrapper of the parameter
  bool armed =
      false; ///< a forward pass had asked for a pass. Else one in the call may have, as a checkpoint repeats one of no_sync()

  /// Whether a pass that begins now has that gradient. Not that of a nested call of another wrapper, nor, unless a pass may begin with it, that
  /// of a call around this one, which adds to .grad only.
  [[nodiscard]] bool isOfPresent() const;
};

class Reducer;
struct SaidWeight;

/// What the graph of one forward pass tells the backward passes that go through it.
struct ForwardMark {
  bool reduces = true; ///< false: the forward pass was in no_sync()
  double weight = 1.0; ///< as the batch was counted: see PassWeights
  std::shared_ptr<SaidWeight> said; ///< what counts in its place, if the program has said something
  int64_t number = 0; ///< of the forward passes of one PassWeights, from 1
  WaitClock::Instant began; ///< when it began to compute, if PassWeights follows it
  std::vector<size_t> unreachable; ///< the parameters that no path from its outputs leads to, if that was asked
  std::weak_ptr<Reducer> reducer; ///< whose it is
  /// A call of backward that goes through another forward pass of the wrapper has made it. Only a reentrant checkpoint goes through what it
  /// repeats.
  bool repeated = false;
};

/// Calls `on_entry` whenever a backward pass goes through one of these outputs, before any gradient behind it. Outputs without a graph are
/// left out. An output that is a view may be replaced in the graph by a write in place, so the tensor below it counts, too.
/// False if none has a graph. So do losses of derivatives of the output, with create_graph=True.
///
/// Nothing is copied. A node is added to derivatives only.
bool markGraph(
    const std::vector<at::Tensor>& outputs,
    const std::shared_ptr<const ForwardMark>& mark,
    const std::function<void()>& on_entry);

// The graph of the present call of backward(), without those of calls nested in it or around it.
/// The forward passes whose marks it has, entered or not.
[[nodiscard]] std::vector<std::shared_ptr<const ForwardMark>> marksOfCall();
/// Whether it leads to one of these parameters.
[[nodiscard]] bool callReaches(const std::vector<ReducedParam>& params);

/// Throws: compiled autograd calls no hook of the reducer.
[[noreturn]] void raiseCompiledAutograd();

/// How a wrapper takes part in a backward call.
enum class CallKind : uint8_t {
  Local, ///< through a graph of no_sync() only
  Began, ///< it has begun its pass there, without a mark
  Marked, ///< through a marked graph, which reduces
};

/// What other wrappers of a parameter may know of one.
struct MarkedWrapper {
  std::unordered_set<const c10::TensorImpl*> params;
  uint64_t made = 0; ///< this and `asked`: in the order of all wrappers
  uint64_t asked = 0; ///< when a forward pass asked for the pass that is due or under way; 0: none is
  bool marked = false; ///< and all forward passes that ask have marked outputs, so that a mark begins it
};

/// Which marked graphs the present backward call goes through, so whether its gradients are reduced.
///
///     enterReducing() or enterLocal() by the graph's hooks -> begin() by the first gradient
///
/// The order may be the other way round: a loss of two forward passes gives a parameter that only the later one used its gradient before the
/// earlier one's outputs are reached. So gradients of a call that does not reduce yet are noted.
///
/// A call nested in another one is a part of it. If the outer one is unknown until the nested one has ended, it goes on with what that noted.
///
/// Not thread-safe, but it may be asked from several threads in turn.
class PassMarks {
 public:
  explicit PassMarks(const std::vector<at::Tensor>& params);

  /// A forward pass of the module has ended: no call that it is not a part of is under way, whatever an exception left. False if it is a part
  /// of one, as a checkpoint runs it.
  bool forward();
  /// In each hook, first. True if it is the first one of its outermost call.
  bool follow();
  /// autograd's number of the outermost call that is known.
  [[nodiscard]] int call() const;
  /// Between calls: the last one that is known was nested, and the one around it has not taken what it noted.
  [[nodiscard]] bool leftNested() const;
  /// As the last call that is known ends: whether it was nested.
  [[nodiscard]] bool endedWithin() const noexcept {
    return outermost_.endedWithin();
  }
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
  /// Whether the last pass began in this call, with a mark or without, and has not ended.
  [[nodiscard]] bool beganHere() const noexcept {
    return began_.sameAs(outermost_);
  }
  /// Whether a mark began the last pass.
  [[nodiscard]] bool beganWithMark() const noexcept {
    return begun_;
  }
  /// Whether a pass ended in a call that was nested in this one.
  [[nodiscard]] bool endedNested() const;
  /// Whether a forward pass that comes now repeats one whose pass this call reduces, as a checkpoint with use_reentrant=False does.
  [[nodiscard]] bool repeatsForward() const;
  /// Whether one that comes now is a part of this call's pass, whose weight is known and whose time has begun.
  [[nodiscard]] bool isWithinBackward() const;
  /// Whether another wrapper of this parameter has asked for a pass, too: the end of the call shows whose it is.
  [[nodiscard]] bool isContested(const at::Tensor& param) const;
  /// Whether a pass may begin without a mark: the call goes through no graph of no_sync(), nor of another wrapper of this parameter.
  [[nodiscard]] bool mayBeginUnmarked(const at::Tensor& param) const;
  /// Whether this call is a pass: it goes through a marked graph, or began one without.
  [[nodiscard]] bool inPass() const {
    return reduces() || isLocal() || beganHere();
  }

  /// The call reduces, and its pass has not begun.
  [[nodiscard]] bool pending() const noexcept {
    return call_.running() && !begun_;
  }
  /// Of a gradient that comes now. `armed`: a forward pass has asked for a pass.
  [[nodiscard]] GradientCall callOf(const at::Tensor& param, bool armed) const;
  /// Whether this call reduces, or has begun a pass without a mark, and so does another wrapper of this parameter.
  [[nodiscard]] bool reducesTwice(const at::Tensor& param) const;
  /// Whether another wrapper of this parameter reduces in this call, through a marked graph or in a pass that it began without one.
  [[nodiscard]] bool isReducedByAnother(const at::Tensor& param) const;
  /// A forward pass asks for another pass. `any`: it begins whatever graph it goes through. `marked`: see MarkedWrapper.
  void expect(bool any, bool marked);
  /// A forward pass asks for a pass that is due or under way.
  [[nodiscard]] bool asks() const;
  /// No forward pass asks any more: the pass has ended, or later calls are none of it.
  void disarm();
  [[nodiscard]] bool expectsAnyGraph() const noexcept {
    return any_graph_;
  }
  void begin();
  /// A gradient of this parameter is of another wrapper's pass: an exception has cut off the one that is reduced here.
  [[nodiscard]] bool cutOff(const at::Tensor& param) const;
  /// The pass has been reduced, or no rank had any weight in it.
  void end();

  /// A gradient came that is not reduced so far, and may be of a pass that begins in this call.
  void note(size_t param, GradientCall call);
  /// The gradients that this call gave before its pass began. `armed`: only those.
  [[nodiscard]] std::vector<size_t> takeNoted(bool armed = false);
  /// Whether a call around this one has given the parameter a gradient, which no pass has taken.
  [[nodiscard]] bool notedAround(size_t param) const;

 private:
  void tellOthers() const;
  /// Whether this call goes through a forward pass of another wrapper of this parameter. `least`: as one of these kinds at least.
  [[nodiscard]] bool isInAnother(const at::Tensor& param, CallKind least) const;
  [[nodiscard]] bool anyOther(const at::Tensor& param, const std::function<bool(const MarkedWrapper&)>& is) const;
  /// Whether a pass without a mark is of another wrapper of this parameter. One that was made since this one asked, as after an error, has all
  /// passes. Else it is the last one that asked and has outputs without marks, or the last one that asked.
  [[nodiscard]] bool isOfOther(const at::Tensor& param) const;

  std::shared_ptr<MarkedWrapper> wrapper_;
  bool listed_ = false; ///< others can find it
  BackwardCall outermost_; ///< as far as it is known
  BackwardCall call_; ///< that reduces
  BackwardCall local_call_; ///< through a graph of no_sync()
  bool begun_ = false; ///< the pass of call_
  bool any_graph_ = false;
  BackwardCall began_; ///< outermost_ when the last pass began, if that is not over
  int ended_in_ = BackwardCall::kNone; ///< autograd's number of the innermost call in which the last pass ended
  struct Noted {
    size_t param;
    GradientCall call;
  };
  std::vector<Noted> noted_; ///< in the last call that is known
};

} // namespace pycomm
