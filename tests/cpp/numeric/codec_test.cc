// The wire codecs against bounds in double, and each SIMD path against the scalar one.
#include "numeric/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/error.h"
#include "numeric_testing.h"

namespace pycomm {
namespace {

using testing::AtLevel;
using testing::levels;

const std::vector<Codec> kCodecs = {Codec::BFloat16, Codec::Float16, Codec::Int8};
const std::vector<size_t> kNumels = {0, 1, 7, 255, 256, 257, 512, 1000};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();

using Encoded = std::vector<std::byte>;

struct Coded {
  Encoded bytes;
  size_t overflows;
};

Coded encoded(Codec codec, const std::vector<float>& values) {
  Coded result{Encoded(static_cast<size_t>(encodedNbytes(codec, static_cast<int64_t>(values.size())))), 0};
  result.overflows = encode(codec, result.bytes.data(), DType::Float32, values.data(), values.size());
  return result;
}

std::vector<float> decoded(Codec codec, const Encoded& bytes, size_t numel) {
  std::vector<float> values(numel);
  decode(codec, DType::Float32, values.data(), bytes.data(), numel);
  return values;
}

std::vector<float> roundTrip(Codec codec, const std::vector<float>& values) {
  return decoded(codec, encoded(codec, values).bytes, values.size());
}

std::vector<float> gaussian(size_t numel, double scale, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<float> values(numel);
  for (float& value : values) {
    value = static_cast<float>(normal(random) * scale);
  }
  return values;
}

/// What numeric/codec.h promises of one value in a block whose largest magnitude is m.
double bound(Codec codec, double v, double m) {
  v = std::fabs(v);
  switch (codec) {
    case Codec::None:
      break;
    case Codec::BFloat16:
      return std::max(std::ldexp(v, -8), 0x1p-134);
    case Codec::Float16:
      return std::max({std::ldexp(v, -11), std::ldexp(m, -39), 0x1p-150});
    case Codec::Int8:
      return std::max(m / 125, m / 126 + 0x1p-133) / 2 + std::ldexp(v, -24);
  }
  return 0;
}

/// The largest error of a row in units of its bound.
double worst(Codec codec, const std::vector<float>& values, const std::vector<float>& back) {
  double found = 0;
  for (size_t begin = 0; begin < values.size(); begin += kCodecBlock) {
    const size_t end = std::min(values.size(), begin + kCodecBlock);
    double m = 0;
    for (size_t i = begin; i < end; ++i) {
      m = std::max(m, std::fabs(static_cast<double>(values[i])));
    }
    for (size_t i = begin; i < end; ++i) {
      const double v = values[i];
      found = std::max(found, std::fabs(back[i] - v) / bound(codec, v, m));
    }
  }
  return found;
}

TEST(Codec, NumelsAndBytesAreEachOthersReverse) {
  for (const Codec codec : kCodecs) {
    for (int64_t numel = 0; numel < 2000; ++numel) {
      EXPECT_EQ(encodedNumel(codec, encodedNbytes(codec, numel)), numel);
    }
    EXPECT_EQ(codecNamed(codecName(codec)), codec);
  }
  EXPECT_EQ(encodedNbytes(Codec::Int8, 257), 257 + 4);
  EXPECT_EQ(encodedNbytes(Codec::Float16, 256), 512 + 2);
  EXPECT_EQ(encodedNbytes(Codec::BFloat16, 257), 514);
  EXPECT_FALSE(codecNamed("fp61").has_value());
}

TEST(Codec, KeepsItsBoundAtEverySizeAndMagnitude) {
  for (const Codec codec : kCodecs) {
    for (const size_t numel : kNumels) {
      for (const double scale : {1.0, 1e-6, 1e-30, 1e-37, 1e-38, 1e-42, 1e20, 1e37}) {
        const auto values = gaussian(numel, scale);
        SCOPED_TRACE(std::string(codecName(codec)) + " " + std::to_string(numel) + " x " + std::to_string(scale));
        EXPECT_EQ(encoded(codec, values).overflows, 0U);
        const double error = worst(codec, values, roundTrip(codec, values));
        EXPECT_LE(error, 1.0);
        EXPECT_TRUE(numel < 255 || scale < 1e-30 || error > 0.8) << "the bound is loose: " << error;
      }
    }
  }
}

TEST(Codec, SmallValuesBesideALargeOneKeepTheBlocksBound) {
  for (const Codec codec : kCodecs) {
    auto values = gaussian(1024, 1e-5);
    values[300] = 1000.0F;
    EXPECT_LE(worst(codec, values, roundTrip(codec, values)), 1.0) << codecName(codec);
  }
}

TEST(Codec, ZerosAndPowersOfTwoAreExact) {
  for (const Codec codec : kCodecs) {
    EXPECT_EQ(roundTrip(codec, std::vector<float>(300, 0.0F)), std::vector<float>(300, 0.0F));
    if (codec != Codec::Int8) {
      const std::vector<float> powers = {1.0F, -2.0F, 0.5F, 64.0F, -128.0F};
      EXPECT_EQ(roundTrip(codec, powers), powers) << codecName(codec);
    }
  }
}

TEST(Codec, NansAndInfinitiesStayAndLeaveTheOthersAlone) {
  for (const Codec codec : kCodecs) {
    for (const SimdLevel level : levels()) {
      const AtLevel at(level);
      auto values = gaussian(700, 1e-3);
      const auto clean = roundTrip(codec, values);
      const std::vector<size_t> places = {0, 3, 254, 255, 256, 511, 520, 699};
      const float specials[] = {kNan, kInfinity, -kInfinity};
      for (size_t k = 0; k < places.size(); ++k) {
        values[places[k]] = specials[k % 3];
      }
      const Coded result = encoded(codec, values);
      EXPECT_EQ(result.overflows, 0U) << codecName(codec);
      const auto back = decoded(codec, result.bytes, values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i])) {
          EXPECT_TRUE(std::isnan(back[i])) << codecName(codec) << i;
        } else if (std::isinf(values[i])) {
          EXPECT_EQ(back[i], values[i]) << codecName(codec) << i;
        } else if (values[i] != 0 && codec != Codec::Int8) { // there the largest value may be the one that went
          EXPECT_EQ(back[i], clean[i]) << codecName(codec) << i;
        } else {
          EXPECT_NEAR(back[i], values[i], 4e-3 / 250) << i;
        }
      }
    }
  }
}

TEST(Codec, ABlockOfOneNanOrInfinityIsThat) {
  for (const Codec codec : kCodecs) {
    EXPECT_TRUE(std::isnan(roundTrip(codec, {kNan})[0])) << codecName(codec);
    EXPECT_EQ(roundTrip(codec, {-kInfinity})[0], -kInfinity) << codecName(codec);
    EXPECT_EQ(roundTrip(codec, {kInfinity, -0.0F})[1], 0.0F) << codecName(codec);
  }
}

TEST(Codec, WhatRoundsBeyondTheLargestFloatIsCounted) {
  for (const Codec codec : kCodecs) {
    const std::vector<float> values = {kMax, 1.0F, -kMax, kInfinity, kNan, 1e38F, 3e38F};
    const Coded result = encoded(codec, values);
    const auto back = decoded(codec, result.bytes, values.size());
    size_t became_infinite = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      became_infinite += std::isfinite(values[i]) && !std::isfinite(back[i]) ? 1U : 0U;
    }
    EXPECT_EQ(result.overflows, became_infinite) << codecName(codec);
    EXPECT_TRUE(codec == Codec::Int8 || result.overflows >= 2) << codecName(codec);
  }
  const double too_large[] = {1e300, 1.0, -1e39};
  std::vector<std::byte> bytes(64);
  EXPECT_EQ(encode(Codec::Int8, bytes.data(), DType::Float64, too_large, 3), 2U);
}

TEST(Codec, EveryInstructionSetGivesTheScalarBits) {
  for (const Codec codec : kCodecs) {
    for (const size_t numel : {1U, 7U, 31U, 255U, 256U, 257U, 777U}) {
      for (const double scale : {1.0, 1e-6, 1e-39, 3e37}) {
        auto values = gaussian(numel, scale, static_cast<uint32_t>(numel));
        for (size_t i = 0; i < numel; i += 97) {
          values[i] = i % 2 == 0 ? kNan : -kInfinity;
        }
        Coded reference;
        std::vector<float> back;
        std::vector<float> sum(numel);
        for (const SimdLevel level : levels()) {
          const AtLevel at(level);
          const Coded result = encoded(codec, values);
          const auto mine = decoded(codec, result.bytes, numel);
          std::vector<float> my_sum(numel);
          const void* const sources[] = {result.bytes.data(), result.bytes.data(), result.bytes.data()};
          EXPECT_EQ(0U, sumDecoded(codec, DType::Float32, my_sum.data(), sources, 3, numel, 3));
          if (level == SimdLevel::Scalar) {
            reference = result;
            back = mine;
            sum = my_sum;
          }
          EXPECT_EQ(result.bytes, reference.bytes) << codecName(codec) << " " << simdLevelName(level) << " " << numel;
          EXPECT_EQ(result.overflows, reference.overflows);
          EXPECT_EQ(std::memcmp(mine.data(), back.data(), numel * sizeof(float)), 0) << codecName(codec);
          EXPECT_EQ(std::memcmp(my_sum.data(), sum.data(), numel * sizeof(float)), 0) << codecName(codec);
        }
      }
    }
  }
}

TEST(Codec, CutsAtBlocksGiveTheSameBytes) {
  const auto values = gaussian(1000, 1e-2);
  for (const Codec codec : kCodecs) {
    Encoded pieces;
    for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, 256}, {256, 768}, {768, 1000}}) {
      const auto part =
          encoded(codec, {values.begin() + static_cast<long>(begin), values.begin() + static_cast<long>(end)});
      pieces.insert(pieces.end(), part.bytes.begin(), part.bytes.end());
    }
    EXPECT_EQ(pieces, encoded(codec, values).bytes) << codecName(codec);
  }
}

TEST(Codec, SumsInOrderInFloatAndDividesOnce) {
  const size_t numel = 600;
  for (const Codec codec : kCodecs) {
    std::vector<Encoded> rows;
    std::vector<float> expected(numel, 0.0F);
    for (uint32_t k = 0; k < 5; ++k) {
      rows.push_back(encoded(codec, gaussian(numel, k == 2 ? 100.0 : 1e-3, k)).bytes);
      const auto row = decoded(codec, rows.back(), numel);
      for (size_t i = 0; i < numel; ++i) {
        expected[i] = k == 0 ? row[i] : expected[i] + row[i];
      }
    }
    std::vector<const void*> sources;
    for (const auto& row : rows) {
      sources.push_back(row.data());
    }
    for (const int64_t divisor : {1, 5}) {
      auto wanted = expected;
      for (float& value : wanted) {
        value /= static_cast<float>(divisor);
      }
      std::vector<float> plain(numel);
      EXPECT_EQ(0U, sumDecoded(codec, DType::Float32, plain.data(), sources.data(), sources.size(), numel, divisor));
      EXPECT_EQ(plain, wanted) << codecName(codec);
      Encoded again = rows[0]; // dst may be a source
      auto aliased = sources;
      aliased[0] = again.data();
      EXPECT_EQ(sumEncoded(codec, again.data(), aliased.data(), aliased.size(), numel, divisor), 0U);
      EXPECT_EQ(again, encoded(codec, wanted).bytes) << codecName(codec);
    }
  }
}

TEST(Codec, ASumBeyondTheLargestFloatIsCountedUnlessItWasInfiniteBefore) {
  for (const Codec codec : kCodecs) {
    const Encoded row = encoded(codec, {2.5e38F, 1.0F, kInfinity, kNan, -2.5e38F}).bytes;
    const void* const sources[] = {row.data(), row.data()};
    std::vector<float> sum(5);
    EXPECT_EQ(sumDecoded(codec, DType::Float32, sum.data(), sources, 2, 5), 2U) << codecName(codec);
    EXPECT_EQ(sum[0], kInfinity);
    EXPECT_EQ(sum[4], -kInfinity);
    Encoded result = row;
    EXPECT_EQ(sumEncoded(codec, result.data(), sources, 2, 5), 2U) << codecName(codec);
  }
}

TEST(Codec, FeedbackSendsWhatWasLostBefore) {
  for (const Codec codec : kCodecs) {
    auto values = gaussian(700, 1e-4);
    const auto before = gaussian(700, 1e-5);
    values[5] = kNan;
    values[6] = kInfinity;
    auto sums = values;
    for (size_t i = 0; i < 700; ++i) {
      sums[i] += before[i];
    }
    std::vector<float> expected(700);
    Encoded expected_bytes(static_cast<size_t>(encodedNbytes(codec, 700)));
    EXPECT_EQ(encodeWithError(codec, expected_bytes.data(), sums.data(), expected.data(), 700), 0U);
    auto error = before;
    Encoded bytes(expected_bytes.size());
    EXPECT_EQ(encodeWithFeedback(codec, bytes.data(), values.data(), error.data(), 700), 0U);
    EXPECT_EQ(bytes, expected_bytes) << codecName(codec);
    EXPECT_EQ(error, expected) << codecName(codec);
  }
}

TEST(Codec, TheErrorIsWhatWasLost) {
  for (const Codec codec : kCodecs) {
    auto values = gaussian(700, 1e-4);
    values[5] = kNan;
    values[6] = kInfinity;
    auto error = values;
    Encoded bytes(static_cast<size_t>(encodedNbytes(codec, 700)));
    EXPECT_EQ(encodeWithError(codec, bytes.data(), error.data(), error.data(), 700), 0U);
    EXPECT_EQ(bytes, encoded(codec, values).bytes);
    const auto back = decoded(codec, bytes, 700);
    for (size_t i = 0; i < 700; ++i) {
      EXPECT_EQ(error[i], std::isfinite(values[i]) ? values[i] - back[i] : 0.0F) << codecName(codec) << i;
    }
  }
}

TEST(Codec, TakesOtherFloatsAndRefusesTheRest) {
  const std::vector<float> values = {1.0F, -0.5F, 0.25F, 96.0F};
  const std::vector<double> doubles(values.begin(), values.end());
  Encoded bytes(static_cast<size_t>(encodedNbytes(Codec::Float16, 4)));
  EXPECT_EQ(encode(Codec::Float16, bytes.data(), DType::Float64, doubles.data(), 4), 0U);
  EXPECT_EQ(bytes, encoded(Codec::Float16, values).bytes);
  std::vector<double> back(4);
  decode(Codec::Float16, DType::Float64, back.data(), bytes.data(), 4);
  EXPECT_EQ(back, doubles);
  std::vector<uint16_t> halves(4);
  decode(Codec::Float16, DType::Float16, halves.data(), bytes.data(), 4);
  EXPECT_EQ(halves, (std::vector<uint16_t>{0x3c00, 0xb800, 0x3400, 0x5600}));
  EXPECT_EQ(encode(Codec::Float16, bytes.data(), DType::Float16, halves.data(), 4), 0U);
  EXPECT_EQ(bytes, encoded(Codec::Float16, values).bytes);
  EXPECT_THROW(decode(Codec::Int8, DType::Int32, back.data(), bytes.data(), 1), Error);
  EXPECT_THROW(decode(Codec::None, DType::Float32, back.data(), bytes.data(), 1), Error);
  EXPECT_THROW(decode(static_cast<Codec>(9), DType::Float32, back.data(), bytes.data(), 1), Error);
  EXPECT_THROW(static_cast<void>(sumDecoded(Codec::Int8, DType::Float32, back.data(), nullptr, 0, 1)), Error);
}

} // namespace
} // namespace pycomm
