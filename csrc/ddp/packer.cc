#include "ddp/packer.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/view_as_complex.h>

#include "ddp/fused_packer.h"
#include "ddp/host_packers.h"

namespace pycomm {

void Packer::takeResult(BucketMemory& memory, const at::Tensor& returned) const {
  const at::Tensor& home = memory.home;
  // torch's collectives take a complex tensor as a real one with one more dimension, and hooks hand on what they give.
  const bool as_real = home.is_complex() && !returned.is_complex() && returned.dim() > 0 && returned.size(-1) == 2;
  const at::Tensor result = as_real ? at::view_as_complex(returned.contiguous()) : returned;
  TORCH_CHECK(
      result.numel() == home.numel(),
      "the comm hook returned ",
      returned.numel(),
      " elements for a bucket of ",
      home.numel());
  const bool in_place = result.dim() == 1 && result.scalar_type() == memory.dtype() && result.is_alias_of(home) &&
      result.data_ptr() == home.data_ptr() && result.is_contiguous() && !result.is_neg() && !result.is_conj();
  if (!in_place) {
    home.copy_(result.reshape({-1}));
  }
}

std::unique_ptr<Packer> makePacker(const BucketMemory& memory, bool measures, const std::string& cuda_library) {
  if (!memory.device().is_cpu()) {
    const BucketKernels kernels(cuda_library, memory.device());
    if (!memory.sparse() && (memory.cast.defined() || BucketKernels::packsAsItIs(memory.dtype()))) {
      return std::make_unique<FusedPacker>(kernels, measures);
    }
  }
  if (memory.sparse()) {
    return std::make_unique<SparsePacker>();
  }
  if (memory.cast.defined()) {
    return std::make_unique<CastPacker>(measures);
  }
  return std::make_unique<HomePacker>();
}

} // namespace pycomm
