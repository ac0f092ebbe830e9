#include "ddp/bucket_memory.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>

#include <utility>

#include "ddp/grad_memory.h"

namespace pycomm {

BucketMemory::BucketMemory(
    const std::vector<at::Tensor>& params,
    const std::vector<size_t>& indices,
    Options options,
    FlatMemory& source)
    : options_(options), source_(&source), dtype_(params.at(indices.at(0)).scalar_type()) {
  for (const size_t index : indices) {
    Slot slot;
    slot.param = params.at(index);
    slot.index = index;
    slot.offset = numel_;
    slot.numel = static_cast<size_t>(slot.param.numel());
    slot.strides = gradStrides(slot.param);
    numel_ += slot.numel;
    slots.push_back(std::move(slot));
  }
  if (options_.sparse) {
    return;
  }
  if (options_.cast.has_value()) {
    const auto as_cast = slots[0].param.options().requires_grad(false).dtype(*options_.cast);
    const size_t travelling = numel_ + options_.tail;
    FlatMemory::Flat flat = options_.in_place ? source_->zerosToShare(travelling, as_cast)
                                              : FlatMemory::Flat{source_->zeros(travelling, as_cast)};
    cast = std::move(flat.tensor);
    shared_ = flat.shared;
  }
  if (!cast.defined() || options_.grads_are_views) {
    allocateHome();
  }
}

void BucketMemory::allocateHome() {
  const auto options = slots[0].param.options().requires_grad(false);
  if (!cast.defined() && options_.in_place) {
    FlatMemory::Flat flat = source_->zerosToShare(numel_, options);
    home = std::move(flat.tensor);
    shared_ = flat.shared;
  } else {
    home = source_->zeros(numel_, options);
  }
  for (Slot& slot : slots) {
    slot.view = home.as_strided(slot.param.sizes(), slot.strides, static_cast<int64_t>(slot.offset));
  }
}

at::Tensor BucketMemory::travelling() const {
  if (cast.defined()) {
    return cast;
  }
  return home.is_complex() && !options_.sparse ? at::view_as_real(home) : home;
}

at::Tensor BucketMemory::tail() const {
  const auto length = static_cast<int64_t>(options_.tail);
  return length == 0 ? at::Tensor() : cast.narrow(0, static_cast<int64_t>(numel_), length);
}

size_t BucketMemory::gradientNbytes() const {
  if (!options_.sparse) {
    return numel_ * c10::elementSize(dtype_);
  }
  return home.defined() ? home._indices().nbytes() + home._values().nbytes() : 0;
}

size_t BucketMemory::sharedNbytes() const {
  return shared_ ? travelling().nbytes() : 0;
}

void BucketMemory::zero() {
  if (cast.defined()) {
    cast.zero_();
  } else {
    allocateHome();
  }
}

bool BucketMemory::isPlain(const at::Tensor& grad, const Slot& slot) {
  return isPlainIn(grad, slot.strides);
}

bool BucketMemory::isHome(const at::Tensor& grad, const Slot& slot) {
  return sameMemory(grad, slot.view, slot.strides);
}

at::Tensor& BucketMemory::gradientOf(const Slot& slot) const {
  at::Tensor& grad = slot.param.mutable_grad();
  const bool views = options_.grads_are_views;
  if (views && cast.defined() && (!grad.defined() || grad.scalar_type() == dtype_)) {
    grad = slot.view;
  } else if (!grad.defined()) {
    grad = views ? slot.view : emptyLike(slot, slot.param.options().requires_grad(false));
  }
  return grad;
}

at::Tensor BucketMemory::emptyLike(const Slot& slot, const at::TensorOptions& options) {
  return at::empty_strided(slot.param.sizes(), slot.strides, options);
}

void BucketMemory::bumpVersion(const at::Tensor& written) {
  if (!written.is_inference()) {
    written.unsafeGetTensorImpl()->bump_version();
  }
}

} // namespace pycomm
