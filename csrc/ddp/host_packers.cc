#include "ddp/host_packers.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/_coalesced.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>

#include "c10d/dtypes.h"
#include "ddp/wire_scale.h"

namespace pycomm {
namespace {

constexpr size_t kBlock = 4096; // elements looked at and cast while they are in the first-level cache

void packByTorch(const at::Tensor& out, const at::Tensor& grad, double factor) {
  if (!grad.defined()) {
    out.zero_();
  } else if (factor != 1.0 && grad.scalar_type() == out.scalar_type()) {
    at::Tensor target = out;
    at::mul_out(target, grad, at::scalar_tensor(factor, at::kDouble)); // no dimensions: does not promote
  } else {
    out.copy_(grad);
    if (factor != 1.0) {
      out.mul_(factor);
    }
  }
}

at::Tensor emptySparse(const at::Tensor& param) {
  // One dimension is sparse, as in the gradients of embeddings: ranks must agree on that.
  const auto options = param.options().requires_grad(false);
  std::vector<int64_t> values = param.sizes().vec();
  values.at(0) = 0;
  const at::Tensor indices = at::empty({1, 0}, options.dtype(at::kLong));
  return at::_sparse_coo_tensor_unsafe(indices, at::empty(values, options), param.sizes())._coalesced_(true);
}

} // namespace

// --- home -----------------------------------------------------------------------------------------

void HomePacker::pack(BucketMemory& memory, const Slot& slot, double factor) {
  at::Tensor& grad = slot.param.mutable_grad();
  const bool same_type = grad.defined() && grad.scalar_type() == memory.dtype();
  const bool in_place = grad.defined() && memory.gradsAreViews() && BucketMemory::isHome(grad, slot);
  const bool scales = factor != 1.0;
  if (same_type && memory.dtype() == at::kFloat && grad.is_cpu() && BucketMemory::isPlain(grad, slot)) {
    // The usual case without torch's dispatcher, which costs more than a small gradient does.
    auto* out = static_cast<float*>(memory.home.data_ptr()) + slot.offset;
    const auto* in = static_cast<const float*>(grad.const_data_ptr());
    if (!in_place || scales) {
      convert(DType::Float32, out, DType::Float32, in, slot.numel, static_cast<float>(factor));
    }
    if (in_place && scales) {
      BucketMemory::bumpVersion(slot.view);
    }
  } else if (!in_place || scales) {
    packByTorch(slot.view, grad, factor);
  }
  if (memory.gradsAreViews() && grad.defined() && !in_place) {
    grad = slot.view;
  }
}

void HomePacker::unpack(BucketMemory& memory, const std::vector<size_t>& slots, double /*factor*/) const {
  for (const size_t index : slots) {
    const Slot& slot = memory.slots[index];
    const at::Tensor& grad = memory.gradientOf(slot);
    if (!BucketMemory::isHome(grad, slot)) {
      grad.copy_(slot.view);
    }
  }
}

// --- cast -----------------------------------------------------------------------------------------

void CastPacker::pack(BucketMemory& memory, const Slot& slot, double factor) {
  if (slot.numel == 0) {
    return;
  }
  const at::Tensor& cast = memory.cast;
  const size_t element = cast.element_size();
  auto* out = static_cast<char*>(cast.data_ptr()) + slot.offset * element;
  at::Tensor grad = slot.param.grad();
  if (!grad.defined()) {
    std::fill_n(out, slot.numel * element, char{0});
    return;
  }
  // magnitudeOf() wants fp32, and flat memory wants plain elements in the slot's order; gradients have all nearly always.
  const at::ScalarType source_type = measures_ ? at::kFloat : memory.dtype();
  if (grad.scalar_type() != source_type || !BucketMemory::isPlain(grad, slot)) {
    grad = BucketMemory::emptyLike(slot, grad.options().dtype(source_type)).copy_(grad);
  }
  const auto* in = static_cast<const char*>(grad.const_data_ptr());
  const size_t source_element = grad.element_size();
  for (size_t at = 0; at < slot.numel; at += kBlock) {
    const size_t count = std::min(kBlock, slot.numel - at);
    const char* block = in + at * source_element;
    if (measures_) {
      const Magnitude here = magnitudeOf(reinterpret_cast<const float*>(block), count);
      magnitude_ = {std::max(magnitude_.max_bits, here.max_bits), magnitude_.non_finite || here.non_finite};
    }
    convert(
        toDType(cast.scalar_type()),
        out + at * element,
        toDType(source_type),
        block,
        count,
        static_cast<float>(factor));
  }
}

void CastPacker::writeMagnitude(const at::Tensor& tail, int rank, double ratio) const {
  auto* sizes = static_cast<at::Half*>(tail.data_ptr());
  std::fill_n(sizes, tail.numel(), at::Half(0.0F));
  sizes[rank] = at::Half(WireScale::exponentCode(magnitude_, ratio));
}

void CastPacker::unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const {
  const at::Tensor& cast = memory.cast;
  const auto* sums = static_cast<const char*>(cast.const_data_ptr());
  for (const size_t index : slots) {
    const Slot& slot = memory.slots[index];
    const at::Tensor& grad = memory.gradientOf(slot);
    if (slot.numel == 0) {
      continue;
    }
    const at::ScalarType dtype = memory.dtype();
    const bool direct = grad.scalar_type() == dtype && BucketMemory::isPlain(grad, slot);
    const at::Tensor target = direct ? grad : BucketMemory::emptyLike(slot, grad.options().dtype(dtype));
    convert(
        toDType(dtype),
        target.data_ptr(),
        toDType(cast.scalar_type()),
        sums + slot.offset * cast.element_size(),
        slot.numel,
        static_cast<float>(factor));
    if (direct) {
      BucketMemory::bumpVersion(grad);
    } else {
      grad.copy_(target);
    }
  }
}

// --- sparse ---------------------------------------------------------------------------------------

void SparsePacker::pack(BucketMemory& memory, const Slot& slot, double factor) {
  const at::Tensor& grad = slot.param.grad();
  memory.home = grad.defined() ? grad.coalesce().mul(factor) : emptySparse(slot.param);
}

void SparsePacker::packZeros(BucketMemory& memory) const {
  memory.home = emptySparse(memory.slots[0].param);
}

void SparsePacker::takeResult(BucketMemory& memory, const at::Tensor& result) const {
  TORCH_CHECK(
      result.is_sparse() && result.sizes() == memory.slots[0].param.sizes(),
      "the comm hook was given a sparse gradient and did not return a sparse tensor of its shape");
  memory.home = result;
}

void SparsePacker::unpack(BucketMemory& memory, const std::vector<size_t>& slots, double /*factor*/) const {
  if (!slots.empty()) {
    memory.slots[0].param.mutable_grad() = memory.home;
  }
  memory.home.reset(); // its elements belong to .grad now
}

} // namespace pycomm
