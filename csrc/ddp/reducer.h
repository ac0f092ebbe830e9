#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/wait_point.h"
#include "ddp/backward_pass.h"
#include "ddp/bucket_pipeline.h"
#include "ddp/bucket_set.h"
#include "ddp/comm_hook.h"
#include "ddp/graph_hooks.h"
#include "ddp/leader_state.h"
#include "ddp/pass_failure.h"
#include "ddp/pass_lock.h"
#include "ddp/pass_weights.h"
#include "ddp/reducer_group.h"
#include "ddp/reducer_options.h"
#include "ddp/shared_state.h"
#include "ddp/step_agreement.h"
#include "ddp/steps.h"

namespace pycomm {

/// Averages gradients over a process group while backward runs. The methods are those that
/// torch.nn.parallel.DistributedDataParallel calls on its reducer.
///
/// A backward pass reduces if it goes through an output of a forward pass that asked for it, outside no_sync(). Marks on the graph tell
/// (ForwardMark), so forwards and backwards may come in any order. A loss may use a parameter beside the outputs: a gradient that comes before the
/// mark waits for it. A pass that goes through no marked output, since the module handed its loss out in another way, reduces if a forward pass
/// asked for it since the last one that did; if that one's outputs were marked, it begins with the end of the call.
///
/// One backward pass: a post hook packs each gradient into its bucket, and launches the buckets that are full (BucketPipeline). After
/// the last gradient a callback queued on autograd's engine waits for the buckets and writes the averages to .grad. Averages that have come
/// before are written when the next gradient comes: on the CPU, without a hook or a StepAgreement, if it is known which parameters ranks use.
/// If a call of backward() goes through several reducers, those that were made first end first.
///
/// Buckets are cut first in the reverse order of registration, and once more after the first reduction, in the order in
/// which gradients came to rank 0. Parameters that are frozen or unfrozen between passes leave or enter the buckets.
///
/// With a StepAgreement a step is a transaction: until all members have all sums, .grad is the local gradient, and nothing that the next step
/// reads has changed. If members are lost before that, the others pack and sum all of it again (reducer_elastic.cc). No collective of the
/// reducer is outside of a step then.
///
/// Thread-safe. While another thread works on the reducer, or the calling one does, in a signal handler or a hook, these methods
///
///     stats, lastStep, bucketNames, bucketNbytes, members, leads,     never wait, and are never refused: they give what the last turn
///     exponents, order, weighed, passes, isCounting                   has left (Shown). During a pass that reduces, exponents, order,
///                                                                     weights and counts are those from before it
///     askToLeave, hasLeft                                             never wait, and are never refused: see StepAgreement
///     residuals, usedHere                                             wait for the turn between passes; empty during a pass that
///                                                                     reduces, also in join(), and once it has failed
///     all others                                                      wait for the turn (PassLock), which a pass has while buckets are
///                                                                     launched and awaited; refused where it would never come
class Reducer final : public std::enable_shared_from_this<Reducer> {
 public:
  /// `params`: in the order of registration, the same on all ranks. Empty if torch's Python reducer does the work.
  /// `backend`: pycomm's in `group`, or null; needed if a parameter has a codec. Buckets lie in memory that its ranks share, if they can.
  /// `store`: for StateReports, or null.
  /// `agreement`: of this group, if options.elastic; else null. All parameters are on the CPU then, and gradients are no views of buckets.
  Reducer(
      std::vector<ReducedParam> params,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      ReducerOptions options,
      const c10::intrusive_ptr<c10d::Backend>& backend = {},
      c10::intrusive_ptr<c10d::Store> store = {},
      std::shared_ptr<StepAgreement> agreement = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Throws if the last backward pass did not complete: the error names the parameters without a gradient, or its failure.
  void prepareForForward();
  /// A forward pass of a wrapper, also without gradients, as a checkpoint runs it. Outside a call of backward() none is under way on this thread.
  static void ranForward();
  /// Marks the graph of a forward pass: whether backward passes through `outputs` reduce, and their weight.
  void markForward(const std::vector<at::Tensor>& outputs, bool reduces, double weight);
  /// The forward pass that was marked last asks for a reduction. Without a mark since the last call, the next backward pass reduces,
  /// whatever graph it goes through. `outputs`: of forward, used with find_unused_parameters only.
  void prepareForBackward(const std::vector<at::Tensor>& outputs);
  /// Cuts the buckets anew in the order in which the first reduction's gradients came to rank 0. Collective, once; true if it did.
  bool rebuildBuckets();

  /// The graph is the same in every pass: the first one shows how often each parameter's gradient comes.
  void setStaticGraph();
  /// The end of a static graph's first pass: torch's wrapper calls it when autograd's engine has nothing left to do.
  void delayAllReduce();
  /// Whether that has not come so far: the next pass is the first one.
  [[nodiscard]] bool isCounting();

  /// Throws unless a first hook may be registered: there is none, and no backward pass has begun.
  void checkHookMayBeSet();
  /// The first hook, or another one between two passes. Buckets then hold the parameters' own dtype. If a pass fails, so do the operations of the
  /// hook's group.
  void registerCommHook(CommHook hook);
  /// torch's hooks of C++: the average, as without a hook, and of buckets that travel as fp16. Throws as checkHookMayBeSet().
  void registerBuiltinHook(c10d::BuiltinCommHookType type);
  /// The end of the next backward pass waits for these, too.
  void installPostBackwardFutures(std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures);

  // Weights. All throw unless options().weighs.
  /// What the forward pass waits for is over: it begins to compute. See PassWeights::forwardBegan().
  [[nodiscard]] bool forwardBegan(std::optional<double> weight);
  /// It has raised.
  void forwardFailed();
  /// Whether a forward pass that begins now is a part of the backward pass under way, as a checkpoint repeats it: it changes neither weight nor time.
  [[nodiscard]] bool isWithinBackward();
  /// The weight of the next backward pass, whatever its forward pass says. Throws in the middle of one that reduces.
  /// None: the forward pass says it after all.
  void setWeight(std::optional<double> weight);
  /// The passes of a rank without a batch through which one backward() goes on the others: of weight 0, and averages are written as there.
  /// With each reducer, whether it reduces: see markForward(). They begin in this order.
  static void passWithoutBatch(const std::vector<std::pair<std::shared_ptr<Reducer>, bool>>& passes);
  /// The rows of the steps from `since` on: see PassWeights.
  [[nodiscard]] std::vector<PassWeights::Step> stepRows(int64_t since);
  /// See PassWeights::Saved::unsynced.
  void setWeightUnsynced(double weight);
  /// See PassWeights::Row::largest.
  void setLargest(int64_t largest);
  struct Weighed {
    PassWeights::Saved saved;
    std::optional<double> pending; ///< see PassWeights::pending()
    int64_t steps = 0; ///< on record
  };
  [[nodiscard]] Weighed weighed();

  // join(): ranks without data follow the others.
  /// `work`: sums a 1 of each rank that still has data. The next pass divides by the sum, unless the second argument is true.
  void setForwardPassWork(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial_world_size);
  /// Takes part in the others' reduction: with zeros, or with what passes have accumulated here since the last one. That is gone from .grad after
  /// it. `divide_by_initial_world_size`: as the others do; else they divide by those that still have data, and it is zeros always.
  void shadowBackward(bool divide_by_initial_world_size);

  // With a StepAgreement.
  /// After a forward pass that reduces: the module's buffers, which become rank 0's when its step is committed.
  void setBuffers(std::vector<at::Tensor> buffers);
  /// This rank in the present group, and StepAgreement::members().
  [[nodiscard]] std::pair<int, std::vector<int>> members();
  /// Whether this is rank 0, also if members() has one before it that died as the last step was committed.
  [[nodiscard]] bool leads();
  /// The sums of `values` over the members, as a transaction of its own: a member that dies meanwhile is left out. Collective over those who
  /// live, between two passes. (numel,) float64 on the CPU; with no values it only finds out that this rank still is a member. `about`: what
  /// they are, the same on all, or CollectiveMismatch. Throws what a step throws; after that the reducer has failed.
  [[nodiscard]] at::Tensor sumOfMembers(const at::Tensor& values, const std::string& about);
  /// Stops here for a process that joins, if all members have said at the end of the last step that one is reached, or if they are too few for a
  /// step. Collective then; throws what a step throws. Returns how many newcomers wait for the state of this rank, which gives it to them and
  /// calls this again; 0: the program may go on. Between the passes of a step it does not wait: no process gets the state there.
  [[nodiscard]] size_t awaitNewcomers();
  /// The program is at a place where all members call that: see StepAgreement::joinPoint(). Not between the passes of a step.
  void joinPoint();
  /// See StepAgreement::leave() and hasLeft(). Any thread, signal handler or hook, without the turn.
  void askToLeave() const;
  [[nodiscard]] bool hasLeft() const;

  /// Another collective of a forward pass, as of its buffers, was not the other ranks': a sentence if these reducers differ. The pass has
  /// failed.
  [[nodiscard]] std::optional<std::string> explainForward(const std::string& error);

  void removeAutogradHooks();
  void checkFinalized();
  /// Forgets an unfinished or failed pass, and all that ranks share: scales, order and counts are those of a new reducer, so that a
  /// newcomer can follow. Replaces buffers that a lost operation might still write.
  void resetState();
  void updateProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group);
  /// After updateProcessGroup(): a store of the new group's ranks, for this reducer alone. Throws its errors.
  void shareStore(c10::intrusive_ptr<c10d::Store> store);
  /// With find_unused_parameters: the parameters that passes since the last reduction have given a gradient here.
  [[nodiscard]] std::vector<std::string> usedHere();
  /// Passes since the beginning, which count in the checksum of each step: those of the members that this rank has joined.
  [[nodiscard]] int64_t passes();
  void followMembers(int64_t passes);
  /// The fp16 scale of each parameter that has one.
  [[nodiscard]] std::map<std::string, int> exponents();
  /// Names of all parameters in the order of buckets: the one agreed on; before that, once a first reduction is over, the one seen here.
  /// Empty before.
  [[nodiscard]] std::pair<std::vector<std::string>, bool> order();
  /// Copies of the float32 values that error feedback keeps on this rank, by parameter name. Empty during a backward pass that reduces,
  /// which writes them, and after one that has failed.
  [[nodiscard]] std::map<std::string, at::Tensor> residuals();
  /// What a checkpoint has of a reducer: values of the form of exponents() and so on.
  struct Saved {
    std::map<std::string, int> exponents;
    std::vector<std::string> order;
    bool agreed = false;
    int64_t accumulated = 0; ///< passes since the last reduction
    std::vector<std::string> used;
    std::map<std::string, at::Tensor> residuals;
    std::optional<PassWeights::Saved> weights; ///< if options().weighs
  };
  /// Continues from there, and cuts the buckets anew. Throws a ValueError if something in it is not of this model: then nothing is done.
  void load(Saved saved);
  /// Multiplies the residuals of this rank, as what the program does to the averages. Throws a ValueError unless `factor` is finite.
  void scaleResiduals(double factor);

  /// From the next forward pass on.
  void recordSteps(bool on);
  /// The last recorded step that has ended, or null.
  [[nodiscard]] std::shared_ptr<const StepTrace> lastStep();

  [[nodiscard]] ReducerStats stats();
  [[nodiscard]] const ReducerOptions& options() const noexcept {
    return options_;
  }
  [[nodiscard]] const std::vector<ReducedParam>& params() const noexcept {
    return params_;
  }
  /// Names of each bucket's parameters, buckets in launch order.
  [[nodiscard]] std::vector<std::vector<std::string>> bucketNames();
  /// Bytes of each bucket's gradients in their own dtype.
  [[nodiscard]] std::vector<size_t> bucketNbytes();
  [[nodiscard]] const c10::intrusive_ptr<c10d::ProcessGroup>& group() const noexcept {
    return group_.get();
  }

 private:
  /// `trained`: by parameter. If it throws, the hooks are those that were there before.
  void hookGradients(const std::vector<bool>& trained);
  /// If it throws, that is a failure: there are no buckets to go on with.
  void cutBuckets();
  /// The same in the middle of a pass, whose gradients are packed anew.
  void makeBuckets();
  /// The places of these names among the parameters. Throws a ValueError unless they are all of them, or none.
  [[nodiscard]] std::vector<size_t> placesOf(const std::vector<std::string>& names) const;
  /// Cuts the buckets anew if parameters were frozen or unfrozen.
  void followTrained();
  /// A pass that reduces begins: its operations carry a checksum of state_.
  void shareState();
  [[nodiscard]] const std::vector<bool>& trained() const noexcept {
    return state_.now().trained;
  }
  void resetStep();
  /// A forward pass has asked for a pass that reduces, or one begins.
  /// `marked`: only a call that goes through its marks begins it.
  void becomeDue(bool marked);
  /// It is over, or it only accumulates.
  void endDue() noexcept;
  /// The others through which the present call of backward() goes and whose averages other ranks await.
  [[nodiscard]] std::vector<std::shared_ptr<Reducer>> besides() const;
  /// The last forward pass of this wrapper that the present call of backward() goes through, entered or not; null: it goes through none. A call that
  /// repeats one may do so first, if the loss is in the checkpoint, too.
  [[nodiscard]] std::shared_ptr<const ForwardMark> forwardOfCall() const;
  /// See isWithinBackward().
  [[nodiscard]] bool withinBackward() const {
    return marks_.isWithinBackward() || forwardOfCall() != nullptr;
  }
  /// Of the pass that begins in the present call: in a nested one, where a checkpoint repeats its forward pass, it ends before others.
  [[nodiscard]] PassWeights::Ends ends() const;
  /// In the present call, if it goes through here: its pass reduces, and has not ended. Any thread.
  [[nodiscard]] bool isAwaited();

  void onEntry(ForwardMark& mark);
  void enter(ForwardMark& mark);
  void followCall();
  /// A forward pass that a call repeats arms the pass for that call, and those around it, alone.
  void dropRepeated();
  /// They are over. Throws if that pass has begun and lacks gradients, which no later call may give it.
  void endRepeated();
  void onComing(size_t index, const at::Tensor& grad);
  void onGradient(size_t index, bool defined);
  void takeGradient(size_t index, bool defined);
  [[nodiscard]] GradientCall callOf(size_t index) const;
  [[nodiscard]] bool beginsPass(size_t index) const;
  void queueUnmarked();
  void beginUnmarked();
  void beginPassWith(const std::vector<size_t>& before);
  void completeGradient(size_t index);
  void beginPass(PassWeights::Ends ends);
  void endCounting();
  void markReady(size_t index);
  [[nodiscard]] PassWeights& weights();
  [[nodiscard]] bool packWeighed();
  [[nodiscard]] bool launchWeighed();
  void giveUpWeightless();
  void pack(size_t index);
  void launchFull();
  [[nodiscard]] bool allCame() const;
  void queueFinish();
  static void finishCall();
  static void finishAll(std::vector<std::shared_ptr<Reducer>> reducers, int call);
  [[nodiscard]] bool beginWithoutBatch(bool reduces, bool alone);
  [[nodiscard]] std::optional<bool> finish(bool residuals_elsewhere);
  /// As many have it as there are reducers that keep residuals, and one.
  [[nodiscard]] static const std::shared_ptr<const char>& keepers();
  void checkNested();
  void forgetResiduals();
  std::optional<bool> endStep(bool residuals_elsewhere);
  void finishBuckets();
  void awaitFutures();
  [[nodiscard]] bool ordersBuckets() const;
  [[nodiscard]] bool isUsed(size_t index);
  void reduceShadow(bool rest);
  bool commit();

  // reducer_elastic.cc
  void beginStep();
  void launchFirst();
  void lose(const std::exception& error);
  void endEpoch();
  void adoptMembers();
  void waitToBegin(StepAgreement::Round round);
  [[nodiscard]] bool agree();
  void transact(const std::function<void()>& sum, const std::function<void()>& again, StepAgreement::Round round);
  [[nodiscard]] bool midway() const;
  [[nodiscard]] bool awaitNext();
  void abandonMembers() const;
  [[nodiscard]] bool sumAll();
  void redo();
  void writeAverages();

  void fail(const std::string& doing, const std::exception& error);
  /// What body() returns. Its error is the pass's failure: see fail(). `doing`: gives the clause.
  template <typename Doing, typename Body>
  auto orFail(const Doing& doing, const Body& body) {
    try {
      return body();
    } catch (const std::exception& error) {
      if constexpr (std::is_invocable_v<Doing>) {
        fail(doing(), error);
      } else {
        fail(doing, error);
      }
      throw;
    }
  }
  /// Ends the operations of the present group and of the hook's, of which this rank takes no part any more. `what`: see ReducerGroup::abort().
  [[nodiscard]] std::function<void()> cut(const std::string& what) const;
  [[nodiscard]] std::optional<std::string> difference();
  void throwIfUnfinished() const;
  void requireNoHook() const;

  /// The turn. At its end readers see what it has changed.
  class Turn {
   public:
    explicit Turn(Reducer& reducer) : Turn(reducer, std::unique_lock(reducer.mutex_)) {}
    Turn(Reducer& reducer, std::unique_lock<PassLock> lock) : reducer_(reducer), lock_(std::move(lock)) {}
    ~Turn() {
      if (owned()) {
        reducer_.show();
      }
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    [[nodiscard]] bool owned() const noexcept {
      return lock_.owns_lock();
    }

   private:
    Reducer& reducer_;
    std::unique_lock<PassLock> lock_;
  };

  /// What readers see, who need no turn.
  struct Shown {
    ReducerStats stats;
    std::shared_ptr<const StepTrace> last_step;
    std::vector<std::vector<std::string>> bucket_names;
    std::vector<size_t> bucket_nbytes;
    SharedValues values{std::vector<bool>{}};
    int rank = 0;
    bool leads = false; ///< rank 0 of the newest members
    std::vector<int> members; ///< with a StepAgreement
    std::vector<size_t> seen; ///< GradientOrder::seen(), if an order is to be agreed on
    Weighed weighed; ///< with weights, from before the pass that reduces, if there is one
  };
  void show() noexcept; ///< with the turn
  void showBuckets(); ///< likewise
  [[nodiscard]] std::unique_lock<PassLock> turnBetweenPasses();
  [[nodiscard]] std::unique_lock<PassLock> turnUnlessReducing();

  const uint64_t number_; ///< of the reducers of this process, as they were made
  PassLock mutex_; ///< guards everything below except params_, of which only a hook's wire dtype ever changes
  std::vector<ReducedParam> params_;
  ReducerGroup group_;
  GroupUse use_; ///< of group_; with a StepAgreement nobody else has it
  ReducerOptions options_;
  CommHook hook_;
  bool has_builtin_hook_ = false;

  SharedState state_; ///< this and stats_: before those that borrow them
  ReducerStats stats_;
  StateReports reports_;
  GradientOrder order_;
  BucketSet buckets_;
  StepRecorder recorder_;
  std::unique_ptr<BucketPipeline> pipeline_; ///< of the present buckets; borrows those above

  BackwardPass pass_;
  PassMarks marks_;
  std::shared_ptr<ForwardMark> last_forward_; ///< between markForward() and prepareForBackward()
  bool armed_by_mark_ = false; ///< all forward passes outside no_sync() since the last pass have a marked graph
  int asked_in_ =
      -1; ///< autograd's number of the call in which a forward pass has asked for the pass, as a checkpoint repeats it; -1: in none
  BackwardCall
      armed_in_; ///< the call in which a repeated forward pass has armed the pass; forgotten: it was one outside any
  bool asked_before_ = false; ///< by then another one had asked, whose mark begins its pass
  PassFailure failure_;
  std::optional<UsedParams> used_; ///< with find_unused_parameters or a static graph
  std::optional<PassWeights> weights_; ///< if ranks are weighed
  std::atomic<int> over_in_ = -1; ///< autograd's number of the call in which the last pass ended, or only accumulated
  std::shared_ptr<const char> keeper_; ///< keepers(), if residuals are kept here
  int queued_unmarked_ = -1; ///< autograd's number of the call at whose end beginUnmarked() is due
  c10::intrusive_ptr<c10d::Work> join_work_;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> post_backward_;

  const std::shared_ptr<StepAgreement> agreement_; ///< null: the first failure is final
  LeaderState leader_;
  std::vector<int> members_;
  int rank_ = 0; ///< among members_
  bool must_adopt_ = false; ///< the group has other members than the buckets, until the next step begins
  bool follows_leaver_ =
      false; ///< a rank has left in order with the last step: if it led, it still does, until the next round
  bool ever_changed_ = false; ///< since the training began, also before this rank joined it
  std::exception_ptr lost_; ///< with a StepAgreement: why the sums of the step under way will not come, if so

  SharedValues::Parts parts_{}; ///< of state_ when the last pass that reduced began
  int64_t failures_ = 0; ///< that reports_ knows

  LeafMutex shown_mutex_; ///< guards shown_; held while it is copied
  Shown shown_;
  uint64_t shown_version_ = 0; ///< of state_, in shown_
  std::unique_ptr<GradHooks> grad_hooks_; ///< null once removed. Last, so that it goes first: its hooks hold `this`
};

} // namespace pycomm
