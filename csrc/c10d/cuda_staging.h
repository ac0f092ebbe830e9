#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/buffer_view.h"
#include "base/codec.h"
#include "base/error.h"
#include "base/wait_point.h"
#include "device/device_runtime.h"
#include "device/stager.h"
#include "engine/loop/callback_pool.h"
#include "engine/operation/piece_flow.h"

namespace pycomm {

/// One CUDA device of a process group: the pinned memory for calls that the engine runs, and two side streams of torch's pool, one per
/// direction; NCCL uses one of them too.
/// The code uses torch's device-neutral interface to streams only, so the extension needs no CUDA to build or load.
class CudaDevice {
 public:
  CudaDevice(cuda::DeviceRuntime& runtime, c10::Device device);
  ~CudaDevice();
  /// Ends the stager's thread, after at most `drain_for`; later copies to the host fail.
  void stop(std::chrono::milliseconds drain_for);
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] cuda::DeviceRuntime& runtime() const noexcept {
    return runtime_;
  }
  [[nodiscard]] cuda::Stager& stager() const noexcept {
    return *stager_;
  }
  [[nodiscard]] c10::Device device() const noexcept {
    return device_;
  }
  /// The stream of copies to the device, and of work behind them.
  [[nodiscard]] c10::Stream in() const noexcept {
    return in_;
  }
  [[nodiscard]] void* sideStream() const; ///< in(), as CUDA's handle
  /// The calling thread's current stream, as CUDA's handle.
  [[nodiscard]] void* callersStream() const;
  void refuseCapture() const; ///< throws Error(Unsupported) while the caller's stream is captured

 private:
  cuda::DeviceRuntime& runtime_; ///< lives as long as the process
  const c10::Device device_;
  const c10::Stream out_;
  const c10::Stream in_;
  std::unique_ptr<cuda::Stager> stager_;
};

/// Device work that a caller's stream has to wait for: copies to the device, or NCCL's kernels.
class CudaOrder {
 public:
  virtual ~CudaOrder() = default;
  /// Makes the caller's current stream wait for it.
  virtual void orderCaller() const = 0;
  /// The side stream that has this work.
  [[nodiscard]] virtual c10::Stream stream() const = 0;
  /// record_stream: the allocator reuses these tensors' memory only after the side stream's work so far.
  virtual void keepFor(const std::vector<at::Tensor>& tensors) const = 0;
};

void keepForStream(const std::vector<at::Tensor>& tensors, const c10::Stream& stream);

/// In a catch block: converts the caught exception to an error of pycomm's. Torch throws errors of its own if a device is broken.
[[nodiscard]] ErrorRecord caughtOnDevice();

/// For destructors: runs `body`, which does not throw, with the device as the current one. If a broken device refuses to become the
/// current one, `body` runs without.
template <typename Body>
void onDeviceInAnyCase(c10::Device device, const Body& body) noexcept {
  std::optional<c10::DeviceGuard> guard;
  try {
    guard.emplace(device);
  } catch (const std::exception&) { // torch's; the memory is lost with the device
  }
  body();
}

/// The copies of one call to the backend between a device and pinned memory.
class CudaCopies final : public CudaOrder {
 public:
  explicit CudaCopies(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {}
  /// Gives the blocks back. By then the device is done with them, or its last copies are queued.
  ~CudaCopies() override;
  CudaCopies(const CudaCopies&) = delete;
  CudaCopies& operator=(const CudaCopies&) = delete;

  /// Host memory for bytes of the device's. `read`: they are copied there before the collective; `written`: back, after it.
  [[nodiscard]] BufferView host(BufferView on_device, bool read, bool written);

  /// Whether the call reads at most one tensor and writes at most one: only such an operation runs in pieces.
  [[nodiscard]] bool canGoInPieces() const noexcept {
    return to_host_.size() <= 1 && to_device_.size() <= 1;
  }
  /// Bytes of device memory that encode() needs for the encoded input and its overflow counter.
  [[nodiscard]] static size_t encodedRoom(Codec codec, int64_t numel, int64_t parts);
  /// Encodes it on the caller's stream: `parts` runs of `numel` values. `back`: the one tensor that is written comes back encoded, and is
  /// decoded. Returns the host memory for it; the engine works at its beginning.
  [[nodiscard]] BufferView encode(Codec codec, std::byte* room, int64_t numel, int64_t parts, bool back);
  /// None unless encode() was called.
  [[nodiscard]] Codec codec() const noexcept {
    return encoded_.codec;
  }
  /// How many finite values became infinite in encode(). Valid when the encoded bytes are on the host.
  [[nodiscard]] size_t overflows() const;

  /// Whether anything is copied to the host.
  [[nodiscard]] bool reads() const noexcept {
    return !to_host_.empty();
  }
  using Ready = cuda::Stager::Ready;
  /// Starts the copies to the host, behind the caller's stream. `ready` is called on another thread: once, or, if the operation runs
  /// in pieces (`flow`), for each piece that it reads. It is not called if this throws.
  void toHost(const PieceFlow* flow, Ready ready);
  /// For PieceFlow::onLeave, on any thread: until toDevice() or stop(), the pool starts the copy of a piece of the output to the device.
  [[nodiscard]] static PieceFlow::Leave leaving(const std::shared_ptr<CudaCopies>& copies, CallbackPool& pool);
  /// Starts the remaining copies to the device.
  void toDevice();
  /// No more copies to the device. True if some were started: they are on stream(), and users of the tensors have to wait for it.
  [[nodiscard]] bool stop() noexcept;
  /// Makes the caller's current stream wait for the copies that toDevice() has started.
  void orderCaller() const override;
  [[nodiscard]] c10::Stream stream() const override {
    return device_->in();
  }
  void keepFor(const std::vector<at::Tensor>& tensors) const override;

  [[nodiscard]] const CudaDevice& device() const noexcept {
    return *device_;
  }

 private:
  void leave(size_t piece);

  const std::shared_ptr<CudaDevice> device_;
  std::vector<cuda::Stager::Copy> to_host_;
  std::vector<cuda::Stager::Copy> to_device_;
  std::vector<void*> blocks_;
  cuda::CodecArgs encoded_; ///< of encode(); codec None before
  bool back_ = false; ///< the result comes back encoded
  const std::byte* overflows_ = nullptr; ///< on the host, after the encoded bytes
  LeafMutex
      mutex_; ///< guards the rest; held while copies to the device are started, of which no thread waits for the end
  bool copied_ = false; ///< copies to the device were started: it may read the blocks
  bool over_ = false; ///< toDevice() or stop() was called
  std::vector<PieceFlow::Piece> pieces_; ///< of the output; empty unless the operation runs in pieces
  std::vector<bool> left_; ///< by piece: its copy was started
};

} // namespace pycomm
