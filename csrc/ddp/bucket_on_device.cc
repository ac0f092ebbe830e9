// What a bucket of CUDA gradients does: all slots are packed by seal() and unpacked together, one kernel each.
#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>
#include <utility>

#include "ddp/bucket.h"

namespace pycomm {

bool Bucket::fuses() const noexcept {
  return device_.has_value() && !layout_.sparse && (cast() || DeviceBucket::packsAsItIs(dtype_));
}

at::ScalarType Bucket::kernelType() const {
  return DeviceBucket::kernelType(dtype_, cast() ? wire_.scalar_type() : dtype_);
}

void Bucket::sealOnDevice() {
  const at::NoGradGuard no_grad;
  device_->join();
  if (fuses()) {
    packOnDevice();
  }
}

// A gradient of another dtype or memory order, or with a negation pending, goes through a copy. In place where .grad is the bucket's own memory.
void Bucket::packOnDevice() {
  const at::ScalarType type = kernelType();
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> originals; // the copy reads them on this stream, whatever stream they were made on
  std::vector<size_t> numels;
  for (const Slot& slot : slots_) {
    at::Tensor grad = shadow_ ? at::Tensor() : slot.param.grad();
    if (grad.defined() && (grad.scalar_type() != type || !isPlain(grad, slot))) {
      originals.push_back(grad);
      grad = at::empty_strided(slot.param.sizes(), slot.strides, grad.options().dtype(type)).copy_(grad);
    }
    gradients.push_back(std::move(grad));
    numels.push_back(slot.numel);
  }
  device_->keep(originals);
  if (cast()) {
    const at::Tensor stats = scale_.has_value() ? device_->newStats() : at::Tensor();
    device_->pack(gradients, numels, type, wire_, scale_.has_value() ? scale_->packFactor() : 1.0F, stats);
    device_->keep(gradients);
    if (scale_.has_value()) {
      writeScaleSlot(stats.narrow(0, DeviceBucket::kLargest, 1));
    }
    return;
  }
  device_->pack(gradients, numels, type, home_, layout_.hook_averages ? 1.0F : 1.0F / static_cast<float>(divisor_), {});
  device_->keep(gradients);
  for (const Slot& slot : slots_) {
    at::Tensor& grad = slot.param.mutable_grad();
    if (layout_.grads_are_views && !shadow_ && grad.defined()) {
      grad = slot.view;
    }
  }
}

// WireScale::slotValue() of the bits, where they are: reading them here would wait for the device in the middle of backward.
void Bucket::writeScaleSlot(const at::Tensor& largest_bits) {
  const at::Tensor largest = largest_bits.view(at::kFloat);
  const at::Tensor exponent = std::get<1>(at::frexp(largest));
  const at::Tensor zero = at::zeros_like(largest);
  const at::Tensor size = at::where(largest.eq(0), zero, exponent.to(at::kFloat).add(WireScale::kBias));
  const at::Tensor value = at::where(at::isfinite(largest), size, zero.add(WireScale::kNonFiniteCode));
  const at::Tensor tail = wire_.narrow(0, static_cast<int64_t>(numel_), layout_.world_size);
  tail.zero_();
  tail.narrow(0, layout_.rank, 1).copy_(value);
}

void Bucket::unpackOnDevice(const std::vector<size_t>& wanted) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = kernelType();
  std::vector<at::Tensor> targets(slots_.size());
  std::vector<size_t> numels;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies; // to, from
  for (const Slot& slot : slots_) {
    numels.push_back(slot.numel);
  }
  bool any = false;
  for (const size_t index : wanted) {
    Slot& slot = slots_[index];
    at::Tensor& grad = gradientOf(slot);
    if (!cast() && isHome(grad, slot)) {
      continue; // it has the result
    }
    at::Tensor target = grad;
    if (grad.scalar_type() != type || !isPlain(grad, slot)) {
      target = at::empty_strided(slot.param.sizes(), slot.strides, grad.options().dtype(type));
      copies.emplace_back(grad, target);
    } else {
      bumpVersion(grad);
    }
    targets[index] = target;
    any = true;
  }
  if (!any) {
    return;
  }
  float factor = 1.0F;
  if (cast()) {
    factor = scale_.has_value() ? scale_->unpackFactor(divisor_) : 1.0F / static_cast<float>(divisor_);
  }
  device_->unpack(targets, numels, type, cast() ? wire_ : home_, factor);
  for (const auto& [to, from] : copies) {
    to.copy_(from);
  }
}

} // namespace pycomm
