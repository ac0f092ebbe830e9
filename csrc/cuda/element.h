#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// One element of each dtype as kernels read, combine and write it. The same code runs on the device and, in tests and without a device,
// on the host. Tests compare it bit by bit with csrc/numeric.
//
// NaN rule, as everywhere in pycomm: a NaN that is written is the positive quiet one without payload.

#if defined(__CUDACC__)
#define PYCOMM_HD __host__ __device__ __forceinline__
#else
#define PYCOMM_HD inline
#endif

namespace pycomm::cuda {

PYCOMM_HD uint32_t floatBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

PYCOMM_HD float floatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline constexpr uint32_t kFloatInfinity = 0x7f800000;
inline constexpr uint32_t kFloatNan = 0x7fc00000;

PYCOMM_HD uint32_t magnitudeBits(float value) {
  return floatBits(value) & 0x7fffffffU;
}

/// A format of 1 sign, E exponent and M mantissa bits. Rounds to nearest even by integers alone, so that no
/// flush-to-zero mode of the host or the device changes it.
template <int E, int M, bool HasInfinity, uint32_t Nan>
struct SmallFormat {
  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr uint32_t kSign = 1U << (E + M);
  static constexpr uint32_t kInfinity = ((1U << E) - 1U) << M;
  static constexpr uint32_t kMaxFinite = HasInfinity ? kInfinity - 1U : Nan - 1U;

  PYCOMM_HD static uint32_t encode(float value) {
    const uint32_t bits = floatBits(value);
    const uint32_t sign = (bits >> 31) << (E + M);
    const uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > kFloatInfinity) {
      return Nan;
    }
    // The significand as a 24-bit integer, and how many of its bits fall off: more of them below the smallest normal.
    const int exponent = static_cast<int>(magnitude >> 23) - 127;
    const uint32_t significand = (magnitude & 0x7fffffU) | (magnitude >= 0x800000U ? 0x800000U : 0U);
    const int smallest = 1 - kBias;
    const int cut = 23 - M + (exponent < smallest ? smallest - exponent : 0);
    uint32_t result = 0;
    if (cut <= 24) { // else less than half of the smallest step
      const uint32_t kept = significand >> cut;
      const uint32_t rest = significand & ((1U << cut) - 1U);
      const uint32_t half = 1U << (cut - 1);
      const uint32_t rounded = kept + (rest > half || (rest == half && (kept & 1U) != 0U) ? 1U : 0U);
      // `rounded` carries its leading 1 where the number is normal: that adds one to the exponent field.
      const uint32_t field = exponent < smallest ? 0U : static_cast<uint32_t>(exponent + kBias - 1) << M;
      result = field + rounded;
    }
    if (magnitude == kFloatInfinity || exponent > kBias + 1 || result > kMaxFinite) {
      return HasInfinity ? (kInfinity | sign) : Nan;
    }
    return result | sign;
  }

  PYCOMM_HD static float decode(uint32_t encoded) {
    const uint32_t sign = (encoded & kSign) << (31 - E - M);
    const uint32_t magnitude = encoded & (kSign - 1U);
    if (HasInfinity ? magnitude > kInfinity : magnitude == Nan) {
      return floatOf(kFloatNan);
    }
    if (HasInfinity && magnitude == kInfinity) {
      return floatOf(kFloatInfinity | sign);
    }
    if (magnitude >= (1U << M)) {
      return floatOf(((magnitude << (23 - M)) + (static_cast<uint32_t>(127 - kBias) << 23)) | sign);
    }
    // A subnormal: an integer times the smallest step, both exact in fp32 and the product a normal fp32 number.
    const float step = floatOf(static_cast<uint32_t>(128 - kBias - M) << 23);
    return floatOf(floatBits(static_cast<float>(magnitude) * step) | sign);
  }
};

struct Half {
  using Stored = uint16_t;
  using Acc = float;
  using Format = SmallFormat<5, 10, true, 0x7e00>;
  PYCOMM_HD static Acc load(Stored stored) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
#else
    return Format::decode(stored);
#endif
  }
  PYCOMM_HD static Stored store(Acc value) {
#if defined(__CUDA_ARCH__)
    uint16_t stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return magnitudeBits(value) > kFloatInfinity ? uint16_t{0x7e00} : stored;
#else
    return static_cast<Stored>(Format::encode(value));
#endif
  }
  PYCOMM_HD static bool finite(Stored stored) {
    return (stored & 0x7fffU) < Format::kInfinity;
  }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Acc = float;
  PYCOMM_HD static Acc load(Stored stored) {
    return floatOf(static_cast<uint32_t>(stored) << 16);
  }
  PYCOMM_HD static Stored store(Acc value) {
    const uint32_t bits = floatBits(value);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return static_cast<Stored>((bits & 0x7fffffffU) > kFloatInfinity ? 0x7fc0U : rounded);
  }
  PYCOMM_HD static bool finite(Stored stored) {
    return (stored & 0x7fffU) < 0x7f80U;
  }
};

template <class Form>
struct Float8 {
  using Stored = uint8_t;
  using Acc = float;
  using Format = Form;
  PYCOMM_HD static Acc load(Stored stored) {
    return Form::decode(stored);
  }
  PYCOMM_HD static Stored store(Acc value) {
    return static_cast<Stored>(Form::encode(value));
  }
  PYCOMM_HD static bool finite(Stored stored) {
    return (stored & 0x7fU) <= Form::kMaxFinite;
  }
};
using E4m3 = Float8<SmallFormat<4, 3, false, 0x7f>>;
using E5m2 = Float8<SmallFormat<5, 2, true, 0x7f>>;

struct Float32 {
  using Stored = float;
  using Acc = float;
  PYCOMM_HD static Acc load(Stored stored) {
    return stored;
  }
  PYCOMM_HD static Stored store(Acc value) {
    return value == value ? value : floatOf(kFloatNan);
  }
  PYCOMM_HD static bool finite(Stored stored) {
    return magnitudeBits(stored) < kFloatInfinity;
  }
};

struct Float64 {
  using Stored = double;
  using Acc = double;
  PYCOMM_HD static Acc load(Stored stored) {
    return stored;
  }
  PYCOMM_HD static Stored store(Acc value) {
    if (value == value) {
      return value;
    }
    const uint64_t nan = 0x7ff8000000000000U;
    double quiet;
    memcpy(&quiet, &nan, sizeof quiet);
    return quiet;
  }
};

template <class T>
struct Whole {
  using Stored = T;
  using Acc = T;
  PYCOMM_HD static Acc load(Stored stored) {
    return stored;
  }
  PYCOMM_HD static Stored store(Acc value) {
    return value;
  }
};

} // namespace pycomm::cuda
