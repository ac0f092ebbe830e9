#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/call_sites.h"
#include "c10d/cuda_nccl.h"
#include "c10d/cuda_staging.h"
#include "c10d/group_role.h"
#include "engine/group.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// Waits for an operation on behalf of a Work of `rank`, and checks for Ctrl-C meanwhile. Throws Python exceptions, also if `deadline`
/// passes, which came from `timeout`: then the operation goes on.
void waitFor(Group& group, const Operation& operation, std::chrono::milliseconds timeout, Deadline deadline);

/// What all Works of a backend share: one pointer in each of them.
struct WorkOwner final : c10::intrusive_ptr_target {
  WorkOwner(std::shared_ptr<Group> of, std::shared_ptr<GroupRole> as) : group(std::move(of)), role(std::move(as)) {}
  /// With the next role, as the last that can fail.
  WorkOwner(std::shared_ptr<Group> of, const c10d::Backend& backend, std::optional<bool> starts_world)
      : group(std::move(of)), role(GroupRole::next(backend, starts_world)) {}
  const std::shared_ptr<Group> group;
  const std::shared_ptr<GroupRole> role;
};

/// The Work that a call to the backend returns.
///
/// Holds every tensor that the engine reads or writes, and its memory, until the operations have ended and the outputs are copied, also when
/// the user drops this before.
class PycommWork final : public c10d::Work {
 public:
  struct Content {
    std::shared_ptr<CallSites> call_sites; ///< explains mismatches; null without check_call_sites
    std::vector<std::shared_ptr<Operation>> operations;
    std::vector<at::Tensor> inputs; ///< the profiler shows them, too
    std::vector<at::Tensor> keep_alive; ///< staging tensors
    std::vector<c10::Storage>
        storages; ///< the memory that the engine works in: tensors get another one by `x.data = y`
    std::vector<at::Tensor> outputs; ///< the future's value
    std::vector<std::vector<at::Tensor>> output_lists; ///< instead of `outputs` for collectives with one list per rank
    /// Copies staging to outputs after success; may be empty.
    std::function<void()> unpack;
    /// Of a coalesced Work, which finishes them instead of an `unpack`. If one fails, no other is written any more.
    std::vector<c10::intrusive_ptr<PycommWork>> parts;
    std::shared_ptr<CudaCopies> cuda; ///< this work's own; null for tensors on the CPU
    std::shared_ptr<NcclLaunch> nccl; ///< this work's own, which only orders streams; null if the engine runs it
    std::vector<std::shared_ptr<const CudaOrder>> order_after; ///< wait() makes the caller's stream wait for these
  };

  /// The caller adds operations to starting() then, and calls started() when all of them have started.
  PycommWork(
      c10::intrusive_ptr<WorkOwner> owner,
      int rank,
      c10d::OpType type,
      const char* profiling_title,
      Content content);
  ~PycommWork() override;

  /// False, too, while another thread copies the outputs: it waits for none, since torch calls it with the interpreter's lock.
  bool isCompleted() override {
    return ended();
  }
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  /// Blocks until all operations have ended, at the engine's deadline at the latest; raises the error of one that failed. For CUDA
  /// tensors it blocks until the copies to the device are queued; the caller's current stream then waits for those. It does not block
  /// for operations that NCCL runs.
  bool wait(std::chrono::milliseconds timeout) override;
  /// As if wait() had returned or raised: the caller has waited for the operations in another way.
  void noteWaited();
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;
  /// Of a receive that has ended: the rank that sent.
  int sourceRank() const override;

  [[nodiscard]] const Content& content() const noexcept;
  /// Until started().
  [[nodiscard]] Content& starting() noexcept;
  void started();
  /// Instead of started(): not all have. Those that have keep the tensors until they end, and no outputs are copied: the call raises.
  void cancel();
  /// Copies the outputs, if nobody has. All operations have ended.
  void finish();
  /// Why the outputs could not be copied to their device, after finish().
  [[nodiscard]] std::optional<ErrorRecord> copyError() const;
  /// Of a synchronous collective: does what can be done now on this thread, its caller's, and wakes no other for the rest, as the caller
  /// will come back or wait(). Whether all has ended; then finish() has been called.
  [[nodiscard]] bool poll();
  /// As isCompleted(), which also sees to it that somebody runs the operations: this only asks.
  [[nodiscard]] bool hasEnded() const;
  /// The caller of a synchronous collective runs it in wait(). Without that the engine's own threads do, from now on. Waits for no other rank;
  /// for the end of a round of the data loop it may, and it may do a step of an operation in shared memory and poll for kRoundTrip.
  void handOver() const;

 private:
  /// Outlives the Work: the data loop's listeners hold it.
  struct State;

  static void inPoolWhenAllEnd(const std::shared_ptr<State>& state, void (*then)(State&));
  static void completeFuture(State& state);
  static void completeInChild(State& state, c10::ivalue::Future& future);

  /// isCompleted(), and what the other questions begin with.
  [[nodiscard]] bool ended() const;

  std::shared_ptr<State> state_;
};

} // namespace pycomm
