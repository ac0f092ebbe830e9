#include "numeric/kernels.h"

#include "numeric/simd_level.h"

namespace pycomm::numeric {

const KernelSet& activeKernels() noexcept {
  switch (simdLevel()) {
    case SimdLevel::Scalar:
      return kScalarKernels;
#if defined(__x86_64__)
    case SimdLevel::Avx2:
      return kAvx2Kernels;
    case SimdLevel::Avx512:
      return kAvx512Kernels;
    case SimdLevel::Neon:
      return kScalarKernels;
#elif defined(__aarch64__)
    case SimdLevel::Neon:
      return kNeonKernels;
    case SimdLevel::Avx2:
    case SimdLevel::Avx512:
      return kScalarKernels;
#else
    case SimdLevel::Avx2:
    case SimdLevel::Avx512:
    case SimdLevel::Neon:
      return kScalarKernels;
#endif
  }
  return kScalarKernels;
}

} // namespace pycomm::numeric
