#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "device/device_runtime.h"
#include "device/nccl_api.h"
#include "device/nccl_call.h"
#include "device/nccl_collectives.h"
#include "device/nccl_rank.h"

namespace pycomm::cuda {

/// One start(). Only NcclComm reads its state.
class NcclOperation;

/// One rank's NCCL communicator. Every wait for it ends by a deadline.
///
/// Work goes onto a side stream, where it waits for the work that the caller's stream has at the start (an event); the host does
/// not wait. CUDA notifies of its end by a third stream, so that the next operation need not wait for the notice. The communicator is
/// non-blocking: calls return while other ranks are still missing, and every wait for NCCL checks the deadline and the group's failure.
///
/// Fails as a whole, once: the first error aborts the communicator, which ends its kernels on this rank, and every operation, under way
/// or new, ends with that cause. Thread-safe. The owner calls poll() every few milliseconds, which notices errors and deadlines. poll()
/// calls nothing of CUDA's but the abort, since another thread may be waiting for the device, and takes no lock that a thread holds
/// while it calls CUDA. Threads that call start(), create() or the destructor have the device as their current one.
class NcclComm {
 public:
  struct Config {
    int rank = 0;
    int job_rank = 0; ///< what errors call this rank
    int size = 1;
    std::string group;
    Stream stream = nullptr; ///< the side stream
    Deadline deadline = Deadline::never(); ///< of create()
    /// Called with rank 0's id on rank 0, which publishes it, and with null on the others; returns rank 0's id. Blocks until the deadline.
    std::function<NcclUniqueId(const NcclUniqueId* own, Deadline deadline)> exchange;
    /// The group's failure, if it has failed; called while waiting.
    std::function<std::optional<ErrorRecord>()> group_failure;
  };

  /// Not on a data loop: blocks until all ranks have joined, the deadline or the group's failure. `api` and `runtime` outlive the
  /// communicator. Throws Error.
  [[nodiscard]] static std::unique_ptr<NcclComm> create(NcclApi& api, DeviceRuntime& runtime, Config config);
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Puts the calls onto the side stream, as one NCCL group, behind the work of `caller`. Throws Error for invalid calls (nothing has
  /// happened then) and for every error that breaks the communicator.
  [[nodiscard]] std::shared_ptr<NcclOperation> start(
      const std::vector<NcclCall>& calls,
      Stream caller,
      Deadline deadline);
  /// Whether the device is done with it.
  [[nodiscard]] bool done(const NcclOperation& operation) const;
  void poll();
  /// The first failure wins; its code alone is kept if there is no memory for its words.
  void abort(const ErrorRecord& reason) noexcept;
  [[nodiscard]] bool hasFailed() const noexcept;
  [[nodiscard]] std::optional<ErrorRecord> failure() const;

 private:
  struct Notice;
  NcclComm(NcclApi& api, DeviceRuntime& runtime, Config config);
  void connect();
  void notifyOfEnd(std::unique_ptr<Notice> notice);
  static void onReached(void* notice, const char* failure);
  void inGroup(const std::function<void(NcclHandle)>& body, Deadline deadline, const ErrorRecord& about);
  void waitUntilReady(Deadline deadline, const ErrorRecord& about);
  [[nodiscard]] std::optional<ErrorRecord> findFailure();
  void throwIfFailed() const;
  /// abort(), and the failure that has won.
  ErrorRecord fail(const ErrorRecord& cause);

  NcclApi& api_;
  DeviceRuntime& runtime_;
  const Config config_;
  const NcclRank rank_;

  // Order: issue_mutex_, api_mutex_, the state's. Only issue_mutex_ is held while CUDA is called.
  std::mutex issue_mutex_; ///< one start() at a time: NCCL wants the same order on all ranks
  NcclCollectives collectives_; ///< of issue_mutex_
  Event entry_ = nullptr; ///< of issue_mutex_; these two are used again by each start, which CUDA allows
  Event exit_ = nullptr;
  Stream watched_ = nullptr; ///< CUDA notifies of ends on it

  std::mutex api_mutex_; ///< held for NCCL calls, never while waiting; guards comm_
  NcclHandle comm_ = nullptr; ///< null once aborted

  /// Shared with CUDA's notices, which may outlive the communicator.
  struct State {
    std::mutex mutex; ///< guards the rest
    std::optional<ErrorRecord> failure;
    std::optional<ErrorRecord> broken; ///< the device's error, for the next poll()
    std::list<std::shared_ptr<NcclOperation>> pending; ///< in stream order
  };
  struct Notice {
    std::shared_ptr<State> state;
    std::shared_ptr<NcclOperation> operation;
    std::list<std::shared_ptr<NcclOperation>> pending; ///< its place in the state's
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

} // namespace pycomm::cuda
