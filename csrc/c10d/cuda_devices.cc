#include "c10d/cuda_devices.h"

#include <algorithm>
#include <chrono>

#include "base/log.h"

namespace pycomm {

std::shared_ptr<CudaDevice> CudaDevices::at(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<CudaDevice>& made = devices_[device.index()];
  if (made == nullptr) {
    made = std::make_shared<CudaDevice>(cudaLibrary(config_.library), device);
  }
  return made;
}

std::shared_ptr<NcclGroup> CudaDevices::ncclAt(c10::Device device, Deadline deadline) {
  if (!config_.may_use_nccl) {
    return nullptr;
  }
  const auto on = at(device);
  on->refuseCapture();
  const std::lock_guard<std::mutex> lock(nccl_mutex_);
  if (!settled_) {
    why_not_ = NcclGroup::whyNot(*group_, *on, config_.nccl_libraries, config_.nccl_host_id, deadline);
    if (why_not_.empty()) {
      nccl_ = NcclGroup::create(group_, on, config_.nccl_libraries, deadline);
    }
    settled_ = true;
    if (group_->identity().rank == 0) {
      log(LogLevel::Info,
          "group " + group_->identity().name + ": CUDA tensors go " +
              (nccl_ != nullptr ? "by NCCL, " + nccl_->origin() : "through the host: " + why_not_));
    }
  }
  if (nccl_ == nullptr && config_.must_use_nccl) {
    throw Error(
        ErrorCode::Unsupported,
        "cuda_mode=nccl, but NCCL cannot be used: " + why_not_ + ".",
        "give each rank a GPU of its own (torch.cuda.set_device) and install NCCL, or use cuda_mode='tcp'");
  }
  if (nccl_ != nullptr && nccl_->device().device() != device) {
    throw Error(
        ErrorCode::InvalidArgument,
        "This group's NCCL works on " + nccl_->device().device().str() + ", and a tensor is on " + device.str() + ".",
        "use one device a rank and group, or cuda_mode='tcp'");
  }
  return nccl_;
}

bool CudaDevices::goesByNccl(c10::Device device, Deadline deadline) {
  return device.is_cuda() && ncclAt(device, deadline) != nullptr;
}

void CudaDevices::stop() {
  const std::lock_guard<std::mutex> lock(nccl_mutex_);
  if (nccl_ != nullptr) {
    nccl_->stop(NcclGroup::kDrainFor);
  }
}

void CudaDevices::stopThreads(Deadline deadline) {
  constexpr int kMostMs = 5000;
  // A first collective that still waits for other ranks has the lock; it has no thread yet.
  if (const std::unique_lock<std::mutex> lock(nccl_mutex_, std::try_to_lock); lock.owns_lock() && nccl_ != nullptr) {
    nccl_->stop(std::chrono::milliseconds(deadline.remainingMs(kMostMs) / 2));
  }
  std::vector<std::shared_ptr<CudaDevice>> devices;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [index, device] : devices_) {
      devices.push_back(device);
    }
  }
  for (const auto& device : devices) {
    if (device != nullptr) {
      device->stop(std::chrono::milliseconds(deadline.remainingMs(kMostMs)));
    }
  }
}

namespace {

struct Registry {
  std::mutex mutex; ///< guards the rest
  std::vector<std::weak_ptr<CudaDevices>> all;
};

// Never destroyed, as groups may outlive static destructors.
Registry& registry() {
  static auto* const made = new Registry();
  return *made;
}

} // namespace

std::shared_ptr<CudaDevices> CudaDevices::create(std::shared_ptr<Group> group, Config config) {
  std::shared_ptr<CudaDevices> made(new CudaDevices(std::move(group), std::move(config)));
  const std::lock_guard<std::mutex> lock(registry().mutex);
  auto& all = registry().all;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& each) { return each.expired(); }), all.end());
  all.push_back(made);
  return made;
}

void CudaDevices::stopAllThreads(Deadline deadline) {
  std::vector<std::shared_ptr<CudaDevices>> living;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    for (const auto& each : registry().all) {
      if (auto devices = each.lock()) {
        living.push_back(std::move(devices));
      }
    }
  }
  for (const auto& devices : living) {
    devices->stopThreads(deadline);
  }
}

} // namespace pycomm
