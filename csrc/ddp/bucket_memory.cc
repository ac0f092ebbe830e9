#include "ddp/bucket_memory.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "c10d/shared_tensors.h"

namespace pycomm {
namespace {

constexpr size_t kInPagesFromNbytes = 128 << 10; // as malloc does
constexpr size_t kSharedFromNbytes = 32 << 10; // below, whole pages and a system call each cost more than a copy

/// The strides that AccumulateGrad gives a gradient of this parameter: the parameter's own if they leave no holes, else contiguous ones.
std::vector<int64_t> gradStrides(const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) {
    return param.strides().vec();
  }
  std::vector<int64_t> strides(static_cast<size_t>(param.dim()));
  int64_t step = 1;
  for (size_t d = strides.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(param.size(static_cast<int64_t>(d)), 1);
  }
  return strides;
}

} // namespace

// --- where it comes from --------------------------------------------------------------------------

at::Tensor FlatMemory::zeros(size_t numel, const at::TensorOptions& options) {
  const auto length = static_cast<int64_t>(numel);
  if (!options.device().is_cpu()) {
    return at::zeros({length}, options);
  }
  const auto plain = at::TensorOptions(at::kCPU).dtype(options.dtype());
  const size_t nbytes = numel * options.dtype().itemsize();
  if (nbytes >= kInPagesFromNbytes) {
    void* const pages = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages != MAP_FAILED) {
      return at::from_blob(pages, {length}, [nbytes](void* begin) { munmap(begin, nbytes); }, plain);
    }
  }
  return at::zeros({length}, plain);
}

at::Tensor FlatMemory::zerosToShare(size_t numel, const at::TensorOptions& options) {
  const size_t nbytes = numel * options.dtype().itemsize();
  if (reachable_ && options.device().is_cpu() && nbytes >= kSharedFromNbytes) {
    try {
      return emptyShared({static_cast<int64_t>(numel)}, c10::typeMetaToScalarType(options.dtype()));
    } catch (const Error& error) { // as in a small container: the all-reduce copies it
      log(LogLevel::Warn,
          "a gradient bucket of " + std::to_string(nbytes >> 10) +
              " KiB, and those that are made after it, lie in ordinary memory: " + error.record().summary +
              " They are copied on their way.");
      reachable_ = false; // the next ones would find no room either, and one warning is enough
    }
  }
  return zeros(numel, options);
}

// --- one bucket's ---------------------------------------------------------------------------------

BucketMemory::BucketMemory(
    const std::vector<ReducedParam>& params,
    const std::vector<size_t>& indices,
    const Options& options,
    FlatMemory& source)
    : source_(&source),
      dtype_(params.at(indices.at(0)).tensor.scalar_type()),
      sparse_(params[indices[0]].sparse),
      grads_are_views_(options.grads_are_views),
      in_place_(options.in_place) {
  for (const size_t index : indices) {
    Slot slot;
    slot.param = params.at(index).tensor;
    slot.index = index;
    slot.offset = numel_;
    slot.numel = static_cast<size_t>(slot.param.numel());
    slot.strides = gradStrides(slot.param);
    numel_ += slot.numel;
    slots.push_back(std::move(slot));
  }
  if (sparse_) {
    return;
  }
  if (options.cast.has_value()) {
    const auto as_cast = slots[0].param.options().requires_grad(false).dtype(*options.cast);
    cast = in_place_ ? source_->zerosToShare(numel_ + options.tail, as_cast)
                     : FlatMemory::zeros(numel_ + options.tail, as_cast);
    if (options.tail > 0) {
      tail = cast.narrow(0, static_cast<int64_t>(numel_), static_cast<int64_t>(options.tail));
    }
  }
  if (!cast.defined() || grads_are_views_) {
    allocateHome();
  }
}

void BucketMemory::allocateHome() {
  const auto options = slots[0].param.options().requires_grad(false);
  const bool travels = !cast.defined();
  home = travels && in_place_ ? source_->zerosToShare(numel_, options) : FlatMemory::zeros(numel_, options);
  for (Slot& slot : slots) {
    slot.view = partOf(home, slot);
  }
}

at::Tensor BucketMemory::travelling() const {
  if (cast.defined()) {
    return cast;
  }
  return home.is_complex() && !sparse_ ? at::view_as_real(home) : home;
}

size_t BucketMemory::gradientNbytes() const {
  if (!sparse_) {
    return numel_ * c10::elementSize(dtype_);
  }
  return home.defined() ? home._indices().nbytes() + home._values().nbytes() : 0;
}

size_t BucketMemory::sharedNbytes() const {
  const at::Tensor& flat = cast.defined() ? cast : home;
  return !sparse_ && flat.storage().allocator() == &heapAllocator() ? flat.nbytes() : 0;
}

void BucketMemory::zero() {
  if (cast.defined()) {
    cast.zero_();
  } else {
    allocateHome();
  }
}

bool BucketMemory::isPlain(const at::Tensor& grad, const Slot& slot) {
  if (grad.is_neg() || grad.is_conj()) {
    return false;
  }
  for (size_t d = 0; d < slot.strides.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    if (grad.size(dim) != 1 && grad.stride(dim) != slot.strides[d]) {
      return false;
    }
  }
  return true;
}

bool BucketMemory::isHome(const at::Tensor& grad, const Slot& slot) {
  return grad.is_alias_of(slot.view) && grad.data_ptr() == slot.view.data_ptr() && isPlain(grad, slot);
}

at::Tensor& BucketMemory::gradientOf(const Slot& slot) const {
  at::Tensor& grad = slot.param.mutable_grad();
  if (grads_are_views_ && cast.defined() && (!grad.defined() || grad.scalar_type() == dtype_)) {
    grad = slot.view;
  } else if (!grad.defined()) {
    grad = grads_are_views_ ? slot.view : emptyLike(slot, slot.param.options().requires_grad(false));
  }
  return grad;
}

at::Tensor BucketMemory::partOf(const at::Tensor& flat, const Slot& slot) {
  return flat.as_strided(slot.param.sizes(), slot.strides, static_cast<int64_t>(slot.offset));
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
