#include "base/slow_wait.h"

#include <gtest/gtest.h>

#include <vector>

namespace pycomm {
namespace {

using std::chrono::seconds;

TEST(SlowWait, IsLoggedAfterTenSecondsThenEachMinuteAndTenTimesAtMost) {
  const TimePoint begin = Clock::now();
  SlowWait slow(begin);
  std::vector<int64_t> lines;
  for (int second = 0; second < 3600; ++second) {
    if (const auto waited_s = slow.due(begin + seconds(second))) {
      EXPECT_EQ(*waited_s, second);
      lines.push_back(*waited_s);
    }
  }
  EXPECT_EQ(lines, (std::vector<int64_t>{10, 70, 130, 190, 250, 310, 370, 430, 490, 550}));
  EXPECT_EQ(slow.lines(), 10);
}

TEST(SlowWait, ALateLookLogsOneLine) {
  const TimePoint begin = Clock::now();
  SlowWait slow(begin);
  EXPECT_EQ(slow.due(begin + seconds(200)), 200);
  EXPECT_FALSE(slow.due(begin + seconds(201)));
  EXPECT_EQ(slow.due(begin + seconds(260)), 260);
}

} // namespace
} // namespace pycomm
