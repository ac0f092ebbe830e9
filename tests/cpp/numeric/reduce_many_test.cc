#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "numeric/reduce.h"
#include "numeric/small_float.h"
#include "numeric_testing.h"

namespace pycomm {
namespace {

using testing::allDTypes;
using testing::allOps;
using testing::AtLevel;
using testing::Bytes;
using testing::describe;
using testing::framed;
using testing::levels;
using testing::ordinary;
using testing::sameBits;
using testing::samples;

struct Inputs {
  std::vector<Bytes> bytes;
  std::vector<const Bytes*> refs;
  std::vector<const void*> pointers;

  Inputs(DType dtype, size_t count, size_t numel, uint32_t seed) {
    for (size_t k = 0; k < count; ++k) {
      const uint32_t own = seed + static_cast<uint32_t>(k);
      bytes.push_back(k % 3 == 2 ? samples(dtype, numel, own) : ordinary(dtype, numel, own));
    }
    for (const Bytes& one : bytes) {
      refs.push_back(&one);
      pointers.push_back(one.data());
    }
  }
};

TEST(ReduceMany, MatchesTheOracleForEveryDTypeOpAndCount) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType dtype : allDTypes()) {
      for (const ReduceOp op : allOps()) {
        if (!whyUnsupported(op, dtype).empty()) {
          continue;
        }
        for (const size_t count : {size_t{1}, size_t{2}, size_t{3}, size_t{5}, size_t{8}}) {
          constexpr size_t kNumel = 1037; // two blocks of the scalar loop and a part
          const Inputs in(dtype, count, kNumel, 51);
          const int64_t divisor = op == ReduceOp::Avg ? static_cast<int64_t>(count) : 1;
          const Bytes want = oracle::fold(dtype, op, in.refs, divisor);
          Bytes got(want.size());
          reduceMany(dtype, op, got.data(), in.pointers.data(), count, kNumel, divisor);
          EXPECT_TRUE(sameBits(elementSize(dtype), got, want)) << describe(level, dtype, op) << " of " << count;
        }
      }
    }
  }
}

TEST(ReduceMany, EverySizeAndAlignmentWritesExactlyItsElements) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType dtype : allDTypes()) {
      for (size_t numel = 0; numel <= 67; ++numel) {
        Inputs in(dtype, 3, numel, 61);
        const Bytes exact = oracle::fold(dtype, ReduceOp::Sum, in.refs);
        const size_t skew = numel % 4;
        for (size_t k = 0; k < in.bytes.size(); ++k) {
          in.bytes[k] = framed(skew + k, in.bytes[k], 0);
          in.pointers[k] = in.bytes[k].data() + skew + k;
        }
        const Bytes want = framed(3, exact, 64);
        Bytes got(want.size(), 0xa5);
        reduceMany(dtype, ReduceOp::Sum, got.data() + 3, in.pointers.data(), 3, numel);
        EXPECT_TRUE(sameBits(1, got, want)) << describe(level, dtype, ReduceOp::Sum) << " numel " << numel;
      }
    }
  }
}

TEST(ReduceMany, TheResultMayReplaceAnySource) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType dtype : allDTypes()) {
      for (size_t which = 0; which < 4; ++which) {
        Inputs in(dtype, 4, 1037, 71);
        const Bytes want = oracle::fold(dtype, ReduceOp::Sum, in.refs);
        reduceMany(dtype, ReduceOp::Sum, in.bytes[which].data(), in.pointers.data(), 4, 1037);
        EXPECT_TRUE(sameBits(elementSize(dtype), in.bytes[which], want))
            << describe(level, dtype, ReduceOp::Sum) << " into source " << which;
      }
    }
  }
}

// 2048 + 1 + 1 in fp16, where 2049 does not exist: rounded after each addition it stays 2048.
TEST(ReduceMany, RoundsOnce) {
  struct Case {
    DType dtype;
    float big; // the first number whose successor is two away
  };
  for (const Case& c :
       {Case{DType::Float16, 2048},
        Case{DType::BFloat16, 256},
        Case{DType::Float8E4M3, 16},
        Case{DType::Float8E5M2, 8}}) {
    for (const SimdLevel level : levels()) {
      const AtLevel at(level);
      Bytes big(4);
      Bytes one(4);
      oracle::writeFloat(c.dtype, big.data(), c.big);
      oracle::writeFloat(c.dtype, one.data(), 1);
      const void* sources[] = {big.data(), one.data(), one.data()};
      Bytes once(4);
      reduceMany(c.dtype, ReduceOp::Sum, once.data(), sources, 3, 1);
      EXPECT_EQ(oracle::readFloat(c.dtype, once.data()), c.big + 2) << describe(level, c.dtype, ReduceOp::Sum);
      Bytes twice(4);
      reduce(c.dtype, ReduceOp::Sum, twice.data(), big.data(), one.data(), 1);
      reduce(c.dtype, ReduceOp::Sum, twice.data(), twice.data(), one.data(), 1);
      EXPECT_EQ(oracle::readFloat(c.dtype, twice.data()), c.big) << describe(level, c.dtype, ReduceOp::Sum);
    }
  }
}

TEST(ReduceMany, AveragesBeforeItRounds) {
  // The sum is beyond fp16, the average is not.
  const uint16_t big = numeric::HalfFormat::encode(60000);
  const void* pair[] = {&big, &big};
  uint16_t average = 0;
  reduceMany(DType::Float16, ReduceOp::Avg, &average, pair, 2, 1, 2);
  EXPECT_EQ(average, big);
  // (2049 of two roundings would be 2048) 2048 + 1 + 3 + 0 = 2052, a quarter of it is 513.
  const uint16_t parts[] = {
      numeric::HalfFormat::encode(2048),
      numeric::HalfFormat::encode(1),
      numeric::HalfFormat::encode(3),
      numeric::HalfFormat::encode(0)};
  const void* sources[] = {&parts[0], &parts[1], &parts[2], &parts[3]};
  reduceMany(DType::Float16, ReduceOp::Avg, &average, sources, 4, 1, 4);
  EXPECT_EQ(numeric::HalfFormat::decode(average), 513.0F);
}

TEST(ReduceMany, FoldsInTheOrderGiven) {
  const float big = 1e8F;
  const float minus = -1e8F;
  const float one = 1;
  float out = 0;
  const void* ascending[] = {&big, &minus, &one};
  reduceMany(DType::Float32, ReduceOp::Sum, &out, ascending, 3, 1);
  EXPECT_EQ(out, 1.0F);
  const void* other[] = {&big, &one, &minus};
  reduceMany(DType::Float32, ReduceOp::Sum, &out, other, 3, 1);
  EXPECT_EQ(out, 0.0F);
}

TEST(ReduceMany, RefusesBadArguments) {
  const float value = 1;
  const void* sources[] = {&value};
  float out = 0;
  EXPECT_THROW(reduceMany(DType::Float32, ReduceOp::Sum, &out, sources, 0, 1), Error);
  EXPECT_THROW(reduceMany(DType::Float32, ReduceOp::Avg, &out, sources, 1, 1, 0), Error);
  EXPECT_THROW(reduceMany(DType::Float32, ReduceOp::Sum, &out, sources, 1, 1, 2), Error);
  EXPECT_THROW(reduceMany(DType::Int32, ReduceOp::Avg, &out, sources, 1, 1, 2), Error);
}

TEST(Scale, MatchesTheOracle) {
  constexpr size_t kNumel = 515;
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType dtype : allDTypes()) {
      if (!isFloatingPoint(dtype) && !isComplex(dtype)) {
        double out = 0;
        EXPECT_THROW(scale(dtype, &out, &out, 1, 2.0), Error);
        EXPECT_THROW(divide(dtype, &out, &out, 1, 2), Error);
        continue;
      }
      const bool wide = dtype == DType::Float64 || dtype == DType::Complex128;
      const DType real = isComplex(dtype) ? (wide ? DType::Float64 : DType::Float32) : dtype;
      for (const auto& [factor, divisor] :
           {std::pair{1.0 / 3.0, int64_t{3}}, std::pair{0.5, int64_t{7}}, std::pair{-1.7, int64_t{1}}}) {
        const Bytes src = samples(dtype, kNumel, 81);
        Bytes scaled(src.size());
        Bytes divided(src.size());
        for (size_t offset = 0; offset < src.size(); offset += elementSize(real)) {
          if (wide) {
            const double value = oracle::readAs<double>(src.data() + offset);
            oracle::writeDouble(scaled.data() + offset, oracle::multiply(value, factor));
            oracle::writeDouble(divided.data() + offset, oracle::quotient(value, static_cast<double>(divisor)));
          } else {
            const float value = oracle::readFloat(real, src.data() + offset);
            oracle::writeFloat(real, scaled.data() + offset, oracle::multiply(value, static_cast<float>(factor)));
            oracle::writeFloat(real, divided.data() + offset, oracle::quotient(value, static_cast<float>(divisor)));
          }
        }
        Bytes got(src.size());
        scale(dtype, got.data(), src.data(), kNumel, factor);
        EXPECT_TRUE(sameBits(elementSize(real), got, scaled)) << simdLevelName(level) << " scale " << dtypeName(dtype);
        got = src;
        divide(dtype, got.data(), got.data(), kNumel, divisor);
        EXPECT_TRUE(sameBits(elementSize(real), got, divided))
            << simdLevelName(level) << " divide " << dtypeName(dtype);
      }
    }
  }
}

TEST(Scale, EverySizeInPlace) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType dtype : {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64, DType::Float8E4M3}) {
      for (size_t numel = 0; numel <= 67; ++numel) {
        Bytes want = ordinary(dtype, numel + 8, 91);
        Bytes got = want;
        {
          const AtLevel scalar(SimdLevel::Scalar);
          scale(dtype, want.data(), want.data(), numel, 0.3);
        }
        scale(dtype, got.data(), got.data(), numel, 0.3);
        EXPECT_TRUE(sameBits(elementSize(dtype), got, want)) << simdLevelName(level) << " " << dtypeName(dtype);
      }
    }
  }
}

} // namespace
} // namespace pycomm
