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
#include "device/device_runtime.h"
#include "device/stager.h"
#include "engine/loop/callback_pool.h"
#include "engine/operation/piece_flow.h"

namespace pycomm {

/// One CUDA device of a process group in TCP mode: its pinned memory, and two side streams of torch's pool, one a direction.
/// torch's streams are reached through its device-neutral interface alone, so that the extension needs no CUDA to build or load.
class CudaDevice {
 public:
  CudaDevice(cuda::DeviceRuntime& runtime, c10::Device device);
  ~CudaDevice();
  /// Ends the stager's thread, after at most `drain_for`; what is copied to the host from then on fails.
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
  /// The stream that copies to the device, and what runs behind them.
  [[nodiscard]] c10::Stream in() const noexcept {
    return in_;
  }
  [[nodiscard]] void* sideStream() const; ///< in(), as CUDA knows it
  /// The calling thread's current stream, as CUDA knows it.
  [[nodiscard]] void* callersStream() const;
  void refuseCapture() const; ///< throws Error(Unsupported) while the caller's stream is captured

 private:
  cuda::DeviceRuntime& runtime_; ///< lives as long as the process
  const c10::Device device_;
  const c10::Stream out_;
  const c10::Stream in_;
  std::unique_ptr<cuda::Stager> stager_;
};

/// What a caller's stream goes on behind: copies to the device, or NCCL's kernels.
class CudaOrder {
 public:
  virtual ~CudaOrder() = default;
  /// The caller's current stream goes on behind it.
  virtual void orderCaller() const = 0;
  /// The side stream that it is on.
  [[nodiscard]] virtual c10::Stream stream() const = 0;
  /// record_stream: the allocator reuses these tensors' memory only after the side stream's work so far.
  virtual void keepFor(const std::vector<at::Tensor>& tensors) const = 0;
};

void keepForStream(const std::vector<at::Tensor>& tensors, const c10::Stream& stream);

/// Drops a reference, perhaps the last, to a future that is behind these. Torch's destructor makes the device of each of its events the
/// current one, and ends the process if a device is so broken that it cannot be; then the future is left where it is.
void letGo(
    c10::intrusive_ptr<c10::ivalue::Future> future,
    const std::vector<std::shared_ptr<const CudaOrder>>& behind) noexcept;

/// In a catch block: what was caught, as an error of pycomm's. Torch throws errors of its own where a device is broken.
[[nodiscard]] ErrorRecord caughtOnDevice();

/// For destructors: runs `body`, which does not throw, with the device as the current one; if the device is so broken that it cannot
/// be made that, without.
template <typename Body>
void onDeviceInAnyCase(c10::Device device, const Body& body) noexcept {
  std::optional<c10::DeviceGuard> guard;
  try {
    guard.emplace(device);
  } catch (const std::exception&) { // torch's; what is given back there is lost with the device
  }
  body();
}

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

  /// Whether what is read and what is written are one tensor each, at most: only such an operation runs in pieces.
  [[nodiscard]] bool canGoInPieces() const noexcept {
    return to_host_.size() <= 1 && to_device_.size() <= 1;
  }
  /// Bytes of device memory that encode() needs for the encoded input and its overflow counter.
  [[nodiscard]] static size_t encodedRoom(Codec codec, int64_t numel, int64_t parts);
  /// Encodes it on the caller's stream: `parts` runs of `numel` values. `back`: the one tensor that is written comes back encoded and
  /// is decoded. Gives the host memory for it, the beginning of which the engine works in.
  [[nodiscard]] BufferView encode(Codec codec, std::byte* room, int64_t numel, int64_t parts, bool back);
  /// None unless encode() was called.
  [[nodiscard]] Codec codec() const noexcept {
    return encoded_.codec;
  }
  /// How many finite values became infinite in encode(). Once they are on the host.
  [[nodiscard]] size_t overflows() const;

  /// Something is copied to the host.
  [[nodiscard]] bool reads() const noexcept {
    return !to_host_.empty();
  }
  using Ready = cuda::Stager::Ready;
  /// Starts the copies to the host, behind the caller's stream. `ready` is called on another thread: once; of an operation that runs
  /// in pieces (`flow`) for each piece that it reads. Not if this throws.
  void toHost(const PieceFlow* flow, Ready ready);
  /// For PieceFlow::onLeave, and any thread: has the pool start the copies of pieces of the output to the device, until toDevice() or
  /// stop().
  [[nodiscard]] static PieceFlow::Leave leaving(const std::shared_ptr<CudaCopies>& copies, CallbackPool& pool);
  /// Starts the copies to the device of what has not left in pieces.
  void toDevice();
  /// Nothing is copied to the device from here on. True if something was: it is on stream(), whichever stream uses the tensors next.
  [[nodiscard]] bool stop() noexcept;
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
  void leave(size_t piece);

  const std::shared_ptr<CudaDevice> device_;
  std::vector<cuda::Stager::Copy> to_host_;
  std::vector<cuda::Stager::Copy> to_device_;
  std::vector<void*> blocks_;
  cuda::CodecArgs encoded_; ///< of encode(); codec None before
  bool back_ = false; ///< the result comes back encoded
  const std::byte* overflows_ = nullptr; ///< on the host, after the encoded bytes
  std::mutex mutex_; ///< guards the rest
  bool copied_ = false; ///< copies to the device were started: it may read the blocks
  bool over_ = false; ///< toDevice() or stop() was called
  std::vector<PieceFlow::Piece> pieces_; ///< of the output; empty unless the operation runs in pieces
  std::vector<bool> left_; ///< by piece: its copy was started
};

} // namespace pycomm
