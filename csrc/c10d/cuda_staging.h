#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer_view.h"
#include "base/error.h"
#include "c10d/cuda_library.h"

namespace pycomm {

/// One CUDA device of a process group in TCP mode: its pinned memory, and two side streams of torch's pool, one a direction.
/// torch's streams are reached through its device-neutral interface alone, so that the extension needs no CUDA to build or load.
class CudaDevice {
 public:
  CudaDevice(const PycommCudaTable& library, c10::Device device);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] const PycommCudaTable& library() const noexcept {
    return library_;
  }
  [[nodiscard]] PycommCudaStager* stager() const noexcept {
    return stager_;
  }
  [[nodiscard]] c10::Device device() const noexcept {
    return device_;
  }
  /// The stream that copies to the device, and what runs behind them.
  [[nodiscard]] c10::Stream in() const noexcept {
    return in_;
  }
  /// The calling thread's current stream, as CUDA knows it.
  [[nodiscard]] void* callersStream() const;
  void refuseCapture() const; ///< throws Error(Unsupported) while the caller's stream is captured

 private:
  const PycommCudaTable& library_;
  const c10::Device device_;
  const c10::Stream out_;
  const c10::Stream in_;
  PycommCudaStager* stager_ = nullptr;
};

/// The devices of one process group, each made when its first tensor comes. Thread-safe.
class CudaDevices {
 public:
  explicit CudaDevices(std::string library_path) : library_path_(std::move(library_path)) {}

  /// Throws Error(Unsupported) where the CUDA library is not there.
  [[nodiscard]] std::shared_ptr<CudaDevice> at(c10::Device device);

 private:
  const std::string library_path_;
  std::mutex mutex_; ///< guards devices_
  std::map<c10::DeviceIndex, std::shared_ptr<CudaDevice>> devices_;
};

/// What one call to the backend moves between a device and pinned memory.
class CudaCopies {
 public:
  explicit CudaCopies(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}
  /// Gives the blocks back. By then the device is through with them, or has been given its last copies.
  ~CudaCopies();
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  /// Host memory for bytes of the device's. `read`: they are copied there before the collective; `written`: back, after it.
  [[nodiscard]] BufferView host(BufferView on_device, bool read, bool written);

  /// Starts the copies to the host, behind the caller's stream. `ready` is called once, on another thread; not if this throws.
  void toHost(std::function<void(const std::optional<ErrorRecord>& failure)> ready);
  /// Starts the copies to the device.
  void toDevice();
  /// The caller's current stream goes on behind what toDevice() has started.
  void orderCaller() const;
  /// The memory of `tensors` is not used for others before the side stream is through with it, whoever frees it first.
  void keepFor(const std::vector<at::Tensor>& tensors) const;

  [[nodiscard]] const CudaDevice& device() const noexcept {
    return *device_;
  }

 private:
  const std::shared_ptr<CudaDevice> device_;
  std::vector<PycommCudaCopy> to_host_;
  std::vector<PycommCudaCopy> to_device_;
  std::vector<void*> blocks_;
  bool copied_ = false; ///< toDevice() was called: the device may read the blocks
};

} // namespace pycomm
