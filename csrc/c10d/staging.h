#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/buffer_view.h"
#include "c10d/cuda_devices.h"
#include "c10d/cuda_staging.h"

namespace pycomm {

/// The contiguous memory that the engine works in for the tensors of one call: a tensor's own, or a temporary.
///
/// Elements travel in logical (row-major) order whatever the strides, since ranks cannot know each other's. So a tensor in
/// another order (transposed, channels-last) costs a temporary of its size, a copy into it if it is read and a copy out of it if it is
/// written. A list with one tensor per rank costs the same, unless its tensors lie one behind the other in memory, as those of
/// torch.split() do.
///
/// The engine works in the CPU's memory: the views of CUDA tensors are of pinned memory, and takeCopies() copies between the two. If
/// NCCL runs the call, the views are of the device's memory. All of one call's tensors are on one device.
class Staging {
 public:
  /// `devices`: for tensors on a CUDA device; NCCL only if it can run this call.
  Staging(std::shared_ptr<CudaDevices> devices, bool may_use_nccl, Deadline deadline)
      : devices_(std::move(devices)), may_use_nccl_(may_use_nccl), deadline_(deadline) {}

  /// Of a tensor that is only read.
  [[nodiscard]] BufferView in(const at::Tensor& tensor);
  /// Of a tensor that is only written.
  [[nodiscard]] BufferView out(const at::Tensor& tensor);
  /// Of a tensor that is read and written.
  [[nodiscard]] BufferView inOut(const at::Tensor& tensor);
  [[nodiscard]] ConstBufferView in(const std::vector<at::Tensor>& parts);
  [[nodiscard]] BufferView out(const std::vector<at::Tensor>& parts);

  /// A view of each part's own memory, in order; none if a part is not plain, or if one view covers all parts.
  [[nodiscard]] std::vector<BufferView> apart(const std::vector<at::Tensor>& parts);

  /// The tensors that have to live as long as the views.
  [[nodiscard]] std::vector<at::Tensor> takeTemporaries() {
    return std::move(temporaries_);
  }
  /// The memory that the views are of: it has to live as long as they, whatever memory the program gives the tensors meanwhile.
  [[nodiscard]] std::vector<c10::Storage> takeStorages() {
    return std::move(storages_);
  }
  /// Between the CUDA device and pinned memory; null for tensors on the CPU.
  [[nodiscard]] std::shared_ptr<CudaCopies> takeCopies() {
    return std::move(cuda_);
  }
  /// The NCCL group that runs the call; null: the engine runs it.
  [[nodiscard]] std::shared_ptr<NcclGroup> takeNccl() {
    return std::move(nccl_);
  }
  /// Copies from temporaries to outputs, once the engine has written; empty if there is nothing to copy.
  [[nodiscard]] std::function<void()> takeUnpack();

 private:
  struct CopyBack {
    at::Tensor from; ///< flat
    std::vector<at::Tensor> to;
  };

  [[nodiscard]] BufferView output(const at::Tensor& tensor, bool read);
  [[nodiscard]] at::Tensor temporary(const at::Tensor& like, int64_t numel);

  /// The tensor's device. Throws Error(InvalidArgument) if the call has a tensor on another one.
  c10::Device oneDevice(const at::Tensor& tensor);
  /// `view` of memory of `tensor`'s device, or pinned memory that stands for it.
  [[nodiscard]] BufferView onHost(const at::Tensor& tensor, BufferView view, bool read, bool written);

  std::shared_ptr<CudaDevices> devices_;
  bool may_use_nccl_;
  Deadline deadline_;
  std::shared_ptr<NcclGroup> nccl_;
  std::shared_ptr<CudaCopies> cuda_;
  std::optional<c10::Device> device_; ///< of the tensors so far
  std::vector<at::Tensor> temporaries_;
  std::vector<c10::Storage> storages_;
  std::vector<CopyBack> copies_;
};

} // namespace pycomm
