#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "fold_oracle.h"
#include "numeric/simd_level.h"

namespace pycomm::testing {

using oracle::Bytes;

inline std::vector<DType> allDTypes() {
  std::vector<DType> dtypes;
  for (int i = 0; i < kDTypeCount; ++i) {
    dtypes.push_back(static_cast<DType>(i));
  }
  return dtypes;
}

inline std::vector<ReduceOp> allOps() {
  return {
      ReduceOp::Sum,
      ReduceOp::Avg,
      ReduceOp::Product,
      ReduceOp::Min,
      ReduceOp::Max,
      ReduceOp::Band,
      ReduceOp::Bor,
      ReduceOp::Bxor,
      ReduceOp::PremulSum};
}

inline const std::vector<DType>& wireDTypes() {
  static const std::vector<DType> dtypes = {
      DType::Float32, DType::Float16, DType::BFloat16, DType::Float8E4M3, DType::Float8E5M2};
  return dtypes;
}

/// Lowers the level for a scope.
class AtLevel {
 public:
  explicit AtLevel(SimdLevel level) : before_(simdLevel()) {
    forceSimdLevel(level);
  }
  ~AtLevel() {
    forceSimdLevel(before_);
  }
  AtLevel(const AtLevel&) = delete;
  AtLevel& operator=(const AtLevel&) = delete;

 private:
  SimdLevel before_;
};

/// Those that this processor has, Scalar among them.
inline std::vector<SimdLevel> levels() {
  std::vector<SimdLevel> found;
  for (const SimdLevel level : {SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512, SimdLevel::Neon}) {
    const AtLevel at(level);
    if (simdLevel() == level) {
      found.push_back(level);
    }
  }
  return found;
}

inline std::string describe(SimdLevel level, DType dtype, ReduceOp op) {
  return std::string(simdLevelName(level)) + " " + dtypeName(dtype) + " " + reduceOpName(op);
}

/// Bit patterns that rounding, signs and special values hang on; the rest of `numel` is random bits.
inline Bytes samples(DType dtype, size_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(numel * elementSize(dtype));
  for (unsigned char& byte : bytes) {
    byte = static_cast<unsigned char>(random());
  }
  const bool complex = isComplex(dtype);
  const size_t part = complex ? elementSize(dtype) / 2 : elementSize(dtype);
  if (!isFloatingPoint(dtype) && !complex) {
    return bytes;
  }
  std::vector<uint64_t> special; // of single bytes, random ones hit every value
  if (part == 2) {
    special = {0, 0x8000, 1, 0x8001, 0x7c00, 0xfc00, 0x7c01, 0xfe00, 0x7f80, 0xff80, 0x7fc1, 0xff81, 0x3c00, 0x0400};
  } else if (part == 4) {
    special = {
        0,
        0x80000000,
        1,
        0x80000001,
        0x7f800000,
        0xff800000,
        0x7fc00001,
        0xff812345,
        0x7f7fffff,
        0x00800000,
        0x3f800000,
        0x3f800001,
        0xbf800000,
        0x7fffffff};
  } else if (part == 8) {
    special = {
        0,
        0x8000000000000000,
        1,
        0x7ff0000000000000,
        0xfff0000000000000,
        0x7ff0000000000001,
        0xfff8000000012345,
        0x7fefffffffffffff,
        0x0010000000000000,
        0x3ff0000000000000,
        0xbff0000000000001};
  }
  for (size_t i = 0; !special.empty() && i < bytes.size() / part; ++i) {
    if (random() % 3 == 0) {
      std::memcpy(bytes.data() + i * part, &special[random() % special.size()], part);
    }
  }
  return bytes;
}

/// Random bits seldom have exponents that meet. These are floats of ordinary size, which round when added.
inline Bytes ordinary(DType dtype, size_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0.0, 3.0);
  Bytes bytes(numel * elementSize(dtype));
  const bool complex = isComplex(dtype);
  if (!isFloatingPoint(dtype) && !complex) {
    return samples(dtype, numel, seed);
  }
  const size_t part = complex ? elementSize(dtype) / 2 : elementSize(dtype);
  for (size_t at = 0; at < bytes.size(); at += part) {
    if (part == 8) {
      oracle::writeDouble(bytes.data() + at, normal(random));
    } else {
      oracle::writeFloat(complex ? DType::Float32 : dtype, bytes.data() + at, static_cast<float>(normal(random)));
    }
  }
  return bytes;
}

/// The bytes with 0xa5 before and behind them: other alignments, and a margin that must survive.
inline Bytes framed(size_t before, const Bytes& bytes, size_t behind) {
  Bytes out;
  out.reserve(before + bytes.size() + behind);
  out.resize(before, 0xa5);
  for (const unsigned char byte : bytes) {
    out.push_back(byte);
  }
  out.resize(before + bytes.size() + behind, 0xa5);
  return out;
}

/// Fails at the first element that differs, with both bit patterns.
inline ::testing::AssertionResult sameBits(size_t element_size, const Bytes& got, const Bytes& want) {
  if (got.size() != want.size()) {
    return ::testing::AssertionFailure() << got.size() << " bytes, not " << want.size();
  }
  for (size_t at = 0; at < got.size(); at += element_size) {
    if (std::memcmp(got.data() + at, want.data() + at, element_size) != 0) {
      const auto hex = [&](const Bytes& bytes) {
        std::string text;
        for (size_t i = element_size; i-- > 0;) {
          char digits[3];
          std::snprintf(digits, sizeof digits, "%02x", bytes[at + i]);
          text += digits;
        }
        return text;
      };
      return ::testing::AssertionFailure() << "element " << at / element_size << " of " << got.size() / element_size
                                           << ": 0x" << hex(got) << ", not 0x" << hex(want);
    }
  }
  return ::testing::AssertionSuccess();
}

} // namespace pycomm::testing
