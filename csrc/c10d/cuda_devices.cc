#include "c10d/cuda_devices.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "base/log.h"
#include "c10d/interruptible.h"
#include "c10d/python_errors.h"
#include "device/cuda_library.h"

namespace pycomm {
namespace {

[[noreturn]] void refuseInHandler() {
  throw Error(
      ErrorCode::InvalidArgument,
      "A signal handler called a collective of CUDA tensors while its thread was beginning another one of the same group.",
      "set a flag in the handler, and act on it between two collectives");
}

} // namespace

std::shared_ptr<CudaDevice> CudaDevices::at(c10::Device device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<CudaDevice>& made = devices_[device.index()];
  if (made == nullptr) {
    made = std::make_shared<CudaDevice>(cuda::cudaLibrary(config_.library), device);
  }
  return made;
}

std::shared_ptr<NcclGroup> CudaDevices::ncclAt(c10::Device device, Deadline deadline) {
  if (!config_.may_use_nccl) {
    return nullptr;
  }
  const auto on = at(device);
  on->refuseCapture();
  decideNccl(on, deadline);
  const std::lock_guard lock(nccl_mutex_);
  if (nccl_ == nullptr && config_.must_use_nccl) {
    throw Error(
        ErrorCode::Unsupported,
        "cuda_mode=nccl, but NCCL cannot be used: " + why_not_ + ".",
        "give each rank a GPU of its own (torch.cuda.set_device) and install NCCL, or use cuda_mode='host'");
  }
  if (nccl_ != nullptr && nccl_->device().device() != device) {
    throw Error(
        ErrorCode::InvalidArgument,
        "This group's NCCL works on " + nccl_->device().device().str() + ", and a tensor is on " + device.str() + ".",
        "use one device a rank and group, or cuda_mode='host'");
  }
  if (nccl_ != nullptr && Interruptible::within(nccl_.get())) {
    refuseInHandler();
  }
  return nccl_;
}

void CudaDevices::decideNccl(const std::shared_ptr<CudaDevice>& on, Deadline deadline) {
  {
    std::unique_lock lock(nccl_mutex_);
    while (deciding_) {
      if (Interruptible::within(this)) {
        refuseInHandler();
      }
      nccl_changed_.wait_for(lock, Interruptible::kEvery);
      lock.unlock();
      checkSignals();
      lock.lock();
    }
    if (decided_) {
      return;
    }
    deciding_ = true;
  }
  std::shared_ptr<NcclGroup> made;
  std::string why_not;
  std::exception_ptr failure;
  try {
    const Interruptible interruptible(this);
    why_not = NcclGroup::whyNot(*group_, *on, config_.nccl_libraries, config_.nccl_host_id, deadline);
    if (why_not.empty()) {
      made = NcclGroup::create(group_, on, config_.nccl_libraries, deadline, stopped_);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  {
    const std::lock_guard lock(nccl_mutex_);
    deciding_ = false;
    decided_ = failure == nullptr;
    why_not_ = why_not;
    nccl_ = made;
  }
  nccl_changed_.notify_all();
  if (made != nullptr && stopped_.load(std::memory_order_acquire)) { // stop() may have come before nccl_ was there
    made->stop(std::chrono::milliseconds(0));
  }
  if (failure != nullptr) {
    std::rethrow_exception(failure);
  }
  if (group_->identity().rank == 0) {
    log(LogLevel::Info,
        group_->identity().text() + ": CUDA tensors go " +
            (made != nullptr ? "by NCCL, " + made->origin() : "through the host: " + why_not));
  }
}

std::shared_ptr<NcclGroup> CudaDevices::nccl() {
  const std::lock_guard lock(nccl_mutex_);
  return nccl_;
}

bool CudaDevices::goesByNccl(c10::Device device, Deadline deadline) {
  return device.is_cuda() && ncclAt(device, deadline) != nullptr;
}

void CudaDevices::stop() {
  stopNccl(NcclGroup::kDrainFor);
}

void CudaDevices::stopNccl(std::chrono::milliseconds drain_for) {
  stopped_.store(true, std::memory_order_release);
  if (const auto nccl = this->nccl()) {
    nccl->stop(drain_for);
  }
}

void CudaDevices::stopThreads(Deadline deadline) {
  constexpr int kMostMs = 5000;
  stopNccl(std::chrono::milliseconds(deadline.remainingMs(kMostMs) / 2));
  std::vector<std::shared_ptr<CudaDevice>> devices;
  {
    const std::lock_guard lock(mutex_);
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
  LeafMutex mutex; ///< guards the rest
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
  const std::lock_guard lock(registry().mutex);
  auto& all = registry().all;
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& each) { return each.expired(); }), all.end());
  all.push_back(made);
  return made;
}

void CudaDevices::stopAllThreads(Deadline deadline) {
  std::vector<std::shared_ptr<CudaDevices>> living;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& each : registry().all) {
      auto devices = each.lock();
      if (devices != nullptr && devices->group_->engine().belongsToThisProcess()) { // not a child's parent's
        living.push_back(std::move(devices));
      }
    }
  }
  for (const auto& devices : living) {
    devices->stopThreads(deadline);
  }
}

} // namespace pycomm
