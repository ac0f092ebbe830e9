#include "idmap/mix.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace pycomm {
namespace {

TEST(Mix, IsABijection) {
  std::mt19937_64 random(0);
  for (int round = 0; round < 100'000; ++round) {
    const uint64_t id = round < 1000 ? static_cast<uint64_t>(round) : random() & kIdMask;
    EXPECT_LE(mixId(id), kIdMask);
    ASSERT_EQ(unmixId(mixId(id)), id);
    ASSERT_EQ(mixId(unmixId(id)), id);
  }
  EXPECT_EQ(unmixId(mixId(kIdMask)), kIdMask);
}

// It stands in checkpoints.
TEST(Mix, StaysAsItIs) {
  EXPECT_EQ(mixId(0), 0U);
  EXPECT_EQ(mixId(1), 2558316640067307269U); // computed in Python
  EXPECT_EQ(mixId((uint64_t{1} << 62) + 12345), 1509396219775511716U);
}

TEST(Mix, SpreadsNeighboursEvenly) {
  std::vector<int> counts(64);
  constexpr int kIds = 1'000'000;
  for (uint64_t id = 0; id < kIds; ++id) {
    ++counts[mixId(id) >> 57];
  }
  for (const int count : counts) {
    EXPECT_NEAR(count, kIds / 64, 6 * 125); // 125: one standard deviation of a random spread
  }
}

} // namespace
} // namespace pycomm
