// The second half of a bucket's step: what goes with it, and what becomes of the sums.
#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "base/error.h"
#include "c10d/dtypes.h"
#include "ddp/bucket.h"
#include "numeric/convert.h"

namespace pycomm {

void Bucket::seal() {
  if (device_.has_value()) {
    sealOnDevice();
    return;
  }
  if (!scale_.has_value()) {
    return;
  }
  auto* tail = static_cast<at::Half*>(wire_.data_ptr()) + numel_;
  std::fill_n(tail, layout_.world_size, at::Half(0.0F));
  tail[layout_.rank] = at::Half(WireScale::slotValue(max_abs_bits_));
}

std::vector<float> Bucket::scaleSlots() const {
  const at::Tensor slots = wire_.narrow(0, static_cast<int64_t>(numel_), layout_.world_size).cpu();
  const auto* tail = static_cast<const at::Half*>(slots.const_data_ptr());
  return {tail, tail + layout_.world_size};
}

bool Bucket::settled() const {
  if (!scale_.has_value()) {
    return true;
  }
  WireScale trial = *scale_;
  try {
    return trial.judge(scaleSlots()) != WireScale::Outcome::PackAgain;
  } catch (const Error&) { // judge() says it, where the bucket is awaited
    return false;
  }
}

Bucket::Verdict Bucket::judge() {
  if (!scale_.has_value()) {
    return Verdict::Good;
  }
  const int exponent_before = scale_->exponent();
  switch (scale_->judge(scaleSlots())) {
    case WireScale::Outcome::Good:
      return Verdict::Good;
    case WireScale::Outcome::NonFinite:
      return Verdict::NonFinite;
    case WireScale::Outcome::PackAgain:
      break;
  }
  // The local gradients are still where they were: unpack() is what overwrites them.
  const at::NoGradGuard no_grad;
  max_abs_bits_ = 0;
  for (const Slot& slot : slots_) {
    if (!device_.has_value()) { // there seal() packs
      packWire(slot);
    }
  }
  seal();
  return scale_->exponent() < exponent_before ? Verdict::RepackedAfterOverflow : Verdict::RepackedAfterUnderflow;
}

void Bucket::takeHookResult(const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  if (layout_.sparse) {
    TORCH_CHECK(
        result.is_sparse() && result.sizes() == slots_[0].param.sizes(),
        "the comm hook was given a sparse gradient and did not return a sparse tensor of its shape");
    home_ = result;
    return;
  }
  TORCH_CHECK(
      result.numel() == home_.numel(),
      "the comm hook returned ",
      result.numel(),
      " elements for a bucket of ",
      home_.numel());
  const bool in_place = result.dim() == 1 && result.scalar_type() == dtype_ && result.is_alias_of(home_) &&
      result.data_ptr() == home_.data_ptr() && result.is_contiguous() && !result.is_neg() && !result.is_conj();
  if (!in_place) {
    home_.copy_(result.reshape({-1}));
  }
}

void Bucket::unpack(const std::vector<size_t>& slots) {
  if (fuses()) {
    unpackOnDevice(slots);
    return;
  }
  for (const size_t slot : slots) {
    unpackOne(slot);
  }
}

void Bucket::unpackOne(size_t index) {
  const at::NoGradGuard no_grad;
  Slot& slot = slots_[index];
  at::Tensor& grad = slot.param.mutable_grad();
  if (layout_.sparse) {
    grad = home_;
    return;
  }
  if (cast()) {
    unpackWire(slot);
    return;
  }
  static_cast<void>(gradientOf(slot));
  if (!isHome(grad, slot)) {
    grad.copy_(slot.view);
  }
}

void Bucket::unpackWire(Slot& slot) {
  at::Tensor& grad = gradientOf(slot);
  if (slot.numel == 0) {
    return;
  }
  const float factor = scale_.has_value() ? scale_->unpackFactor(divisor_) : 1.0F / static_cast<float>(divisor_);
  const bool direct = grad.scalar_type() == dtype_ && isPlain(grad, slot);
  at::Tensor target = direct ? grad : at::empty_strided(slot.param.sizes(), slot.strides, grad.options().dtype(dtype_));
  const auto* in = static_cast<const char*>(wire_.const_data_ptr()) + slot.offset * wire_.element_size();
  convert(toDType(dtype_), target.data_ptr(), toDType(wire_.scalar_type()), in, slot.numel, factor);
  if (direct) {
    bumpVersion(grad);
  } else {
    grad.copy_(target);
  }
}

} // namespace pycomm
