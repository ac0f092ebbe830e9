#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/wait_point.h"
#include "c10d/cuda_nccl.h"
#include "c10d/cuda_staging.h"
#include "engine/group.h"

namespace pycomm {

/// The CUDA devices of one process group, each made when its first tensor comes, and the decision whether NCCL runs their collectives.
/// Thread-safe.
class CudaDevices {
 public:
  struct Config {
    std::string library; ///< the path of libpycomm_cuda.so, loaded when the first CUDA tensor comes
    std::vector<std::string> nccl_libraries; ///< paths to load NCCL from
    std::string nccl_host_id; ///< NCCL_HOSTID, NCCL's name for this host; empty: not set
    bool may_use_nccl = false; ///< every rank has a GPU; the ranks decide about NCCL when the first tensor comes
    bool must_use_nccl = false;
  };
  [[nodiscard]] static std::shared_ptr<CudaDevices> create(std::shared_ptr<Group> group, Config config);

  /// Throws Error(Unsupported) if the CUDA library is missing.
  [[nodiscard]] std::shared_ptr<CudaDevice> at(c10::Device device);

  /// NCCL, if it runs this group's collectives of CUDA tensors; null: they go through the host. The first call decides it with the
  /// other ranks, and blocks for them. Throws Error(Unsupported) if the options demand NCCL and it cannot be used, and the error of the
  /// group if that fails.
  /// A signal handler that runs meanwhile may destroy the group; one that begins such a collective gets Error(InvalidArgument).
  [[nodiscard]] std::shared_ptr<NcclGroup> ncclAt(c10::Device device, Deadline deadline);

  /// Whether NCCL runs collectives of this device's tensors. Blocks and throws as ncclAt() does.
  [[nodiscard]] bool goesByNccl(c10::Device device, Deadline deadline);

  /// Before the group is closed.
  void stop();

  /// Ends the threads of all groups of this process that call CUDA. Called before the process ends, and CUDA's driver with it.
  static void stopAllThreads(Deadline deadline);

 private:
  CudaDevices(std::shared_ptr<Group> group, Config config) : group_(std::move(group)), config_(std::move(config)) {}
  void stopThreads(Deadline deadline);
  void stopNccl(std::chrono::milliseconds drain_for);
  /// Decides with all ranks whether NCCL runs collectives of CUDA tensors, once.
  void decideNccl(const std::shared_ptr<CudaDevice>& on, Deadline deadline);
  [[nodiscard]] std::shared_ptr<NcclGroup> nccl();

  const std::shared_ptr<Group> group_;
  const Config config_;
  LeafMutex mutex_; ///< guards devices_
  std::map<c10::DeviceIndex, std::shared_ptr<CudaDevice>> devices_;
  std::atomic<bool> stopped_{false}; ///< stopNccl() was called: a first collective that waits for other ranks gives up
  LeafMutex nccl_mutex_; ///< guards the rest
  std::condition_variable_any nccl_changed_;
  bool deciding_ = false; ///< a thread is in decideNccl()
  bool decided_ = false;
  std::string why_not_;
  std::shared_ptr<NcclGroup> nccl_;
};

} // namespace pycomm
