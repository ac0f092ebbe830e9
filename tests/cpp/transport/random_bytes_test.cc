#include "transport/random_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace pycomm {
namespace {

TEST(RandomBytes, DrawsOtherBytesEachTimeAndFillsAll) {
  std::string first(100000, '\0');
  std::string second(100000, '\0');
  fillRandom(first.data(), first.size());
  fillRandom(second.data(), second.size());
  EXPECT_NE(first, second);
  EXPECT_LT(std::count(first.end() - 1000, first.end(), '\0'), 50); // 4 are expected
}

TEST(RandomBytes, NumbersDiffer) {
  EXPECT_NE(randomNumber(), randomNumber());
}

} // namespace
} // namespace pycomm
