#include "ddp/bucket.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_coalesced.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "c10d/dtypes.h"
#include "c10d/shared_tensors.h"
#include "ddp/grad_memory.h"
#include "ddp/page_tensors.h"
#include "numeric/convert.h"
#include "schedule/select.h"

namespace pycomm {
namespace {

constexpr size_t kSharedAtLeastNbytes = 32 << 10; // below, whole pages and a system call each cost more than a copy
constexpr size_t kBlock = 4096; // elements looked at and cast while they are in the first-level cache

at::Tensor emptySparse(const at::Tensor& param) {
  // One dimension is sparse, as in the gradients of embeddings: ranks must agree on that.
  const auto options = param.options().requires_grad(false);
  std::vector<int64_t> values = param.sizes().vec();
  values.at(0) = 0;
  const at::Tensor indices = at::empty({1, 0}, options.dtype(at::kLong));
  return at::_sparse_coo_tensor_unsafe(indices, at::empty(values, options), param.sizes())._coalesced_(true);
}

at::Tensor zeros(size_t numel, const at::TensorOptions& options) {
  const auto length = static_cast<int64_t>(numel);
  const bool on_cpu = options.device().is_cpu();
  return on_cpu ? zerosInPages(length, c10::typeMetaToScalarType(options.dtype())) : at::zeros({length}, options);
}

size_t sparseNbytes(const at::Tensor& tensor) {
  return tensor.defined() ? tensor._indices().nbytes() + tensor._values().nbytes() : 0;
}

} // namespace

void Bucket::bumpVersion(const at::Tensor& written) {
  if (!written.is_inference()) {
    written.unsafeGetTensorImpl()->bump_version();
  }
}

bool Bucket::isPlain(const at::Tensor& grad, const Slot& slot) {
  return isPlainIn(grad, slot.strides);
}

bool Bucket::isHome(const at::Tensor& grad, const Slot& slot) {
  return sameMemory(grad, slot.view, slot.strides);
}

// The parameter's .grad, made if there is none; where it shall be a view of home, it is.
at::Tensor& Bucket::gradientOf(Slot& slot) const {
  at::Tensor& grad = slot.param.mutable_grad();
  if (cast() && layout_.grads_are_views && (!grad.defined() || grad.scalar_type() == dtype_)) {
    grad = slot.view;
  } else if (!grad.defined()) {
    grad = layout_.grads_are_views
        ? slot.view
        : at::empty_strided(slot.param.sizes(), slot.strides, slot.param.options().requires_grad(false));
  }
  return grad;
}

Bucket::Bucket(const std::vector<at::Tensor>& params, const std::vector<size_t>& indices, const BucketLayout& layout)
    : layout_(layout), dtype_(params.at(indices.at(0)).scalar_type()) {
  for (const size_t index : indices) {
    Slot slot;
    slot.param = params.at(index);
    slot.index = index;
    slot.offset = numel_;
    slot.numel = static_cast<size_t>(slot.param.numel());
    slot.strides = gradStrides(slot.param);
    numel_ += slot.numel;
    slots_.push_back(std::move(slot));
  }
  divisor_ = layout.world_size;
  pending_ = slots_.size();
  if (!slots_[0].param.is_cpu()) {
    device_.emplace(layout.cuda_library, slots_[0].param.device());
  }
  if (layout.sparse) {
    return;
  }
  const at::ScalarType wire = layout.wire_dtype.value_or(dtype_);
  const bool scaled = layout.wire_dtype == at::kHalf;
  const bool travels_cast = wire != dtype_ || scaled;
  if (travels_cast) {
    const size_t tail = scaled ? static_cast<size_t>(layout.world_size) : 0;
    const auto options = slots_[0].param.options().requires_grad(false);
    wire_ = zerosToReduce(numel_ + tail, options.dtype(wire));
  }
  if (scaled) {
    scale_.emplace(layout.world_size, layout.scale_exponent);
  }
  if (!travels_cast || layout.grads_are_views) {
    allocateHome();
  }
  if (layout.error_feedback && layout.codec != Codec::None) {
    lost_ = zerosInPages(static_cast<int64_t>(numel_), at::kFloat);
  }
}

void Bucket::allocateHome() {
  const auto options = slots_[0].param.options().requires_grad(false);
  home_ = cast() ? zeros(numel_, options) : zerosToReduce(numel_, options);
  for (Slot& slot : slots_) {
    slot.view = home_.as_strided(slot.param.sizes(), slot.strides, static_cast<int64_t>(slot.offset));
  }
}

at::Tensor Bucket::zerosToReduce(size_t numel, const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  const size_t nbytes = numel * c10::elementSize(dtype);
  shared_ = false;
  // A comm hook's sums, encoded ones and those of a device do not go through memory that processes share.
  const bool travels_so = options.device().is_cpu() && !layout_.hook_averages && layout_.codec == Codec::None;
  if (layout_.reachable && travels_so && nbytes >= kSharedAtLeastNbytes) {
    try {
      at::Tensor shared = emptyShared({static_cast<int64_t>(numel)}, dtype);
      shared_ = true;
      return shared;
    } catch (const Error& error) { // as in a small container: it is copied on its way, and that is all
      log(LogLevel::Warn,
          "a gradient bucket of " + std::to_string(nbytes >> 10) +
              " KiB, and those that are made after it, lie in ordinary memory: " + error.record().summary +
              " They are copied on their way.");
      layout_.reachable = false;
    }
  }
  return zeros(numel, options);
}

at::Tensor Bucket::wire() const {
  if (cast()) {
    return wire_;
  }
  return home_.is_complex() && !layout_.sparse ? at::view_as_real(home_) : home_;
}

at::Tensor Bucket::lostOf(const Slot& slot) const {
  return lost_.as_strided(slot.param.sizes(), slot.strides, static_cast<int64_t>(slot.offset));
}

size_t Bucket::wireNbytes() const {
  if (layout_.sparse) {
    return gradientNbytes();
  }
  // The backend sends small tensors as they are.
  const at::Tensor travels = wire();
  const bool encoded = layout_.codec != Codec::None && static_cast<int64_t>(travels.nbytes()) >= kMinEncodedNbytes;
  return encoded ? static_cast<size_t>(encodedNbytes(layout_.codec, travels.numel())) : travels.nbytes();
}

size_t Bucket::sharedNbytes() const {
  return shared_ ? wire().nbytes() : 0;
}

size_t Bucket::gradientNbytes() const {
  return layout_.sparse ? sparseNbytes(home_) : numel_ * c10::elementSize(dtype_);
}

void Bucket::beginStep(int divisor) {
  divisor_ = divisor;
  pending_ = slots_.size();
  max_abs_bits_ = 0;
  shadow_ = false;
}

void Bucket::beginShadowStep() {
  const at::NoGradGuard no_grad;
  beginStep(layout_.world_size);
  shadow_ = true;
  pending_ = 0;
  if (layout_.sparse) {
    home_ = emptySparse(slots_[0].param);
  } else if (cast()) {
    wire_.zero_();
  } else {
    allocateHome(); // not in place: .grad may still point into the old one
  }
}

void Bucket::pack(size_t slot) {
  const at::NoGradGuard no_grad;
  if (device_.has_value()) {
    device_->note();
  }
  if (fuses()) {
    --pending_;
    return;
  }
  if (layout_.sparse) {
    packSparse(slots_[slot]);
  } else if (cast()) {
    packWire(slots_[slot]);
  } else {
    packHome(slots_[slot]);
  }
  --pending_;
}

void Bucket::packSparse(const Slot& slot) {
  const at::Tensor& grad = slot.param.grad();
  if (!grad.defined()) {
    home_ = emptySparse(slot.param);
    return;
  }
  // A tensor of its own: the all-reduce puts other elements into it, and .grad is the user's until unpack().
  home_ = layout_.hook_averages ? grad.coalesce() : grad.coalesce().mul(1.0 / divisor_);
}

void Bucket::packHome(const Slot& slot) {
  at::Tensor& grad = slot.param.mutable_grad();
  const bool average_here = !layout_.hook_averages && divisor_ > 1;
  const double factor = average_here ? 1.0 / divisor_ : 1.0;
  const bool same_type = grad.defined() && grad.scalar_type() == dtype_;
  const bool in_place = grad.defined() && layout_.grads_are_views && isHome(grad, slot);
  if (same_type && dtype_ == at::kFloat && grad.is_cpu() && isPlain(grad, slot)) {
    // The usual case without torch's dispatcher, which costs more than a small gradient does.
    auto* out = static_cast<float*>(home_.data_ptr()) + slot.offset;
    const auto* in = static_cast<const float*>(grad.const_data_ptr());
    if (!in_place || average_here) {
      convert(DType::Float32, out, DType::Float32, in, slot.numel, static_cast<float>(factor));
    }
    if (in_place && average_here) {
      bumpVersion(slot.view);
    }
  } else if (!in_place || average_here) {
    packHomeByTorch(slot, grad, factor);
  }
  if (layout_.grads_are_views && grad.defined() && !in_place) {
    grad = slot.view;
  }
}

void Bucket::packHomeByTorch(const Slot& slot, const at::Tensor& grad, double factor) {
  at::Tensor out = slot.view;
  if (!grad.defined()) {
    out.zero_();
  } else if (factor != 1.0 && grad.scalar_type() == dtype_) {
    at::mul_out(out, grad, at::scalar_tensor(factor, at::kDouble)); // no dimensions: does not promote
  } else {
    out.copy_(grad);
    if (factor != 1.0) {
      out.mul_(factor);
    }
  }
}

void Bucket::packWire(const Slot& slot) {
  if (slot.numel == 0) {
    return;
  }
  const size_t element = wire_.element_size();
  auto* out = static_cast<char*>(wire_.data_ptr()) + slot.offset * element;
  at::Tensor grad = shadow_ ? at::Tensor() : slot.param.grad();
  if (!grad.defined()) {
    std::fill_n(out, slot.numel * element, char{0});
    return;
  }
  // maxAbsBits() wants fp32, and flat memory wants plain elements in the slot's order; gradients have all nearly always.
  const at::ScalarType source_type = scale_.has_value() ? at::kFloat : dtype_;
  if (grad.scalar_type() != source_type || !isPlain(grad, slot)) {
    grad = at::empty_strided(slot.param.sizes(), slot.strides, grad.options().dtype(source_type)).copy_(grad);
  }
  const float factor = scale_.has_value() ? scale_->packFactor() : 1.0F;
  const auto* in = static_cast<const char*>(grad.const_data_ptr());
  const size_t source_element = grad.element_size();
  for (size_t at = 0; at < slot.numel; at += kBlock) {
    const size_t count = std::min(kBlock, slot.numel - at);
    const char* block = in + at * source_element;
    if (scale_.has_value()) {
      max_abs_bits_ = std::max(max_abs_bits_, maxAbsBits(reinterpret_cast<const float*>(block), count));
    }
    convert(toDType(wire_.scalar_type()), out + at * element, toDType(source_type), block, count, factor);
  }
}

void Bucket::finishStep() noexcept {
  if (scale_.has_value()) {
    scale_->finishStep();
  }
  if (layout_.sparse) {
    home_.reset(); // its elements belong to .grad now
  }
}

} // namespace pycomm
