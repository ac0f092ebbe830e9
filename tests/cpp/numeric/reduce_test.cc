#include "numeric/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "base/error.h"
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

template <class Visit>
void forEachSupported(Visit visit) {
  for (const DType dtype : allDTypes()) {
    for (const ReduceOp op : allOps()) {
      if (whyUnsupported(op, dtype).empty()) {
        visit(dtype, op);
      }
    }
  }
}

TEST(Reduce, EveryDTypeAndOpMatchesTheOracleAtEveryLevel) {
  constexpr size_t kNumel = 4099;
  forEachSupported([](DType dtype, ReduceOp op) {
    for (const bool random_bits : {false, true}) {
      const auto make = random_bits ? samples : ordinary;
      const Bytes a = make(dtype, kNumel, 11);
      const Bytes b = make(dtype, kNumel, 12);
      const Bytes want = oracle::fold(dtype, op, {&a, &b});
      Bytes scalar(want.size());
      reduceScalar(dtype, op, scalar.data(), a.data(), b.data(), kNumel);
      EXPECT_TRUE(sameBits(elementSize(dtype), scalar, want)) << describe(SimdLevel::Scalar, dtype, op);
      for (const SimdLevel level : levels()) {
        const AtLevel at(level);
        Bytes got(want.size());
        reduce(dtype, op, got.data(), a.data(), b.data(), kNumel);
        EXPECT_TRUE(sameBits(elementSize(dtype), got, want)) << describe(level, dtype, op);
      }
    }
  });
}

TEST(Reduce, EveryPairOfFloat8) {
  for (const DType dtype : {DType::Float8E4M3, DType::Float8E5M2}) {
    Bytes a;
    Bytes b;
    for (int pair = 0; pair < 65536; ++pair) {
      a.push_back(static_cast<unsigned char>(pair >> 8));
      b.push_back(static_cast<unsigned char>(pair & 0xff));
    }
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
      const Bytes want = oracle::fold(dtype, op, {&a, &b});
      for (const SimdLevel level : levels()) {
        const AtLevel at(level);
        Bytes got(want.size());
        reduce(dtype, op, got.data(), a.data(), b.data(), a.size());
        EXPECT_TRUE(sameBits(1, got, want)) << describe(level, dtype, op);
      }
    }
  }
}

TEST(Reduce, OperandsMaySwapSidesWithoutChangingABit) {
  forEachSupported([](DType dtype, ReduceOp op) {
    constexpr size_t kNumel = 2048;
    const Bytes a = samples(dtype, kNumel, 21);
    const Bytes b = samples(dtype, kNumel, 22);
    Bytes ab(a.size());
    Bytes ba(a.size());
    reduce(dtype, op, ab.data(), a.data(), b.data(), kNumel);
    reduce(dtype, op, ba.data(), b.data(), a.data(), kNumel);
    EXPECT_TRUE(sameBits(elementSize(dtype), ab, ba)) << describe(simdLevel(), dtype, op);
  });
}

TEST(Reduce, EverySizeAndAlignmentWritesExactlyItsElements) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    forEachSupported([level](DType dtype, ReduceOp op) {
      for (size_t numel = 0; numel <= 67; ++numel) {
        const size_t size = elementSize(dtype);
        const Bytes a = samples(dtype, numel, 31);
        const Bytes b = samples(dtype, numel, 32);
        Bytes exact(numel * size);
        reduceScalar(dtype, op, exact.data(), a.data(), b.data(), numel);
        // Three different misalignments; the bytes around the result must survive.
        const size_t skew = numel % 4;
        const Bytes left = framed(skew, a, 0);
        const Bytes right = framed(skew + 1, b, 0);
        const Bytes want = framed(skew + 2, exact, 64);
        Bytes got(want.size(), 0xa5);
        reduce(dtype, op, got.data() + skew + 2, left.data() + skew, right.data() + skew + 1, numel);
        EXPECT_TRUE(sameBits(1, got, want)) << describe(level, dtype, op) << " numel " << numel;
      }
    });
  }
}

TEST(Reduce, TheResultMayReplaceEitherOperandOrBoth) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    forEachSupported([level](DType dtype, ReduceOp op) {
      constexpr size_t kNumel = 1037;
      const Bytes a = samples(dtype, kNumel, 41);
      const Bytes b = samples(dtype, kNumel, 42);
      const Bytes want = oracle::fold(dtype, op, {&a, &b});
      Bytes as_a = a;
      reduce(dtype, op, as_a.data(), as_a.data(), b.data(), kNumel);
      EXPECT_TRUE(sameBits(elementSize(dtype), as_a, want)) << describe(level, dtype, op) << " dst is a";
      Bytes as_b = b;
      reduce(dtype, op, as_b.data(), a.data(), as_b.data(), kNumel);
      EXPECT_TRUE(sameBits(elementSize(dtype), as_b, want)) << describe(level, dtype, op) << " dst is b";
      Bytes both = a;
      reduce(dtype, op, both.data(), both.data(), both.data(), kNumel);
      EXPECT_TRUE(sameBits(elementSize(dtype), both, oracle::fold(dtype, op, {&a, &a}))) << describe(level, dtype, op);
    });
  }
}

TEST(Reduce, ANanResultHasOnePattern) {
  struct Case {
    DType dtype;
    uint64_t nan; // one with a sign and a payload
    uint64_t one;
    uint64_t canonical;
  };
  for (const Case& c :
       {Case{DType::Float64, 0xfff8000000012345, 0x3ff0000000000000, 0x7ff8000000000000},
        Case{DType::Float32, 0xffc12345, 0x3f800000, 0x7fc00000},
        Case{DType::Float16, 0xfe01, 0x3c00, 0x7e00},
        Case{DType::BFloat16, 0xffc1, 0x3f80, 0x7fc0},
        Case{DType::Float8E4M3, 0xff, 0x38, 0x7f},
        Case{DType::Float8E5M2, 0xfd, 0x3c, 0x7f}}) {
    for (const SimdLevel level : levels()) {
      const AtLevel at(level);
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
        for (const size_t numel : {size_t{1}, size_t{64}}) {
          const size_t size = elementSize(c.dtype);
          Bytes nans(numel * size);
          Bytes ones(numel * size);
          Bytes want(numel * size);
          for (size_t i = 0; i < numel; ++i) {
            std::memcpy(nans.data() + i * size, &c.nan, size);
            std::memcpy(ones.data() + i * size, &c.one, size);
            std::memcpy(want.data() + i * size, &c.canonical, size);
          }
          for (const auto& [a, b] : {std::pair{&nans, &ones}, std::pair{&ones, &nans}, std::pair{&nans, &nans}}) {
            Bytes got(want.size());
            reduce(c.dtype, op, got.data(), a->data(), b->data(), numel);
            EXPECT_TRUE(sameBits(size, got, want)) << describe(level, c.dtype, op);
          }
        }
      }
    }
  }
}

TEST(Reduce, ZerosFollowIeee) {
  const auto bits = [](ReduceOp op, float a, float b) {
    float out = 7;
    reduce(DType::Float32, op, &out, &a, &b, 1);
    return oracle::readAs<uint32_t>(&out);
  };
  constexpr uint32_t kMinusZero = 0x80000000;
  EXPECT_EQ(bits(ReduceOp::Sum, -0.0F, 0.0F), 0U);
  EXPECT_EQ(bits(ReduceOp::Sum, -0.0F, -0.0F), kMinusZero);
  for (const bool swap : {false, true}) {
    const float a = swap ? 0.0F : -0.0F;
    EXPECT_EQ(bits(ReduceOp::Min, a, -a), kMinusZero);
    EXPECT_EQ(bits(ReduceOp::Max, a, -a), 0U);
  }
}

TEST(Reduce, InfinityAndOverflow) {
  const uint16_t max_half = 0x7bff;
  uint16_t half = 0;
  reduce(DType::Float16, ReduceOp::Sum, &half, &max_half, &max_half, 1);
  EXPECT_EQ(half, 0x7c00);
  const uint8_t max_e4m3 = 0x7e;
  uint8_t e4m3 = 0;
  reduce(DType::Float8E4M3, ReduceOp::Sum, &e4m3, &max_e4m3, &max_e4m3, 1);
  EXPECT_EQ(e4m3, 0x7f); // e4m3fn has no infinity
  const float plus = std::numeric_limits<float>::infinity();
  const float minus = -plus;
  float sum = 0;
  reduce(DType::Float32, ReduceOp::Sum, &sum, &plus, &minus, 1);
  EXPECT_EQ(oracle::readAs<uint32_t>(&sum), 0x7fc00000U); // x86 alone would say 0xffc00000
}

TEST(Reduce, IntegersWrap) {
  const int32_t big = std::numeric_limits<int32_t>::max();
  const int32_t one = 1;
  int32_t sum = 0;
  reduce(DType::Int32, ReduceOp::Sum, &sum, &big, &one, 1);
  EXPECT_EQ(sum, std::numeric_limits<int32_t>::min());
  const uint16_t most = 0xffff; // squared it overflows an int
  uint16_t product = 0;
  reduce(DType::UInt16, ReduceOp::Product, &product, &most, &most, 1);
  EXPECT_EQ(product, 1);
}

TEST(Reduce, AnyNonZeroByteIsTrue) {
  const uint8_t a[] = {0, 2, 0, 255, 4};
  const uint8_t b[] = {0, 0, 3, 1, 8};
  uint8_t out[5];
  reduce(DType::Bool, ReduceOp::Sum, out, a, b, 5);
  EXPECT_EQ((std::vector<uint8_t>(out, out + 5)), (std::vector<uint8_t>{0, 1, 1, 1, 1}));
  reduce(DType::Bool, ReduceOp::Product, out, a, b, 5);
  EXPECT_EQ((std::vector<uint8_t>(out, out + 5)), (std::vector<uint8_t>{0, 0, 0, 1, 1}));
  reduce(DType::Bool, ReduceOp::Bxor, out, a, b, 5);
  EXPECT_EQ((std::vector<uint8_t>(out, out + 5)), (std::vector<uint8_t>{0, 1, 1, 0, 0}));
}

TEST(Reduce, ComplexProductIsNotContracted) {
  // re = a*a - c*1 with c = round(a*a): zero unless a fused multiply-add keeps the bits that the rounding cut off.
  const float a = 1.0F + std::ldexp(1.0F, -12);
  const float c = oracle::multiply(a, a);
  const float left[] = {a, c};
  const float right[] = {a, 1.0F};
  float out[2];
  reduce(DType::Complex64, ReduceOp::Product, out, left, right, 1);
  EXPECT_EQ(out[0], 0.0F);
}

TEST(Reduce, RefusesExactlyWhatIsUndefined) {
  const Bytes a(64);
  const Bytes b(64);
  for (const DType dtype : allDTypes()) {
    for (const ReduceOp op : allOps()) {
      const std::string refusal = whyUnsupported(op, dtype);
      Bytes out(64, 0xa5);
      try {
        reduce(dtype, op, out.data(), a.data(), b.data(), 2);
        EXPECT_EQ(refusal, "") << describe(simdLevel(), dtype, op);
      } catch (const Error& error) {
        EXPECT_EQ(error.record().code, ErrorCode::Unsupported);
        EXPECT_EQ(error.record().summary, refusal);
        EXPECT_EQ(out, Bytes(64, 0xa5));
      }
    }
    Bytes out(64);
    EXPECT_THROW(reduce(dtype, ReduceOp::None, out.data(), a.data(), b.data(), 1), Error);
  }
}

} // namespace
} // namespace pycomm
