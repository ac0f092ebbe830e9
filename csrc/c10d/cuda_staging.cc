#include "c10d/cuda_staging.h"

#include <ATen/core/TensorBody.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace pycomm {
namespace {

c10::impl::VirtualGuardImpl guardOf(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

void* nativeOf(const c10::Stream& stream) {
  return guardOf(stream.device()).getStreamNativeHandle(stream);
}

using Ready = std::function<void(const std::optional<ErrorRecord>& failure)>;

/// Called once by the library, on its own thread.
void callReady(void* context, const PycommCudaError* failure) {
  const std::unique_ptr<Ready> ready(static_cast<Ready*>(context));
  std::optional<ErrorRecord> record;
  if (failure != nullptr) {
    record.emplace();
    record->code = static_cast<ErrorCode>(failure->code);
    record->summary = failure->summary;
    record->hint = failure->hint;
    record->cause = failure->cause;
  }
  (*ready)(record);
}

} // namespace

CudaDevice::CudaDevice(const PycommCudaTable& library, c10::Device device)
    : library_(library),
      device_(device),
      out_(guardOf(device).getStreamFromGlobalPool(device)),
      in_(guardOf(device).getStreamFromGlobalPool(device)) {
  callCuda(library_.stager_create, static_cast<int>(device.index()), nativeOf(out_), nativeOf(in_), &stager_);
}

CudaDevice::~CudaDevice() {
  library_.stager_destroy(stager_);
}

void* CudaDevice::sideStream() const {
  return nativeOf(in_);
}

void* CudaDevice::callersStream() const {
  return nativeOf(guardOf(device_).getStream(device_));
}

void CudaDevice::refuseCapture() const {
  int capturing = 0;
  callCuda(library_.is_capturing, callersStream(), &capturing);
  if (capturing != 0) {
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

CudaCopies::~CudaCopies() {
  for (void* block : blocks_) {
    PycommCudaError error; // a broken device needs no block back
    static_cast<void>(device_->library().stager_give(device_->stager(), block, copied_ ? 1 : 0, &error));
  }
}

BufferView CudaCopies::host(BufferView on_device, bool read, bool written) {
  void* block = nullptr;
  callCuda(device_->library().stager_take, device_->stager(), on_device.nbytes, &block);
  blocks_.push_back(block);
  const PycommCudaCopy copy = {on_device.ptr, block, on_device.nbytes};
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

void CudaCopies::toHost(Ready ready) {
  auto context = std::make_unique<Ready>(std::move(ready));
  callCuda(
      device_->library().stager_to_host,
      device_->stager(),
      static_cast<const PycommCudaCopy*>(to_host_.data()),
      to_host_.size(),
      device_->callersStream(),
      &callReady,
      static_cast<void*>(context.get()));
  static_cast<void>(context.release()); // callReady's now
}

void CudaCopies::toDevice() {
  copied_ = true;
  callCuda(
      device_->library().stager_to_device,
      device_->stager(),
      static_cast<const PycommCudaCopy*>(to_device_.data()),
      to_device_.size());
}

void CudaCopies::orderCaller() const {
  callCuda(device_->library().stager_wait_on, device_->stager(), device_->callersStream());
}

void CudaCopies::keepFor(const std::vector<at::Tensor>& tensors) const {
  keepForStream(tensors, device_->in());
}

} // namespace pycomm
