#include "c10d/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"

namespace pycomm {
namespace {

/// Whether the tensor's memory holds its elements in logical order, as they are: a conjugate view's are not.
bool isPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

BufferView bytesOf(const at::Tensor& plain, int64_t numel) {
  return {static_cast<std::byte*>(plain.data_ptr()), static_cast<size_t>(numel) * plain.element_size()};
}

int64_t totalNumel(const std::vector<at::Tensor>& parts) {
  int64_t total = 0;
  for (const at::Tensor& part : parts) {
    total += part.numel();
  }
  return total;
}

/// Of those that have elements; an empty one may have any memory. If none has any, the first of all.
const at::Tensor& firstOf(const std::vector<at::Tensor>& parts) {
  const auto found = std::find_if(parts.begin(), parts.end(), [](const at::Tensor& part) { return part.numel() > 0; });
  return found == parts.end() ? parts.front() : *found;
}

/// Whether the parts are one run of memory, in order: that of firstOf().
bool areOneRun(const std::vector<at::Tensor>& parts) {
  const at::Tensor& first = firstOf(parts);
  const std::byte* next = nullptr;
  for (const at::Tensor& part : parts) {
    if (!isPlain(part)) {
      return false;
    }
    if (part.numel() == 0) {
      continue;
    }
    const BufferView bytes = bytesOf(part, part.numel());
    if (next != nullptr && (bytes.ptr != next || !part.is_alias_of(first))) {
      return false;
    }
    next = bytes.ptr + bytes.nbytes;
  }
  return true;
}

/// Moves bytes and nothing else: no gradients, no version counters, and tensors made in inference mode are welcome, as they are to a
/// collective that writes their memory directly.
void copyElements(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  to.copy_(from);
}

} // namespace

at::Tensor Staging::temporary(const at::Tensor& like, int64_t numel) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::Tensor made = at::empty({numel}, at::TensorOptions().dtype(like.dtype()).device(like.device()));
  temporaries_.push_back(made);
  return made;
}

c10::Device Staging::oneDevice(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (device_.value_or(device) != device) {
    throw Error(
        ErrorCode::InvalidArgument,
        "The tensors of one collective are on " + device_->str() + " and on " + device.str() + ".",
        "move them to one device");
  }
  device_ = device;
  return device;
}

BufferView Staging::onHost(const at::Tensor& tensor, BufferView view, bool read, bool written) {
  const c10::Device device = oneDevice(tensor);
  storages_.push_back(tensor.storage());
  if (device.is_cpu()) {
    return view;
  }
  if (may_use_nccl_ && cuda_ == nullptr && nccl_ == nullptr) {
    nccl_ = devices_->ncclAt(device, deadline_);
  }
  if (nccl_ != nullptr) {
    return view;
  }
  if (cuda_ == nullptr) {
    const auto on = devices_->at(device);
    on->refuseCapture();
    cuda_ = std::make_shared<CudaCopies>(on);
  }
  return cuda_->host(view, read, written);
}

BufferView Staging::in(const at::Tensor& tensor) {
  if (isPlain(tensor)) {
    return onHost(tensor, bytesOf(tensor, tensor.numel()), true, false);
  }
  const at::Tensor made = temporary(tensor, tensor.numel());
  copyElements(made.view(tensor.sizes()), tensor);
  return onHost(made, bytesOf(made, made.numel()), true, false);
}

BufferView Staging::out(const at::Tensor& tensor) {
  return output(tensor, false);
}

BufferView Staging::inOut(const at::Tensor& tensor) {
  return output(tensor, true);
}

BufferView Staging::output(const at::Tensor& tensor, bool read) {
  if (isPlain(tensor)) {
    return onHost(tensor, bytesOf(tensor, tensor.numel()), read, true);
  }
  const at::Tensor made = temporary(tensor, tensor.numel());
  copies_.push_back({made, {tensor}});
  if (read) {
    copyElements(made.view(tensor.sizes()), tensor);
  }
  return onHost(made, bytesOf(made, made.numel()), read, true);
}

ConstBufferView Staging::in(const std::vector<at::Tensor>& parts) {
  if (areOneRun(parts)) {
    return onHost(firstOf(parts), bytesOf(firstOf(parts), totalNumel(parts)), true, false);
  }
  const at::Tensor made = temporary(parts.front(), totalNumel(parts));
  int64_t begin = 0;
  for (const at::Tensor& part : parts) {
    oneDevice(part);
    copyElements(made.narrow(0, begin, part.numel()).view(part.sizes()), part);
    begin += part.numel();
  }
  return onHost(made, bytesOf(made, made.numel()), true, false);
}

BufferView Staging::out(const std::vector<at::Tensor>& parts) {
  if (areOneRun(parts)) {
    return onHost(firstOf(parts), bytesOf(firstOf(parts), totalNumel(parts)), false, true);
  }
  for (const at::Tensor& part : parts) {
    oneDevice(part);
  }
  const at::Tensor made = temporary(parts.front(), totalNumel(parts));
  copies_.push_back({made, parts});
  return onHost(made, bytesOf(made, made.numel()), false, true);
}

std::vector<BufferView> Staging::apart(const std::vector<at::Tensor>& parts) {
  std::vector<BufferView> views;
  if (parts.empty() || !parts.front().is_cpu() || areOneRun(parts)) {
    return views;
  }
  for (const at::Tensor& part : parts) {
    oneDevice(part);
    if (!isPlain(part)) {
      return {};
    }
    views.push_back(bytesOf(part, part.numel()));
    storages_.push_back(part.storage());
  }
  return views;
}

std::function<void()> Staging::takeUnpack() {
  if (copies_.empty()) {
    return {};
  }
  return [copies = std::move(copies_)] {
    for (const CopyBack& each : copies) {
      int64_t begin = 0;
      for (const at::Tensor& part : each.to) {
        copyElements(part, each.from.narrow(0, begin, part.numel()).view(part.sizes()));
        begin += part.numel();
      }
    }
  };
}

} // namespace pycomm
