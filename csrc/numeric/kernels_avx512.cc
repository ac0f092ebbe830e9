#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define PYCOMM_SIMD_TARGET __attribute__((target("avx512f,avx512bw")))

namespace pycomm::numeric {
namespace {

constexpr size_t kVectorBytes = 64;
using F32 = float __attribute__((vector_size(kVectorBytes)));
using F64 = double __attribute__((vector_size(kVectorBytes)));
using U32 = uint32_t __attribute__((vector_size(kVectorBytes)));
using I32 = int32_t __attribute__((vector_size(kVectorBytes)));
using U64 = uint64_t __attribute__((vector_size(kVectorBytes)));

// The forms with a mask, all lanes set, compile to the same instructions; the plain ones go through an undefined vector
// in GCC 12's header, which it then warns about (GCC bug 105593).
constexpr __mmask16 kAll = 0xffff;

PYCOMM_SIMD_TARGET inline F32 loadHalf(const std::byte* from) {
  return _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

PYCOMM_SIMD_TARGET inline void storeHalf(std::byte* to, F32 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(kAll, value, _MM_FROUND_TO_NEAREST_INT));
}

PYCOMM_SIMD_TARGET inline U32 loadLow16(const std::byte* from) {
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<U32>(_mm512_maskz_cvtepu16_epi32(kAll, packed));
}

PYCOMM_SIMD_TARGET inline void storeLow16(std::byte* to, U32 value) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(kAll, reinterpret_cast<__m512i>(value)));
}

PYCOMM_SIMD_TARGET inline U32 loadLow8(const std::byte* from) {
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<U32>(_mm512_maskz_cvtepu8_epi32(kAll, packed));
}

PYCOMM_SIMD_TARGET inline void storeLow8(std::byte* to, U32 value) {
  const __m128i packed = _mm512_maskz_cvtepi32_epi8(kAll, reinterpret_cast<__m512i>(value));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

} // namespace
} // namespace pycomm::numeric

#include "numeric/simd_kernels.h"

namespace pycomm::numeric {

const KernelSet kAvx512Kernels = kSimdKernels;

} // namespace pycomm::numeric

#endif
