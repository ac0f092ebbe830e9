#include "c10d/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty.h>

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

/// Whether the parts are one run of memory, in order.
bool areOneRun(const std::vector<at::Tensor>& parts) {
  const std::byte* next = nullptr;
  for (const at::Tensor& part : parts) {
    if (!isPlain(part)) {
      return false;
    }
    if (part.numel() == 0) {
      continue;
    }
    const BufferView bytes = bytesOf(part, part.numel());
    if (next != nullptr && (bytes.ptr != next || !part.is_alias_of(parts.front()))) {
      return false;
    }
    next = bytes.ptr + bytes.nbytes;
  }
  return true;
}

BufferView viewOfRun(const std::vector<at::Tensor>& parts) {
  for (const at::Tensor& part : parts) {
    if (part.numel() > 0) {
      return bytesOf(part, totalNumel(parts));
    }
  }
  return {};
}

/// Moves bytes and nothing else: no gradients, no version counters, and tensors made in inference mode are welcome, as they are to a
/// collective that writes their memory directly.
void copy(const at::Tensor& to, const at::Tensor& from) {
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

BufferView Staging::in(const at::Tensor& tensor) {
  if (isPlain(tensor)) {
    return bytesOf(tensor, tensor.numel());
  }
  const at::Tensor made = temporary(tensor, tensor.numel());
  copy(made.view(tensor.sizes()), tensor);
  return bytesOf(made, made.numel());
}

BufferView Staging::out(const at::Tensor& tensor) {
  if (isPlain(tensor)) {
    return bytesOf(tensor, tensor.numel());
  }
  const at::Tensor made = temporary(tensor, tensor.numel());
  copies_.push_back({made, {tensor}});
  return bytesOf(made, made.numel());
}

BufferView Staging::inOut(const at::Tensor& tensor) {
  const BufferView view = out(tensor);
  if (!isPlain(tensor)) {
    copy(temporaries_.back().view(tensor.sizes()), tensor);
  }
  return view;
}

ConstBufferView Staging::in(const std::vector<at::Tensor>& parts) {
  if (areOneRun(parts)) {
    return viewOfRun(parts);
  }
  const at::Tensor made = temporary(parts.front(), totalNumel(parts));
  int64_t begin = 0;
  for (const at::Tensor& part : parts) {
    copy(made.narrow(0, begin, part.numel()).view(part.sizes()), part);
    begin += part.numel();
  }
  return bytesOf(made, made.numel());
}

BufferView Staging::out(const std::vector<at::Tensor>& parts) {
  if (areOneRun(parts)) {
    return viewOfRun(parts);
  }
  const at::Tensor made = temporary(parts.front(), totalNumel(parts));
  copies_.push_back({made, parts});
  return bytesOf(made, made.numel());
}

std::vector<BufferView> Staging::apart(const std::vector<at::Tensor>& parts) {
  std::vector<BufferView> views;
  if (areOneRun(parts)) {
    return views;
  }
  for (const at::Tensor& part : parts) {
    if (!isPlain(part)) {
      return {};
    }
    views.push_back(bytesOf(part, part.numel()));
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
        copy(part, each.from.narrow(0, begin, part.numel()).view(part.sizes()));
        begin += part.numel();
      }
    }
  };
}

} // namespace pycomm
