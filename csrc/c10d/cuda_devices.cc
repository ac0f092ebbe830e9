#include "c10d/cuda_devices.h"

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

void CudaDevices::stop() {
  const std::lock_guard<std::mutex> lock(nccl_mutex_);
  if (nccl_ != nullptr) {
    nccl_->stop();
  }
}

} // namespace pycomm
