#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PYCOMM_SIMD_TARGET __attribute__((target("avx2,f16c")))

namespace pycomm::numeric {
namespace {

constexpr size_t kVectorBytes = 32;
using F32 = float __attribute__((vector_size(kVectorBytes)));
using F64 = double __attribute__((vector_size(kVectorBytes)));
using U32 = uint32_t __attribute__((vector_size(kVectorBytes)));
using I32 = int32_t __attribute__((vector_size(kVectorBytes)));
using U64 = uint64_t __attribute__((vector_size(kVectorBytes)));

PYCOMM_SIMD_TARGET inline F32 loadHalf(const std::byte* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

PYCOMM_SIMD_TARGET inline void storeHalf(std::byte* to, F32 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

PYCOMM_SIMD_TARGET inline U32 loadLow16(const std::byte* from) {
  return reinterpret_cast<U32>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

/// Every value fits into 16 bits, so packing with saturation changes none. The instruction packs each half separately;
/// the permutation joins the two results.
PYCOMM_SIMD_TARGET inline __m128i packLow16(U32 value) {
  const __m256i lanes = reinterpret_cast<__m256i>(value);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(lanes, lanes), 0x08));
}

PYCOMM_SIMD_TARGET inline void storeLow16(std::byte* to, U32 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packLow16(value));
}

PYCOMM_SIMD_TARGET inline U32 loadLow8(const std::byte* from) {
  return reinterpret_cast<U32>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

PYCOMM_SIMD_TARGET inline void storeLow8(std::byte* to, U32 value) {
  const __m128i packed = packLow16(value);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(packed, packed));
}

} // namespace
} // namespace pycomm::numeric

#include "numeric/simd_kernels.h"

namespace pycomm::numeric {

const KernelSet kAvx2Kernels = kSimdKernels;

} // namespace pycomm::numeric

#endif
