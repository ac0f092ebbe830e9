#include "ddp/packer.h"

#include <ATen/core/TensorBody.h>

#include "ddp/fused_packer.h"
#include "ddp/host_packers.h"

namespace pycomm {

void Packer::takeResult(BucketMemory& memory, const at::Tensor& result) const {
  const at::Tensor& home = memory.home;
  TORCH_CHECK(
      result.numel() == home.numel(),
      "the comm hook returned ",
      result.numel(),
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
