#include "c10d/cuda_staging.h"

#include <ATen/core/TensorBody.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "c10d/raising.h"

namespace pycomm {
namespace {

using cuda::Stager;

c10::impl::VirtualGuardImpl guardOf(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

void* nativeOf(const c10::Stream& stream) {
  return guardOf(stream.device()).getStreamNativeHandle(stream);
}

Stager::Copy partOf(const Stager::Copy& whole, const PieceFlow::Piece& piece) {
  return {
      static_cast<std::byte*>(whole.device) + piece.offset,
      static_cast<std::byte*>(whole.host) + piece.offset,
      piece.nbytes};
}

} // namespace

CudaDevice::CudaDevice(cuda::DeviceRuntime& runtime, c10::Device device)
    : runtime_(runtime),
      device_(device),
      out_(guardOf(device).getStreamFromGlobalPool(device)),
      in_(guardOf(device).getStreamFromGlobalPool(device)) {
  const c10::DeviceGuard guard(device_);
  runtime_.checkDevice();
  stager_ = std::make_unique<Stager>(runtime_, device.index(), nativeOf(out_), nativeOf(in_));
}

CudaDevice::~CudaDevice() {
  onDeviceInAnyCase(device_, [this] { stager_.reset(); });
}

void CudaDevice::stop(std::chrono::milliseconds drain_for) {
  stager_->stop(drain_for);
}

void* CudaDevice::sideStream() const {
  return nativeOf(in_);
}

void* CudaDevice::callersStream() const {
  return nativeOf(guardOf(device_).getStream(device_));
}

void CudaDevice::refuseCapture() const {
  const c10::DeviceGuard guard(device_);
  if (runtime_.isCapturing(callersStream())) {
    throw Error(
        ErrorCode::Unsupported,
        "A collective of CUDA tensors was called while a CUDA graph is captured: the graph could not repeat what goes over the "
        "network.",
        "keep collectives of pycomm outside of torch.cuda.graph()");
  }
}

void keepForStream(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.device() == stream.device() && tensor.has_storage()) {
      guardOf(stream.device()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
  }
}

ErrorRecord caughtOnDevice() {
  ErrorRecord record;
  record.code = ErrorCode::SystemError;
  try {
    throw;
  } catch (const Error& error) {
    return error.record();
  } catch (const std::bad_alloc&) {
    return outOfMemory();
  } catch (const c10::Error& error) {
    record.cause = error.what_without_backtrace();
  } catch (const std::exception& error) {
    record.cause = error.what();
  }
  record.summary = "torch failed on a device of this rank.";
  record.hint = "CUDA_LAUNCH_BLOCKING=1 shows which call broke the device; nvidia-smi shows whether it is there";
  return record;
}

CudaCopies::~CudaCopies() {
  onDeviceInAnyCase(device_->device(), [this] {
    for (void* block : blocks_) {
      try {
        copied_ ? device_->stager().giveAfterCopies(block) : device_->stager().give(block);
      } catch (const std::exception&) { // a broken device needs no block back
      }
    }
  });
}

BufferView CudaCopies::host(BufferView on_device, bool read, bool written) {
  const c10::DeviceGuard guard(device_->device());
  void* const block = device_->stager().take(on_device.nbytes);
  blocks_.push_back(block);
  const Stager::Copy copy = {on_device.ptr, block, on_device.nbytes};
  if (on_device.nbytes > 0) {
    if (read) {
      to_host_.push_back(copy);
    }
    if (written) {
      to_device_.push_back(copy);
    }
  }
  return {static_cast<std::byte*>(block), on_device.nbytes};
}

namespace {

size_t encodedTotal(Codec codec, int64_t numel, int64_t parts) {
  return static_cast<size_t>(encodedNbytes(codec, numel) * parts);
}

} // namespace

// Behind what is encoded, at a multiple of 8, lies a number of 8 bytes: how many values became infinite.
size_t CudaCopies::encodedRoom(Codec codec, int64_t numel, int64_t parts) {
  return (encodedTotal(codec, numel, parts) + 7) / 8 * 8 + sizeof(uint64_t);
}

BufferView CudaCopies::encode(Codec codec, std::byte* room, int64_t numel, int64_t parts, bool back) {
  const c10::DeviceGuard guard(device_->device());
  const Stager::Copy values = to_host_.front();
  const size_t room_nbytes = encodedRoom(codec, numel, parts);
  const size_t count_at = room_nbytes - sizeof(uint64_t);
  // The block that host() took for the plain values is not needed.
  blocks_.erase(std::find(blocks_.begin(), blocks_.end(), values.host));
  device_->stager().give(values.host);
  void* const block = device_->stager().take(room_nbytes);
  blocks_.push_back(block);
  auto* const host = static_cast<std::byte*>(block);
  std::memset(host + count_at, 0, sizeof(uint64_t));
  void* const stream = device_->callersStream();
  device_->runtime().copy(room + count_at, host + count_at, sizeof(uint64_t), stream);
  cuda::CodecArgs args;
  args.codec = codec;
  args.numel = static_cast<uint64_t>(numel);
  args.parts = static_cast<uint64_t>(parts);
  args.values = static_cast<float*>(values.device);
  args.encoded = reinterpret_cast<uint8_t*>(room);
  args.overflows = reinterpret_cast<unsigned long long*>(room + count_at);
  device_->runtime().encode(args, stream);
  to_host_ = {{room, block, room_nbytes}};
  if (back) {
    to_device_ = {{room, block, encodedTotal(codec, numel, parts)}};
  }
  back_ = back;
  encoded_ = args;
  overflows_ = host + count_at;
  return {host, room_nbytes};
}

size_t CudaCopies::overflows() const {
  uint64_t count = 0;
  if (overflows_ != nullptr) {
    std::memcpy(&count, overflows_, sizeof count);
  }
  return count;
}

void CudaCopies::toHost(const PieceFlow* flow, Ready ready) {
  std::vector<Stager::Copy> copies = to_host_;
  if (flow != nullptr) {
    pieces_ = flow->leaving();
    left_.assign(pieces_.size(), false);
    copies.clear();
    for (size_t i = 0; !to_host_.empty() && i < flow->arriving().size(); ++i) {
      copies.push_back(partOf(to_host_.front(), flow->arriving()[i]));
    }
  }
  const bool apart = flow != nullptr && !copies.empty();
  const c10::DeviceGuard guard(device_->device());
  device_->stager().toHost(copies, device_->callersStream(), std::move(ready), apart);
}

// Not on the data loop, as CUDA's calls may take their time; by one thread of the pool at a time, however many pieces there are. The
// engine remembers operations for longer than pinned memory should be kept, so what hangs on one holds no more than a weak pointer.
PieceFlow::Leave CudaCopies::leaving(const std::shared_ptr<CudaCopies>& copies, CallbackPool& pool) {
  struct Queue {
    LeafMutex mutex; ///< guards the rest
    std::vector<size_t> pieces;
    bool served = false; ///< a task of the pool takes them
  };
  const auto queue = std::make_shared<Queue>();
  const auto serve = [queue, weak = std::weak_ptr<CudaCopies>(copies)] {
    const auto kept = weak.lock();
    std::vector<size_t> pieces;
    for (;;) {
      pieces.clear();
      {
        const std::lock_guard lock(queue->mutex);
        pieces.swap(queue->pieces);
        queue->served = !pieces.empty();
      }
      if (pieces.empty()) {
        return;
      }
      for (size_t piece : pieces) {
        if (kept != nullptr) {
          kept->leave(piece);
        }
      }
    }
  };
  return [serve, queue, &pool](size_t piece) {
    {
      const std::lock_guard lock(queue->mutex);
      queue->pieces.push_back(piece);
      if (std::exchange(queue->served, true)) {
        return;
      }
    }
    pool.submit(CallbackPool::Task(serve));
  };
}

void CudaCopies::leave(size_t piece) {
  const std::lock_guard lock(mutex_);
  if (over_ || to_device_.empty()) {
    return;
  }
  copied_ = true;
  onDeviceInAnyCase(device_->device(), [&] {
    try {
      device_->stager().toDevice({partOf(to_device_.front(), pieces_[piece])});
      left_[piece] = true;
    } catch (const std::exception&) { // toDevice() tries again, and reports why it fails
    }
  });
}

void CudaCopies::toDevice() {
  const std::lock_guard lock(mutex_);
  over_ = true;
  copied_ = true;
  std::vector<Stager::Copy> copies;
  for (size_t i = 0; !to_device_.empty() && i < pieces_.size(); ++i) {
    if (!left_[i]) {
      copies.push_back(partOf(to_device_.front(), pieces_[i]));
    }
  }
  const std::vector<Stager::Copy>& rest = pieces_.empty() ? to_device_ : copies;
  const c10::DeviceGuard guard(device_->device());
  device_->stager().toDevice(rest);
  if (back_) {
    cuda::CodecArgs args = encoded_;
    args.parts = 1;
    device_->runtime().decode(args, device_->sideStream());
  }
}

bool CudaCopies::stop() noexcept {
  const std::lock_guard lock(mutex_);
  over_ = true;
  return copied_;
}

void CudaCopies::orderCaller() const {
  const c10::DeviceGuard guard(device_->device());
  device_->stager().waitOn(device_->callersStream());
}

void CudaCopies::keepFor(const std::vector<at::Tensor>& tensors) const {
  keepForStream(tensors, device_->in());
}

} // namespace pycomm
