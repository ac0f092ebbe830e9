#include "numeric/simd_level.h"

#include <atomic>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "numeric/kernels.h"

namespace pycomm {
namespace {

#if defined(__x86_64__)
// Some hypervisors mask F16C while they show AVX2, and older compilers cannot ask for it by name.
bool hasF16c() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

bool supported(SimdLevel level) noexcept {
  switch (level) {
    case SimdLevel::Scalar:
      return true;
#if defined(__x86_64__)
    // These also ask the operating system whether it saves the wide registers.
    case SimdLevel::Avx2:
      return __builtin_cpu_supports("avx2") && hasF16c();
    case SimdLevel::Avx512:
      return supported(SimdLevel::Avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    case SimdLevel::Neon:
      return false;
#elif defined(__aarch64__)
    case SimdLevel::Neon: // part of the base architecture
      return true;
    case SimdLevel::Avx2:
    case SimdLevel::Avx512:
      return false;
#else
    case SimdLevel::Avx2:
    case SimdLevel::Avx512:
    case SimdLevel::Neon:
      return false;
#endif
  }
  return false;
}

SimdLevel detect() noexcept {
  for (const SimdLevel level : {SimdLevel::Avx512, SimdLevel::Avx2, SimdLevel::Neon}) {
    if (supported(level)) {
      return level;
    }
  }
  return SimdLevel::Scalar;
}

std::atomic<SimdLevel>& current() noexcept {
  static std::atomic<SimdLevel> level{detect()};
  return level;
}

} // namespace

SimdLevel simdLevel() noexcept {
  return current().load(std::memory_order_relaxed);
}

const char* simdLevelName(SimdLevel level) noexcept {
  switch (level) {
    case SimdLevel::Scalar:
      return "scalar";
    case SimdLevel::Avx2:
      return "avx2";
    case SimdLevel::Avx512:
      return "avx512";
    case SimdLevel::Neon:
      return "neon";
  }
  return "unknown";
}

void forceSimdLevel(SimdLevel level) noexcept {
  if (supported(level)) {
    current().store(level, std::memory_order_relaxed);
  }
}

} // namespace pycomm

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
