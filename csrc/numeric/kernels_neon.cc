#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define PYCOMM_SIMD_TARGET // part of the base architecture

namespace pycomm::numeric {
namespace {

constexpr size_t kVectorBytes = 16;
using F32 = float __attribute__((vector_size(kVectorBytes)));
using F64 = double __attribute__((vector_size(kVectorBytes)));
using U32 = uint32_t __attribute__((vector_size(kVectorBytes)));
using I32 = int32_t __attribute__((vector_size(kVectorBytes)));
using U64 = uint64_t __attribute__((vector_size(kVectorBytes)));

inline F32 loadHalf(const std::byte* from) {
  uint16x4_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return reinterpret_cast<F32>(vcvt_f32_f16(vreinterpret_f16_u16(bits)));
}

inline void storeHalf(std::byte* to, F32 value) {
  const uint16x4_t bits = vreinterpret_u16_f16(vcvt_f16_f32(reinterpret_cast<float32x4_t>(value)));
  std::memcpy(to, &bits, sizeof bits);
}

inline U32 loadLow16(const std::byte* from) {
  uint16x4_t low;
  std::memcpy(&low, from, sizeof low);
  return reinterpret_cast<U32>(vmovl_u16(low));
}

inline void storeLow16(std::byte* to, U32 value) {
  const uint16x4_t low = vmovn_u32(reinterpret_cast<uint32x4_t>(value));
  std::memcpy(to, &low, sizeof low);
}

inline U32 loadLow8(const std::byte* from) {
  uint32_t packed = 0;
  std::memcpy(&packed, from, sizeof packed);
  return reinterpret_cast<U32>(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(packed)))));
}

inline void storeLow8(std::byte* to, U32 value) {
  const uint16x4_t low = vmovn_u32(reinterpret_cast<uint32x4_t>(value));
  const uint32_t packed = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(low, low))), 0);
  std::memcpy(to, &packed, sizeof packed);
}

} // namespace
} // namespace pycomm::numeric

#include "numeric/simd_kernels.h"

namespace pycomm::numeric {

const KernelSet kNeonKernels = kSimdKernels;

} // namespace pycomm::numeric

#endif
