#include "numeric/simd_level.h"

#include <gtest/gtest.h>

#include "numeric_testing.h"

namespace pycomm {
namespace {

TEST(SimdLevel, CanBeLoweredAndRaisedAgain) {
  const SimdLevel own = simdLevel();
  forceSimdLevel(SimdLevel::Scalar);
  EXPECT_EQ(simdLevel(), SimdLevel::Scalar);
  forceSimdLevel(own);
  EXPECT_EQ(simdLevel(), own);
}

TEST(SimdLevel, ALevelThatTheProcessorLacksIsIgnored) {
#if defined(__x86_64__)
  const SimdLevel foreign = SimdLevel::Neon;
#else
  const SimdLevel foreign = SimdLevel::Avx2;
#endif
  const SimdLevel own = simdLevel();
  forceSimdLevel(foreign);
  EXPECT_EQ(simdLevel(), own);
}

TEST(SimdLevel, Arm64AlwaysHasNeon) {
#if defined(__aarch64__)
  EXPECT_EQ(simdLevel(), SimdLevel::Neon);
#else
  GTEST_SKIP() << "not arm64; this processor has " << simdLevelName(simdLevel());
#endif
}

TEST(SimdLevel, NamesDiffer) {
  EXPECT_STREQ(simdLevelName(SimdLevel::Scalar), "scalar");
  EXPECT_STREQ(simdLevelName(SimdLevel::Avx2), "avx2");
  EXPECT_STREQ(simdLevelName(SimdLevel::Avx512), "avx512");
  EXPECT_STREQ(simdLevelName(SimdLevel::Neon), "neon");
}

} // namespace
} // namespace pycomm
