#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/job_ranks.h"
#include "base/wait_clock.h"
#include "ddp/graph_hooks.h"
#include "ddp/reducer_options.h"
#include "ddp/shared_state.h"

namespace pycomm {

/// The weight that the program has set for a forward pass: for the one before it, or for those after it until a pass has counted.
struct SaidWeight {
  double weight = 0;
  int64_t after = 0; ///< as many forward passes came before it
  bool taken = false; ///< by a forward pass after it
  int64_t counted_for = 0; ///< the forward pass through which a backward pass has counted by it; 0: none has
};

/// How much each rank's gradients count, where ranks do not count alike: by a weight of each pass, such as the number of its samples.
///
/// Over all ranks r and the k passes i since the last reduction the average is
///
///     k * sum(w_ri * g_ri) / sum(w_ri)
///
/// so equal weights give what no weights give: averages over ranks, added up over passes. A rank packs its .grad times
///
///     ratio = N * k * unit / W        W = sum(w_ri),  .grad = sum(w_ri * g_ri) / unit
///
/// in place of 1, and everything behind that, wires and residuals included, is as without weights. `unit` is the weight of the rank's last pass,
/// so that nothing is multiplied while it stays the same. A pass that weighs less keeps the unit before it with fp16 parameters, and if it weighs
/// less than a millionth of the sum: .grad in a small unit would leave the range of its dtype. A rank without weight packs zeros, whatever its
/// gradients hold.
///
/// zero_grad() between passes forgets them: this shows as no parameter of the sum having a .grad. So that it shows after passes without weight,
/// too, these leave zeros in place of no .grad, which are gone before a reduction. Forgotten passes still count as batches that were trained,
/// which a sampler follows: Accumulated::batches.
///
/// A step's compute time is that of its passes, from the begin of the first forward pass to the last gradient, and of what the program does between them: the
/// optimizer, and waiting for the next batch. Waits for other ranks are left out of both (WaitClock). What lies between passes is the median of
/// the last steps, so that a validation or a checkpoint now and then does not count.
///
/// W comes from one small all-reduce, in which each rank writes a row of its own. The first gradient of a pass that reduces launches it;
/// launching buckets waits for it, while backward goes on. The thread of backward runs it: each gradient looks whether it has ended.
///
///     [set()] -> marked() by forward -> enter() by the graph -> begin() by the first gradient -> came() by each
///             -> and in a pass that reduces: launch() -> ended() -> await() -> commit()
///
/// A loss may use a parameter beside the outputs of forward, and give its gradient before its graph is entered, whose weight nobody knows yet.
/// So coming() keeps what .grad was, enter() takes such early gradients out of it again, and begin() puts them back, as the first of the pass.
///
/// Not thread-safe; the reducer's turn (PassLock) guards it.
class PassWeights {
 public:
  /// When a pass ends that may be one of several in a call of backward().
  enum class Ends : int64_t {
    InTurn, ///< in the order in which the wrappers were made
    Before, ///< in a nested call, before that of a wrapper which was made earlier
    WithoutBatch, ///< in that order, and the other ranks' need not
  };
  /// What one rank said as a step began.
  struct Row {
    double weight = 0; ///< of its passes since the reduction before
    int64_t passes = 0; ///< how many
    int64_t last_compute_ns = kUnknown; ///< how long the step before took, without waiting for other ranks
    int64_t batches = 0; ///< as `passes`, with those that were forgotten
    int64_t largest = 0; ///< the largest share that its sampler allows; 0: any
    Ends ends = Ends::InTurn;
  };
  static constexpr int64_t kUnknown = -1;
  struct Step {
    int64_t index = 0; ///< from 0
    std::vector<Row> rows; ///< by rank of the group
    std::vector<int> members; ///< by rank as well: StepAgreement::members(); empty without one
  };

  /// `params`, `state`: outlive this.
  PassWeights(const std::vector<ReducedParam>& params, const SharedState& state);

  /// The weight of the last forward pass, or of the next one if no other is set before a backward pass. None: as if nothing had been set.
  /// 0, or from 1e-20 to 1e20, so that no sum overflows or loses a pass.
  void set(std::optional<double> weight);
  /// What set() has said and no pass has counted yet.
  [[nodiscard]] std::optional<double> pending() const noexcept {
    return set_ == nullptr ? std::nullopt : std::optional(set_->weight);
  }
  /// The program has ended its own work between two passes.
  void gapEnds() noexcept;
  /// A forward pass of this weight begins to compute; none: no_batch() stands for it. True if readers of steps() must look: so many steps have
  /// ended since it last was that some are dropped soon, or the ranks have used up different numbers of batches in the last one.
  [[nodiscard]] bool forwardBegan(std::optional<double> weight) noexcept;
  /// It has raised: the one before it is the last.
  void forwardFailed() noexcept;
  /// A forward pass is over.
  void marked(ForwardMark& mark);
  /// A gradient will be added to .grad, in a call of backward() that is no pass so far. Cost: a copy of .grad, which lives until the next call
  /// or forward pass.
  void coming(size_t param, const at::Tensor& grad, GradientCall call);
  /// It has been added, and the program's hooks have had it.
  void added(size_t param);
  /// Whether coming() was called in this call of backward(), and begin() was not.
  [[nodiscard]] bool hasEarly() const noexcept {
    return !early_.empty();
  }
  /// What coming() has kept is of a call that is over.
  void dropEarly() noexcept {
    early_.clear();
  }
  /// A backward pass goes through the graph of this forward pass: what .grad held before it is brought to its unit.
  /// If the call has early gradients, begin() follows at once.
  void enter(ForwardMark& mark);
  /// The pass goes through this forward pass, too.
  void alsoEnters(const ForwardMark& mark) noexcept;
  /// As enter(), of a rank without a batch: the pass has no weight, no forward pass and no gradients, and takes no time.
  void enterWithoutBatch();
  /// The weight of a backward pass through its graph. Throws if what was set for it has counted for another forward pass.
  [[nodiscard]] double takeWeight(ForwardMark& mark);
  /// The backward pass that came through enter() is over: a pass that begins now is another one.
  void endEntered() noexcept {
    entered_.reset();
  }
  /// Whether enter() came and begin() did not.
  [[nodiscard]] bool entered() const noexcept {
    return entered_.has_value() && !entered_->begun;
  }
  /// After begin(): whether this rank's passes since the reduction before have any weight.
  [[nodiscard]] bool counts() const noexcept {
    return sum_.weight != 0.0;
  }
  /// The first gradient of a pass has come. If no graph was entered, it has the weight of the last forward pass. `reduces`: the averages follow, also if it comes again in the pass.
  /// Throws if gradients that are accumulated have another weight then.
  void begin(bool reduces);
  /// A gradient of this pass has come. Without weight .grad is again what it was before.
  void came(size_t param);
  /// Whether passes without weight have left zeros in .grad, which a reduction takes back. zero_grad() has not, then.
  [[nodiscard]] bool leftZeros(size_t param) const {
    return !sum_.holds.empty() && sum_.holds[param] == Holds::Zeros;
  }
  /// A forward pass in no_sync() has outputs that cannot be marked.
  void cannotFollow() noexcept {
    sum_.cannot_follow = true;
  }
  /// A gradient of a backward pass through no marked graph. It counts with the weight of the last pass that had some, else with that of the
  /// next one, as that of a penalty does. No pass may follow if a forward pass in no_sync() may have made it. If one is under way, its own pass has
  /// to be the next one, and to weigh .grad by what it weighs itself.
  void stray(size_t param);

  /// Whether the pass under way has no weight, so that a gradient from within its forward pass has none either, and is in .grad, where it stays
  /// unless averages are written over it.
  [[nodiscard]] bool leavesStray() const;
  /// Of the pass that has begun; else Ends::InTurn.
  void setEnds(Ends ends) noexcept {
    ends_ = ends;
  }
  /// Sends this rank's row. `device`: where the group reduces. `wrapper`: a number that this wrapper has on all ranks, so that of two wrappers
  /// of a group one's row is not the other's.
  void launch(c10d::ProcessGroup& group, c10::Device device, int64_t wrapper);
  /// Whether packing waits for the other ranks' rows; and if no rank has any weight, so that it never begins.
  [[nodiscard]] bool awaited() const noexcept {
    return work_ != nullptr || weightless_;
  }
  /// Whether await() would neither wait nor throw for the network's sake. Also lets the operation go on.
  [[nodiscard]] bool ended() const;
  /// Waits for the rows, and returns the ratio; nothing if no rank has any weight. Throws the operation's error, and one of its own if ranks
  /// have different numbers of passes, or end this one and another wrapper's in different orders.
  [[nodiscard]] std::optional<double> await(const JobRanks& job);
  /// The step is over, also if no rank has any weight: it is on record. `members`: see Step.
  void commit(std::vector<int> members);
  /// Forgets the passes since the last reduction, what was set and the times. Steps on record stay, and what Row::largest and Saved::unsynced are.
  void reset();

  [[nodiscard]] int64_t takeWaitedNs() noexcept {
    return std::exchange(waited_ns_, 0);
  }
  /// How many steps are on record.
  [[nodiscard]] int64_t stepCount() const noexcept {
    return step_count_;
  }
  /// The steps from `since` on, as far as they are kept: the last kStepsKept.
  [[nodiscard]] std::vector<Step> steps(int64_t since) const;
  /// See Row::largest.
  void setLargest(int64_t largest) noexcept {
    largest_ = largest;
  }

  /// See Saved::unsynced.
  void setUnsynced(double weight) noexcept {
    unsynced_ = weight;
  }

  // Of the passes since the last reduction: part of a checkpoint, with what is known of the backward passes without a mark.
  enum class Holds : uint8_t {
    Other, ///< .grad is none, or the program's: no pass has given this parameter a gradient
    Sum, ///< .grad is in `unit`
    Zeros, ///< the same, and it was none before passes without weight
  };
  struct Accumulated {
    double weight = 0;
    double unit = 0;
    int64_t passes = 0;
    bool alike = true; ///< all have the weight `unit`
    std::vector<Holds> holds; ///< by parameter; empty before the first pass
    int64_t batches = 0; ///< as `passes`, with those that were forgotten
    int64_t compute_ns = 0; ///< of these
    int64_t gap_ns = 0; ///< between these, and before the first one
    bool cannot_follow = false;
    bool stray = false; ///< a gradient came of which nobody knows the weight
    int64_t stray_in =
        0; ///< one came within this forward pass, whose weight the next pass shall have; 0: none did. A checkpoint has it as `stray`
  };
  [[nodiscard]] int64_t passes() const noexcept {
    return sum_.passes;
  }
  /// What a checkpoint has of it.
  struct Saved {
    Accumulated sum;
    int64_t last_compute_ns = kUnknown; ///< how long the last step took here
    double unsynced = 0; ///< the weights of all passes that were reduced since parameters were averaged last
  };
  [[nodiscard]] Saved saved() const;
  /// The weight that the program has set for the next pass is forgotten.
  void load(Saved saved) noexcept;

 private:
  struct Entered {
    double weight = 0;
    std::shared_ptr<SaidWeight> said;
    int64_t forward = 0;
    bool marked = true;
    bool begun = false; ///< begin() came
    WaitClock::Instant began; ///< the earliest of its forward passes
  };
  /// A gradient of a call of backward() that had entered no graph.
  struct Early {
    size_t param;
    at::Tensor before; ///< .grad without it
    at::Tensor grad;
    GradientCall call;
    const c10::TensorImpl* into; ///< .grad as it was, for comparison only
    int64_t version; ///< likewise
  };

  void endPass() noexcept;
  void clear();
  [[nodiscard]] bool trains(size_t param) const {
    return state_.now().trained[param];
  }
  [[nodiscard]] bool forgotten() const;
  void forget();
  void enter(Entered entered);
  void withdrawEarly();
  void giveBackEarly();
  void keepGradients();
  void changeUnit(double unit);
  void takeScaled(at::Tensor& grad, at::Tensor& before) const;
  void leaveZeros();
  void takeZerosBack();

  static constexpr size_t kStepsKept = 4096;
  static constexpr size_t kGapsKept = 5;

  const std::vector<ReducedParam>& params_;
  const SharedState& state_;
  bool narrow_; ///< some are fp16
  std::shared_ptr<SaidWeight> set_; ///< null: nothing is
  int64_t forwards_ = 0;
  double forward_weight_ = 1.0; ///< of the last one that has begun
  double weight_before_ = 1.0; ///< forward_weight_ as that one began
  bool in_forward_ = false; ///< it has not ended
  std::optional<Entered> entered_; ///< the pass that will begin, or that has
  std::vector<Early> early_; ///< of the present call
  Accumulated sum_; ///< since the last reduction, the pass under way included
  double unsynced_ = 0;
  bool drops_ = false; ///< the pass under way has no weight
  bool drops_stray_ = false; ///< and a gradient came within its forward pass
  Ends ends_ = Ends::InTurn; ///< of the pass under way
  double scale_ = 1.0; ///< of the gradients of the pass under way in .grad: its weight by the unit, if that is larger
  std::vector<at::Tensor> kept_; ///< by parameter: .grad from before a pass without weight, or with a share

  at::Tensor rows_; ///< int64: each rank's Row, as bits
  c10::intrusive_ptr<c10d::Work> work_; ///< null unless rows_ is reduced now
  bool weightless_ = false; ///< all ranks are, in the pass under way
  int64_t waited_ns_ = 0;

  WaitClock::Instant forward_began_; ///< the last one
  WaitClock::Instant pass_began_; ///< its forward pass did; none between passes
  WaitClock::Instant last_gradient_;
  int64_t passed_ns_ = 0; ///< last_gradient_ of the pass before
  WaitClock::Instant gap_began_; ///< none in a pass, and before the first one
  std::deque<int64_t> gaps_ns_; ///< of the last steps, at most kGapsKept
  int64_t last_compute_ns_ = kUnknown; ///< of the step before
  int64_t largest_ = 0;
  Step step_; ///< the one under way, once its rows are known
  std::deque<Step> steps_;
  int64_t shown_steps_ = 0; ///< step_count_ when forwardBegan() last returned true
  int64_t step_count_ = 0;
};

} // namespace pycomm
