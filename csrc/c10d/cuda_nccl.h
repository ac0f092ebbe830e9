#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/wait_point.h"
#include "c10d/cuda_staging.h"
#include "device/nccl_api.h"
#include "device/nccl_comm.h"
#include "engine/group.h"

namespace pycomm {

class NcclGroup;

/// One NCCL group launch (a single call, or everything that a coalescing manager collected) and the event recorded after it.
class NcclLaunch final : public CudaOrder {
 public:
  explicit NcclLaunch(std::shared_ptr<NcclGroup> group);

  /// Throws Error(InvalidArgument) before NcclGroup::launch(): calls in a coalescing manager are launched when it ends.
  void requireLaunched() const;
  /// Its launch has failed, or will never come. Its operations fail, at once or in a moment: wait() and the future report that.
  [[nodiscard]] bool abandoned() const noexcept {
    return abandoned_.load(std::memory_order_acquire);
  }

  /// Runs `unpack`, which may be empty, behind NCCL's kernels, and records an event behind it on the side stream.
  void finish(const std::function<void()>& unpack);

  void orderCaller() const override;
  [[nodiscard]] c10::Stream stream() const override;
  void keepFor(const std::vector<at::Tensor>& tensors) const override;

 private:
  friend class NcclGroup; // which sets these two

  const std::shared_ptr<NcclGroup> group_;
  std::atomic<bool> launched_{false};
  std::atomic<bool> abandoned_{false};
  c10::Event end_;
};

/// The NCCL communicator of one process group, in step with its engine.
///
/// NCCL moves the bytes. The group numbers, compares, records and times the operations (Group::follow), so it finds a rank that calls
/// something else, or nothing, as for any other operation. The two fail together: NCCL's error becomes the group's failure, and the
/// group's failure aborts the communicator. A thread of its own polls both every millisecond while an operation is under way.
class NcclGroup final : public std::enable_shared_from_this<NcclGroup> {
 public:
  /// Asks all ranks whether each has NCCL and a GPU of its own. Returns the reason against NCCL, empty if there is none; the same on all
  /// ranks. It is an all_gather of the group, at the same place in the order of operations on all ranks. So a rank whose tensor is on
  /// the CPU gets a mismatch, and the others do not wait for it in vain. `host_id`: NCCL's name for this rank's host, if it has another
  /// one. NCCL refuses to share a GPU only between ranks of one host.
  [[nodiscard]] static std::string whyNot(
      Group& group,
      const CudaDevice& device,
      const std::vector<std::string>& library_paths,
      const std::string& host_id,
      Deadline deadline);
  /// All ranks together, after whyNot() was empty. Throws Error(ShutDown) if `stopped` becomes true meanwhile.
  [[nodiscard]] static std::shared_ptr<NcclGroup> create(
      std::shared_ptr<Group> group,
      std::shared_ptr<CudaDevice> device,
      const std::vector<std::string>& library_paths,
      Deadline deadline,
      const std::atomic<bool>& stopped);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  [[nodiscard]] std::shared_ptr<NcclLaunch> prepare() {
    return std::make_shared<NcclLaunch>(shared_from_this());
  }
  /// Puts calls, whose operations the group follows already, onto the side stream as one NCCL group, behind the caller's stream. Once
  /// per `launch`, and not within another launch: a signal handler that runs in one may only stop(). If it throws an Error, the
  /// operations have ended with that error; if the communicator is broken, the group has failed.
  void launch(
      NcclLaunch& launch,
      const std::vector<Group::Call>& calls,
      const std::vector<std::shared_ptr<Operation>>& operations);

  /// Ends operations that will never be launched.
  void abandon(NcclLaunch& launch, const std::vector<std::shared_ptr<Operation>>& operations, const ErrorRecord& why);

  static constexpr std::chrono::seconds kDrainFor{5};
  /// Waits up to `drain_for` for the device's work, and ends the thread; aborts the communicator if it is still not idle, or if a
  /// launch waits for other ranks, whose thread may be this one.
  /// No launch begins from then on. Idempotent; before the group is closed.
  void stop(std::chrono::milliseconds drain_for);

  [[nodiscard]] const CudaDevice& device() const noexcept {
    return *device_;
  }
  [[nodiscard]] std::string origin() const;

 private:
  NcclGroup(std::shared_ptr<Group> group, std::shared_ptr<CudaDevice> device, const std::atomic<bool>& stopped);
  void threadMain() noexcept;
  /// False if there is no memory to find out whether NCCL, the device or the group has failed. NCCL's kernels may run on then.
  [[nodiscard]] bool poll() noexcept;
  void look() noexcept;
  void endAll(const std::optional<ErrorRecord>& why) noexcept;

  [[nodiscard]] cuda::NcclUniqueId exchange(const cuda::NcclUniqueId* own, Deadline deadline);
  [[nodiscard]] std::optional<ErrorRecord> groupFailure() const;

  class Launching;

  struct Pending {
    std::shared_ptr<cuda::NcclOperation> work;
    std::vector<std::shared_ptr<Operation>> operations;
  };

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<CudaDevice> device_;
  const std::atomic<bool>& stopped_;
  bool connecting_ = true; ///< create() has not returned; written by its thread before another one has this object
  std::unique_ptr<cuda::NcclApi> api_; ///< outlives comm_
  std::unique_ptr<cuda::NcclComm> comm_;

  LeafMutex mutex_; ///< guards all below
  std::condition_variable_any changed_;
  std::list<Pending> pending_; ///< in stream order
  int launching_ = 0; ///< threads in launch()
  bool stopping_ = false;
  std::thread thread_;
};

} // namespace pycomm
