#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/wait_point.h"
#include "c10d/call_memory.h"
#include "c10d/dtypes.h"
#include "c10d/message_work.h"
#include "c10d/raising.h"
#include "c10d/staging.h"
#include "c10d/work.h"
#include "engine/group.h"
#include "engine/join_abort.h"
#include "engine/reconfigurable.h"
#include "engine/report/failure_text.h"
#include "schedule/step.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// torch's view of a Group. One instance serves CPU and CUDA tensors of its process group.
///
/// Every collective checks its tensors before anything moves, starts one or more operations, and returns at once with a PycommWork.
/// The call raises errors of its arguments; wait() or the future raises all later ones.
///
/// A reconfigurable one (torch: enable_reconfigure) has another Group after each reconfigure(), and none before the first and after one
/// that failed. What belongs to one Group is replaced in one place, adopt(), but for windows_ and the epoch of hooks_; a Work keeps that
/// of its own.
class PycommBackend final : public c10d::Backend {
 public:
  struct Settings {
    std::chrono::milliseconds timeout{0}; ///< of every operation without a timeout of its own
    Algorithm algorithm = Algorithm::Auto; ///< for all_reduce
    int64_t segment_nbytes = 256 << 10;
    Codec codec = Codec::None; ///< see codecFor()
    std::function<CudaDevices::Config(const Group&)> cuda; ///< of a group that has come together
    std::string group_name; ///< as torch passes it
    bool check_call_sites = false; ///< see CallSites
    std::vector<std::string> skipped_folders; ///< see CallSites
    std::optional<bool> starts_world; ///< see GroupRole::next()
  };

  /// `store`: of the rendezvous; the rank leaves it when the group closes.
  PycommBackend(std::shared_ptr<Store> store, std::shared_ptr<Group> group, Settings settings);
  /// One that has no group until reconfigure(). Rank and size are those that torch has passed, until then.
  PycommBackend(int rank, int size, std::unique_ptr<Reconfigurable> reconfigurable, Settings settings);
  ~PycommBackend() override;

  const std::string getBackendName() const override {
    return "pycomm";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  /// Fails this group's operations on all ranks because of a failure outside of them. `what`: the end of a sentence that begins with this
  /// rank. Nothing if the group has failed already. Any thread; does not wait.
  void abortFor(const std::string& what);
  void shutdown() override;
  /// Memory that the ranks of this host reach in place. torch passes a device without a number.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long numel, at::TensorOptions options)
      override; // NOLINT(google-runtime-int): torch's signature
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override {
    return reconfigurable_ != nullptr;
  }
  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    return reconfigureHandle();
  }
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override {
    addAbortHook(hook_id, std::move(hook));
  }
  void unregisterAbortHook(int64_t hook_id) override {
    removeAbortHook(hook_id);
  }
#endif
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  /// Until endCoalescing(), the calling thread's collectives start as usual; endCoalescing() returns one Work for all of them.
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts)
      override;
  /// What torch calls for sparse tensors of a device, which are refused.
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts)
      override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts)
      override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int dst, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int src, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;

  /// all_reduce encoded by `codec` instead of the group's own; plain if codecFor() has no use for a codec.
  /// `residual`: undefined, or, for a Sum, float32 of the tensor's size: see Group::Call. If nothing is encoded, this adds it to the
  /// tensor and sets it to zero.
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> allreduceAs(
      Codec codec,
      std::vector<at::Tensor> tensors,
      const at::Tensor& residual,
      const c10d::AllreduceOptions& opts = {});

  /// Whether NCCL runs collectives of this device's tensors; their futures are complete when the call returns. If that is not decided
  /// yet, this call decides it with all ranks, as the first collective would.
  [[nodiscard]] bool goesByNccl(c10::Device device);

  /// Whether it was made to be reconfigured.
  [[nodiscard]] bool isReconfigurable() const noexcept {
    return reconfigurable_ != nullptr;
  }
  /// What the other members pass to reconfigure(). Raises an InvalidArgument if this is not reconfigurable.
  [[nodiscard]] std::string reconfigureHandle() const;
  /// Leaves the group that there is, if any, and meets the members of a new one; see Reconfigurable. `handles`: in the order of ranks.
  /// Blocks, without the interpreter's lock. Raises errors; those of arguments leave the group as it is, after all others there is none.
  void reconfigureTo(int64_t uuid, const std::vector<std::string>& handles, std::chrono::milliseconds timeout);
  /// Its part of the groups that it had and will have; null if this is not reconfigurable.
  [[nodiscard]] Reconfigurable* reconfigurable() const noexcept {
    return reconfigurable_.get();
  }
  /// What the last reconfigureTo(), or takeOver(), has met. Throws as group() does.
  [[nodiscard]] Reconfigurable::Met met() const;
  /// Takes over a group that came together elsewhere, as reconfigureTo() does with its own. The old one is the caller's to close. On the
  /// thread that issues collectives. Throws what adopt() does.
  void takeOver(const Reconfigurable::Met& met);
  /// shutdown() closes it first: it makes groups for this.
  void closeFirst(std::weak_ptr<Engine::Maker> maker);
  /// The timeout of operations.
  [[nodiscard]] std::chrono::milliseconds timeout() const noexcept {
    return settings_.timeout;
  }

  /// `hook` runs once when a group fails, on a thread of the callback pool, or when abort() is called, on that thread, before that does
  /// anything else. It takes the place of another one with its number. Any thread.
  void addAbortHook(int64_t id, std::function<void()> hook);
  void removeAbortHook(int64_t id);

  /// How many-th group of the job this is in its process, from 1; 0 if it is of no job.
  [[nodiscard]] uint32_t groupNumber() const;
  /// The group as it is now. Throws Error(InvalidArgument) if there is none: before reconfigure().
  [[nodiscard]] std::shared_ptr<Group> group() const;
  /// The same; null if there is none.
  [[nodiscard]] std::shared_ptr<Group> groupIfAny() const;

 private:
  struct Titled {
    c10d::OpType type;
    const char* title; ///< of the event in the profiler
  };

  /// The collectives that a thread has begun since startCoalescing().
  struct Window {
    std::vector<c10::intrusive_ptr<PycommWork>> works;
    CallMemory memory; ///< of the collectives so far
    // The calls for NCCL, which it runs as one of its groups; null: none.
    std::shared_ptr<NcclGroup> nccl;
    std::shared_ptr<NcclLaunch> launch;
    std::vector<Group::Call> calls;
    std::vector<std::shared_ptr<Operation>> operations;
    std::vector<std::function<void()>> unpacks;
    TimePoint opened = Clock::now();
  };
  using Windows = std::map<std::thread::id, Window>;

  /// One call of torch's on its way to the engine. Nothing has moved yet, so an error in it leaves no trace.
  struct Prepared {
    /// `deadline`: for the other ranks, if they have to decide first who runs collectives of CUDA tensors.
    Prepared(std::shared_ptr<CudaDevices> devices, bool may_use_nccl, Deadline deadline)
        : staging(std::move(devices), may_use_nccl, deadline) {}
    std::vector<Group::Call> calls;
    Staging staging;
    PycommWork::Content content;
  };

  /// For a collective. NCCL knows no codecs: encoded collectives go through the host.
  [[nodiscard]] Prepared prepare(Codec codec = Codec::None) const;

  /// Sets the views of a call for a list with one tensor per rank: of the tensors themselves if the engine can take them, else of a
  /// temporary. The rest of the call is complete.
  void readParts(Group::Call& call, Staging& staging, const std::vector<at::Tensor>& parts) const;
  void writeParts(Group::Call& call, Staging& staging, const std::vector<at::Tensor>& parts) const;

  /// The request for one collective, from torch's options and the dtype of `like`. `opts` is any of torch's option structs: they share
  /// `timeout` and `asyncOp`, and some have a root or a reduce op. The caller fills in views and sizes.
  template <typename Opts>
  [[nodiscard]] Group::Call call(Collective kind, const Opts& opts, const at::Tensor& like) const {
    Group::Call call = this->call(kind, opts);
    call.schedule.dtype = toDType(like.scalar_type());
    if constexpr (HasRoot<Opts>::value) {
      call.schedule.root = static_cast<int32_t>(opts.rootRank);
    }
    if constexpr (HasReduceOp<Opts>::value) {
      call.schedule.reduce_op = toReduceOp(opts.reduceOp);
      call.premul_factor = premulFactor(opts.reduceOp);
    }
    return call;
  }
  /// The same for a collective without tensors.
  template <typename Opts>
  [[nodiscard]] Group::Call call(Collective kind, const Opts& opts) const {
    Group::Call call;
    call.schedule.kind = kind;
    call.schedule.rank = getRank();
    call.schedule.size = getSize();
    call.schedule.segment_nbytes = settings_.segment_nbytes;
    call.deadline = Deadline::after((opts.timeout.count() > 0 ? opts.timeout : settings_.timeout).count());
    call.waits = !opts.asyncOp;
    return call;
  }
  /// pycomm::raising, for errors of this group: they name the group and the rank.
  template <typename Body>
  auto raising(const Body& body) const -> decltype(body()) {
    return pycomm::raising([&] {
      const EpochLock epoch = holdEpoch();
      try {
        return body();
      } catch (const Error& error) {
        throw Error(errorOf(error.record(), group_->identity()));
      }
    });
  }
  template <typename Opts, typename = void>
  struct HasRoot : std::false_type {};
  template <typename Opts>
  struct HasRoot<Opts, std::void_t<decltype(std::declval<Opts>().rootRank)>> : std::true_type {};
  template <typename Opts, typename = void>
  struct HasReduceOp : std::false_type {};
  template <typename Opts>
  struct HasReduceOp<Opts, std::void_t<decltype(std::declval<Opts>().reduceOp)>> : std::true_type {};

  /// allgather, gather, scatter and reduce_scatter.
  template <typename Opts>
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> withList(
      Collective kind,
      std::vector<std::vector<at::Tensor>>& lists,
      std::vector<at::Tensor>& singles,
      const Opts& opts,
      Titled titled);
  /// all_gather_into_tensor and reduce_scatter_tensor.
  template <typename Opts>
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> withWhole(
      Collective kind,
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const Opts& opts);
  /// Sets the codec of a request that is otherwise complete, if the codec of the group, or of the chain that issues it, applies to it.
  /// Inside ExactSums none does.
  void chooseCodec(Group::Call& call) const;
  /// Checks all requests, then starts them all.
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> begin(Titled titled, Prepared prepared);
  [[nodiscard]] std::shared_ptr<Operation> start(const Group::Call& call);
  /// Tells the group what torch calls it.
  void entitle();
  /// Lets the device encode the tensors that travel encoded, if it can: fewer bytes cross the bus then.
  void encodeOnDevice(Group::Call& call, PycommWork::Content& content) const;
  /// Starts operations whose input is still on a device: each takes its place in the group's order now, and begins when its input is
  /// in host memory.
  void startBehindCopies(std::vector<Group::Call>& calls, PycommWork::Content& content);
  /// Lets NCCL run the calls; in a coalescing window, when the window ends.
  void startNccl(
      const std::shared_ptr<NcclGroup>& nccl,
      const std::vector<Group::Call>& calls,
      PycommWork::Content& content,
      Window* open);
  /// The tag that ranks compare: the innermost CallTag (DDP's bucket), else that of the strand (a comm hook has its bucket's) and the call
  /// site's hash (check_call_sites), else 0. Collectives only.
  [[nodiscard]] uint32_t tagFor() const;
  /// Makes every Work, so that a coalescing window sees it. `open`: the result of window() before anything began, or null.
  /// Its operations start after that.
  [[nodiscard]] c10::intrusive_ptr<PycommWork> work(Titled titled, PycommWork::Content content, Window* open);
  /// In a catch block: some operations of a call have started and the others cannot, so the group ends with the exception. The other ranks
  /// have begun, or will begin, operations that this one never does.
  void tellOthers() noexcept;
  /// A message of a tensor that the engine reads or writes in place.
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> plainMessage(
      Titled titled,
      Collective kind,
      const at::Tensor& tensor,
      int peer,
      int tag);
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> message(
      Titled titled,
      Collective kind,
      std::vector<at::Tensor>& tensors,
      int peer,
      int tag);

  void prepareAllReduce(Prepared& prepared, const at::Tensor& tensor, const c10d::AllreduceOptions& opts) const;
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> sparseAllReduce(at::Tensor& tensor, const c10d::AllreduceOptions& opts);

  using EpochLock = std::shared_lock<std::shared_timed_mutex>;
  /// Keeps the group while a call begins. Costs nothing, and is not locked, if this is not reconfigurable. Throws Error(InvalidArgument) if
  /// there is no group.
  [[nodiscard]] EpochLock holdEpoch() const;
  [[nodiscard]] Error noGroup() const;
  /// What belongs to one group.
  struct OfGroup {
    Reconfigurable::Met met;
    std::shared_ptr<GroupRole> role;
  };
  /// Replaces that. An empty one: there is no group, and `why_none_` says why. Throws Error(Timeout) if a call does not return, and
  /// Error(ShutDown) for a group after shutdown().
  void adopt(OfGroup next, const std::string& why_none, Deadline deadline);
  /// `epoch`: of hooks_. The hooks of another one do not run.
  void watchFailure(const std::shared_ptr<Group>& group, uint64_t epoch);
  /// For the reconfigure() under way, if any, also before and after its JoinAbort is there. `does`: "aborted".
  void abortJoining(const char* does);
  /// The reconfigure() under way is over. What abortJoining() has left for it.
  std::optional<ErrorRecord> endJoining() noexcept;
  struct AbortHooks;

  const std::unique_ptr<Reconfigurable> reconfigurable_; ///< null: not reconfigurable
  Settings settings_;
  mutable std::shared_timed_mutex
      epoch_mutex_; ///< held while a call begins, and to replace what follows, if reconfigurable
  std::shared_ptr<Store> store_; ///< outlives the group
  std::shared_ptr<Group> group_;
  std::shared_ptr<const Instance> instance_; ///< of reconfigurable_: whom group_ consists of
  std::shared_ptr<CudaDevices> devices_;
  c10::intrusive_ptr<WorkOwner> owner_;
  std::shared_ptr<CallSites> call_sites_; ///< null unless the settings ask for it
  std::string why_none_; ///< why there is no group

  const std::shared_ptr<AbortHooks> hooks_;
  std::mutex reconfigure_mutex_; ///< held by the one reconfigure() at a time; only tried, so nobody waits for it
  std::atomic<bool> closed_{false}; ///< by shutdown(): no group is adopted any more
  LeafMutex joining_mutex_; ///< guards the next four
  int joining_rank_ = -1; ///< this member's in the reconfigure() under way; -1: none is
  JoinAbort* joining_ = nullptr; ///< of that, while it meets the members: abort() ends it
  std::optional<ErrorRecord> abort_wanted_; ///< of that: abort() was called
  std::weak_ptr<Engine::Maker> maker_; ///< see closeFirst()

  /// The calling thread's, or null. No other thread uses it. Throws Error(InvalidArgument) if it has been open for longer than an
  /// operation may take: torch's coalescing manager does not end a window if its body raises, and later operations would never begin.
  /// Each call asks for it once, before anything begins.
  [[nodiscard]] Window* window();
  static constexpr const char* kBodyRaised = "the body of its coalescing manager";
  /// Ends a window as `reason` has raised: its calls for NCCL fail, the others go on.
  void abandon(Window window, const char* reason);
  /// A list call, which torch makes when it leaves a coalescing manager. If that fails, torch does not end the window, so this abandons it.
  template <typename Body>
  auto leaving(const Body& body) -> decltype(body()) {
    try {
      return body();
    } catch (...) {
      raising([&] {
        if (auto own = takeWindow()) {
          abandon(std::move(own.mapped()), "a list call of its coalescing manager");
        }
      });
      throw;
    }
  }
  /// The calling thread's, which has none from now on; empty: it had none.
  [[nodiscard]] Windows::node_type takeWindow();
  void launch(Window& window);
  std::atomic<bool> entitled_{false};
  LeafMutex windows_mutex_; ///< guards windows_
  Windows windows_;
};

} // namespace pycomm
