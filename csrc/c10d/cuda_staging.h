#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
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
  [[nodiscard]] void* sideStream() const; ///< in(), as CUDA knows it
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

/// What a caller's stream goes on behind: copies to the device, or NCCL's kernels.
class CudaOrder {
 public:
  virtual ~CudaOrder() = default;
  /// The caller's current stream goes on behind it.
  virtual void orderCaller() const = 0;
  /// The side stream that it is on.
  [[nodiscard]] virtual c10::Stream stream() const = 0;
  /// The memory of `tensors` is not used for others before the side stream is through with it, whoever frees it first.
  virtual void keepFor(const std::vector<at::Tensor>& tensors) const = 0;
};

void keepForStream(const std::vector<at::Tensor>& tensors, const c10::Stream& stream);

/// What one call to the backend moves between a device and pinned memory.
class CudaCopies final : public CudaOrder {
 public:
  explicit CudaCopies(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}
  /// Gives the blocks back. By then the device is through with them, or has been given its last copies.
  ~CudaCopies() override;
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  /// Host memory for bytes of the device's. `read`: they are copied there before the collective; `written`: back, after it.
  [[nodiscard]] BufferView host(BufferView on_device, bool read, bool written);

  /// Starts the copies to the host, behind the caller's stream. `ready` is called once, on another thread; not if this throws.
  void toHost(std::function<void(const std::optional<ErrorRecord>& failure)> ready);
  /// Starts the copies to the device.
  void toDevice();
  /// The caller's current stream goes on behind what toDevice() has started.
  void orderCaller() const override;
  [[nodiscard]] c10::Stream stream() const override {
    return device_->in();
  }
  void keepFor(const std::vector<at::Tensor>& tensors) const override;

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
