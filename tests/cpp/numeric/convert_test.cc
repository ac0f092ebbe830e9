#include "numeric/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "base/error.h"
#include "numeric/small_float.h"
#include "numeric_testing.h"

namespace pycomm {
namespace {

using testing::allDTypes;
using testing::AtLevel;
using testing::Bytes;
using testing::framed;
using testing::levels;
using testing::sameBits;
using testing::samples;
using testing::wireDTypes;

float fromBits(uint32_t bits) {
  return oracle::readAs<float>(&bits);
}

uint32_t toBits(float value) {
  return oracle::readAs<uint32_t>(&value);
}

std::vector<DType> smallDTypes() {
  return {DType::Float16, DType::BFloat16, DType::Float8E4M3, DType::Float8E5M2};
}

Bytes everyPattern(DType dtype) {
  const size_t size = elementSize(dtype);
  const uint32_t count = size == 1 ? 256 : 65536;
  Bytes bytes(count * size);
  for (uint32_t code = 0; code < count; ++code) {
    std::memcpy(bytes.data() + code * size, &code, size); // the low bytes: both supported processors are little-endian
  }
  return bytes;
}

/// Every value of the format, every midpoint of neighbours, and the fp32 numbers next to those; both signs.
std::vector<float> roundingPoints(DType dtype) {
  const oracle::Format& format = oracle::formatOf(dtype);
  std::vector<float> points;
  for (uint32_t code = 0; code < format.top(); ++code) {
    const double low = format.magnitude(code);
    const double middle = (low + format.magnitude(code + 1)) / 2;
    for (const double value : {low, middle}) {
      const float point = static_cast<float>(value);
      for (const float near : {point, std::nextafterf(point, 0.0F), std::nextafterf(point, INFINITY)}) {
        points.push_back(near);
        points.push_back(-near);
      }
    }
  }
  return points;
}

std::vector<float> randomFloats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    value = fromBits(static_cast<uint32_t>(random()));
  }
  return values;
}

std::vector<float> specialFloats() {
  std::vector<float> values;
  for (const uint32_t magnitude :
       {0x0U,        0x1U,        0x7fffffU,   0x800000U,   0x33000000U, 0x33000001U, 0x33800000U,
        0x387fe000U, 0x38800000U, 0x43e00000U, 0x43e80000U, 0x43e80001U, 0x477fefffU, 0x477ff000U,
        0x7f7f7fffU, 0x7f7f8000U, 0x7f7fffffU, 0x7f800000U, 0x7f800001U, 0x7fc00001U, 0x7fffffffU}) {
    values.push_back(fromBits(magnitude));
    values.push_back(fromBits(magnitude | 0x80000000U));
  }
  return values;
}

void expectEncoded(DType to, const std::vector<float>& values) {
  Bytes want(values.size() * elementSize(to));
  for (size_t i = 0; i < values.size(); ++i) {
    oracle::writeFloat(to, want.data() + i * elementSize(to), values[i]);
  }
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    Bytes got(want.size());
    convert(to, got.data(), DType::Float32, values.data(), values.size());
    EXPECT_TRUE(sameBits(elementSize(to), got, want)) << simdLevelName(level) << " float32 to " << dtypeName(to);
  }
}

TEST(Convert, RoundsEveryMidpointAndItsNeighboursToNearestEven) {
  for (const DType to : smallDTypes()) {
    expectEncoded(to, roundingPoints(to));
  }
}

TEST(Convert, RoundsRandomAndSpecialFloats) {
  for (const DType to : smallDTypes()) {
    expectEncoded(to, randomFloats(200000, 1));
    expectEncoded(to, specialFloats());
  }
}

TEST(Convert, KnownAnswers) {
  EXPECT_EQ(numeric::HalfFormat::encode(65504.0F), 0x7bff);
  EXPECT_EQ(numeric::HalfFormat::encode(65519.0F), 0x7bff);
  EXPECT_EQ(numeric::HalfFormat::encode(65520.0F), 0x7c00); // a tie, and infinity is the even one
  EXPECT_EQ(numeric::HalfFormat::encode(-0.0F), 0x8000);
  EXPECT_EQ(numeric::HalfFormat::encode(std::ldexp(1.0F, -24)), 1);
  EXPECT_EQ(numeric::HalfFormat::encode(std::ldexp(1.0F, -25)), 0); // a tie with zero
  EXPECT_EQ(numeric::HalfFormat::encode(NAN), 0x7e00);
  EXPECT_EQ(numeric::HalfFormat::decode(0x3555), 0.333251953125F);
  EXPECT_EQ(numeric::Bfloat16Format::encode(1.00390625F), 0x3f80); // 1 + 2^-8: a tie
  EXPECT_EQ(numeric::Bfloat16Format::encode(1.01171875F), 0x3f82); // 1 + 3 * 2^-8: a tie
  EXPECT_EQ(numeric::Bfloat16Format::encode(3.4e38F), 0x7f80);
  EXPECT_EQ(numeric::Bfloat16Format::decode(0xc049), -3.140625F);
  EXPECT_EQ(numeric::E4m3Format::decode(0x7e), 448.0F);
  EXPECT_EQ(numeric::E4m3Format::encode(464.0F), 0x7e); // a tie, and 448 is the even one
  EXPECT_EQ(numeric::E4m3Format::encode(465.0F), 0x7f);
  EXPECT_EQ(numeric::E4m3Format::encode(-INFINITY), 0x7f);
  EXPECT_EQ(numeric::E4m3Format::decode(0x01), std::ldexp(1.0F, -9));
  EXPECT_EQ(numeric::E5m2Format::decode(0x7b), 57344.0F);
  EXPECT_EQ(numeric::E5m2Format::encode(61440.0F), 0x7c);
  EXPECT_EQ(numeric::E5m2Format::encode(-61439.0F), 0xfb);
}

TEST(Convert, SingleValuesAreTheScalarReference) {
  for (const float value : randomFloats(20000, 2)) {
    const double exact = static_cast<double>(value);
    EXPECT_EQ(numeric::HalfFormat::encode(value), oracle::formatOf(DType::Float16).encode(exact));
    EXPECT_EQ(numeric::Bfloat16Format::encode(value), oracle::formatOf(DType::BFloat16).encode(exact));
    EXPECT_EQ(numeric::E4m3Format::encode(value), oracle::formatOf(DType::Float8E4M3).encode(exact));
    EXPECT_EQ(numeric::E5m2Format::encode(value), oracle::formatOf(DType::Float8E5M2).encode(exact));
  }
}

TEST(Convert, EveryPatternOfEveryFormatToEveryOther) {
  for (const DType from : smallDTypes()) {
    const Bytes src = everyPattern(from);
    const size_t numel = src.size() / elementSize(from);
    for (const DType to : wireDTypes()) {
      Bytes want(numel * elementSize(to));
      for (size_t i = 0; i < numel; ++i) {
        oracle::writeFloat(
            to, want.data() + i * elementSize(to), oracle::readFloat(from, src.data() + i * elementSize(from)));
      }
      Bytes scalar(want.size());
      convertScalar(to, scalar.data(), from, src.data(), numel);
      EXPECT_TRUE(sameBits(elementSize(to), scalar, want)) << dtypeName(from) << " to " << dtypeName(to);
      for (const SimdLevel level : levels()) {
        const AtLevel at(level);
        Bytes got(want.size());
        convert(to, got.data(), from, src.data(), numel);
        EXPECT_TRUE(sameBits(elementSize(to), got, want))
            << simdLevelName(level) << " " << dtypeName(from) << " to " << dtypeName(to);
      }
    }
  }
}

TEST(Convert, ThereAndBackGivesTheSameBits) {
  for (const DType dtype : smallDTypes()) {
    const Bytes src = everyPattern(dtype);
    const size_t size = elementSize(dtype);
    const size_t numel = src.size() / size;
    std::vector<float> wide(numel);
    Bytes back(src.size());
    convert(DType::Float32, wide.data(), dtype, src.data(), numel);
    convert(dtype, back.data(), DType::Float32, wide.data(), numel);
    for (size_t i = 0; i < numel; ++i) {
      if (!std::isnan(wide[i])) {
        EXPECT_EQ(0, std::memcmp(src.data() + i * size, back.data() + i * size, size)) << dtypeName(dtype) << " " << i;
      }
    }
  }
}

TEST(Convert, ScalesBeforeItRounds) {
  // 1e-6 is subnormal in fp16 and keeps 4 bits there; scaled by 2^16 it keeps all 11.
  const float gradient = 1e-6F;
  uint16_t wire = 0;
  convert(DType::Float16, &wire, DType::Float32, &gradient, 1, 65536.0F);
  float back = 0;
  convert(DType::Float32, &back, DType::Float16, &wire, 1, 1.0F / 65536.0F);
  EXPECT_NEAR(back, gradient, gradient * 5e-4F);
  EXPECT_GT(std::fabs(numeric::HalfFormat::decode(numeric::HalfFormat::encode(gradient)) - gradient), gradient * 1e-2F);
}

TEST(Convert, FactorsMatchTheOracleOnAllPairs) {
  constexpr size_t kNumel = 1003;
  for (const float factor : {0.0009765625F, 2.0F, 65536.0F, -4.0F, 3.7e-3F}) {
    for (const DType from : wireDTypes()) {
      const Bytes src = samples(from, kNumel, 3);
      for (const DType to : wireDTypes()) {
        Bytes want(kNumel * elementSize(to));
        for (size_t i = 0; i < kNumel; ++i) {
          const float value = oracle::readFloat(from, src.data() + i * elementSize(from));
          oracle::writeFloat(to, want.data() + i * elementSize(to), oracle::multiply(value, factor));
        }
        for (const SimdLevel level : levels()) {
          const AtLevel at(level);
          Bytes got(want.size());
          convert(to, got.data(), from, src.data(), kNumel, factor);
          EXPECT_TRUE(sameBits(elementSize(to), got, want))
              << simdLevelName(level) << " " << dtypeName(from) << " to " << dtypeName(to) << " times " << factor;
        }
      }
    }
  }
}

TEST(Convert, EverySizeAndAlignmentWritesExactlyItsElements) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType from : wireDTypes()) {
      for (const DType to : wireDTypes()) {
        for (size_t numel = 0; numel <= 67; ++numel) {
          const size_t skew = numel % 4;
          const Bytes values = samples(from, numel, 4);
          const Bytes src = framed(skew, values, 0);
          Bytes converted(numel * elementSize(to));
          convertScalar(to, converted.data(), from, values.data(), numel, 0.5F);
          const Bytes want = framed(3 - skew, converted, 64);
          Bytes got(want.size(), 0xa5);
          convert(to, got.data() + 3 - skew, from, src.data() + skew, numel, 0.5F);
          EXPECT_TRUE(sameBits(1, got, want))
              << simdLevelName(level) << " " << dtypeName(from) << " to " << dtypeName(to);
        }
      }
    }
  }
}

TEST(Convert, InPlaceWhereSizesAreEqual) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    for (const DType from : wireDTypes()) {
      for (const DType to : wireDTypes()) {
        if (elementSize(from) == elementSize(to)) {
          Bytes buffer = samples(from, 133, 5);
          Bytes want(buffer.size());
          convertScalar(to, want.data(), from, buffer.data(), 133, 2.0F);
          convert(to, buffer.data(), from, buffer.data(), 133, 2.0F);
          EXPECT_TRUE(sameBits(elementSize(to), buffer, want)) << simdLevelName(level) << " " << dtypeName(from);
        }
      }
    }
  }
}

TEST(Convert, FloatToFloatKeepsSubnormalsAndMakesNansCanonical) {
  const std::vector<float> src = {fromBits(1), fromBits(0x807fffff), -0.0F, fromBits(0xffc12345), INFINITY};
  std::vector<float> dst(src.size());
  convert(DType::Float32, dst.data(), DType::Float32, src.data(), src.size());
  EXPECT_EQ(toBits(dst[0]), 1U);
  EXPECT_EQ(toBits(dst[1]), 0x807fffffU);
  EXPECT_EQ(toBits(dst[2]), 0x80000000U);
  EXPECT_EQ(toBits(dst[3]), 0x7fc00000U);
  EXPECT_EQ(dst[4], INFINITY);
}

TEST(Convert, TheLargestMagnitudeIsFoundWhereverItStands) {
  for (const SimdLevel level : levels()) {
    const AtLevel at(level);
    EXPECT_EQ(magnitudeOf(nullptr, 0).max_bits, 0U);
    for (const size_t numel : {size_t{1}, size_t{7}, size_t{64}, size_t{301}}) {
      for (size_t place = 0; place < numel; ++place) {
        std::vector<float> values(numel, 1e-40F);
        EXPECT_EQ(magnitudeOf(values.data(), numel).max_bits, toBits(1e-40F));
        for (const float largest : {3.0F, -3.0F, 3e38F}) {
          values[place] = largest;
          EXPECT_EQ(magnitudeOf(values.data(), numel).max_bits, toBits(std::fabs(largest)));
          EXPECT_FALSE(magnitudeOf(values.data(), numel).non_finite);
        }
        for (const float beyond : {INFINITY, -INFINITY, NAN, -NAN}) {
          values[place] = beyond;
          EXPECT_EQ(magnitudeOf(values.data(), numel).max_bits, numel > 1 ? toBits(1e-40F) : 0U);
          EXPECT_TRUE(magnitudeOf(values.data(), numel).non_finite);
        }
      }
    }
  }
}

TEST(Convert, OtherDTypesAreRefused) {
  double src = 1;
  double dst = 2;
  for (const DType other : allDTypes()) {
    bool wire = false;
    for (const DType dtype : wireDTypes()) {
      wire = wire || dtype == other;
    }
    if (wire) {
      continue;
    }
    for (const bool as_target : {false, true}) {
      try {
        convert(as_target ? other : DType::Float32, &dst, as_target ? DType::Float32 : other, &src, 1);
        FAIL() << dtypeName(other) << " was converted";
      } catch (const Error& error) {
        EXPECT_EQ(error.record().code, ErrorCode::Unsupported);
        EXPECT_NE(error.record().summary.find(dtypeName(other)), std::string::npos) << error.what();
      }
    }
  }
  EXPECT_EQ(dst, 2);
}

} // namespace
} // namespace pycomm
