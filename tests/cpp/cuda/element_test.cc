// The kernels' own conversions against those of the numeric layer, which were written apart: bit by bit.
#include "cuda/element.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "numeric/convert.h"

namespace pycomm::cuda {
namespace {

/// Every sign and exponent with mantissas around what the formats cut off, and a million others.
std::vector<float> samples() {
  std::vector<float> values;
  for (uint32_t top = 0; top < 512; ++top) {
    for (const uint32_t bit : {0U, 12U, 13U, 15U, 16U, 19U, 20U, 21U, 22U}) {
      for (uint32_t odd = 0; odd < 4; ++odd) {
        const uint32_t at = (1U << bit) * (2 * odd + 1);
        for (const int32_t off : {-1, 0, 1}) {
          values.push_back(floatOf((top << 23) | ((at + static_cast<uint32_t>(off)) & 0x7fffffU)));
        }
      }
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 1'000'000; ++i) {
    values.push_back(floatOf(random()));
  }
  return values;
}

template <class Element>
void compareWith(DType dtype) {
  const std::vector<float> values = samples();
  std::vector<typename Element::Stored> expected(values.size());
  convertScalar(dtype, expected.data(), DType::Float32, values.data(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(Element::store(values[i]), expected[i]) << std::hex << floatBits(values[i]);
  }
  const uint32_t patterns = 1U << (8 * sizeof(typename Element::Stored));
  for (uint32_t pattern = 0; pattern < patterns; ++pattern) {
    const auto stored = static_cast<typename Element::Stored>(pattern);
    float back = 0;
    convertScalar(DType::Float32, &back, dtype, &stored, 1);
    const float ours = Float32::store(Element::load(stored));
    ASSERT_EQ(floatBits(ours), floatBits(back)) << std::hex << pattern;
    ASSERT_EQ(Element::finite(stored), magnitudeBits(back) < kFloatInfinity) << std::hex << pattern;
  }
}

TEST(Element, ConvertsAsTheNumericLayerDoes) {
  compareWith<Half>(DType::Float16);
  compareWith<Bfloat16>(DType::BFloat16);
  compareWith<E4m3>(DType::Float8E4M3);
  compareWith<E5m2>(DType::Float8E5M2);
}

} // namespace
} // namespace pycomm::cuda
