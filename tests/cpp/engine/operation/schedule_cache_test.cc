#include "engine/operation/schedule_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "engine/rosters.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

ScheduleRequest allReduce(int64_t numel) {
  ScheduleRequest request;
  request.kind = Collective::AllReduce;
  request.dtype = DType::Float32;
  request.reduce_op = ReduceOp::Sum;
  request.numel = numel;
  return request;
}

class Cached : public ::testing::Test {
 protected:
  std::shared_ptr<const PreparedSchedule> get(const ScheduleRequest& request) {
    return cache_.get(cache_.ours(request));
  }

  const Roster roster_ = rosterOf(1, {"alpha", "beta"});
  ScheduleCache cache_{roster_};
};

TEST_F(Cached, FillsInWhoAndHowMany) {
  const ScheduleRequest filled = cache_.ours(allReduce(5));
  EXPECT_EQ(filled.rank, 1);
  EXPECT_EQ(filled.size, 2);
  EXPECT_EQ(filled.topology, &roster_.topology);
  EXPECT_EQ(filled.numel, 5);
}

TEST_F(Cached, TheSameCallGetsTheSameSchedule) {
  const auto first = get(allReduce(1000));
  EXPECT_EQ(get(allReduce(1000)), first);
  EXPECT_NE(get(allReduce(1001)), first);
  ScheduleRequest max = allReduce(1000);
  max.reduce_op = ReduceOp::Max;
  EXPECT_NE(get(max), first);
}

TEST_F(Cached, TheLeastRecentlyUsedGoesFirst) {
  const auto used = get(allReduce(1));
  const std::weak_ptr<const PreparedSchedule> unused = get(allReduce(2));
  for (size_t i = 3; i <= ScheduleCache::kKept; ++i) {
    static_cast<void>(get(allReduce(static_cast<int64_t>(i))));
  }
  EXPECT_EQ(get(allReduce(1)), used);
  EXPECT_FALSE(unused.expired()); // so many are kept
  static_cast<void>(get(allReduce(1000)));
  EXPECT_TRUE(unused.expired());
  EXPECT_EQ(get(allReduce(1)), used);
}

TEST_F(Cached, KeepsABoundedNumberOfBytes) {
  const auto ringOf = [](int64_t steps) {
    ScheduleRequest request = allReduce(steps);
    request.algorithm = Algorithm::Ring;
    request.segment_nbytes = 4;
    return request;
  };
  std::vector<std::weak_ptr<const PreparedSchedule>> schedules;
  size_t made = 0;
  for (int64_t i = 0; i < 20; ++i) {
    const auto schedule = get(ringOf(20000 + i));
    EXPECT_GT(schedule->nbytes, schedule->schedule.steps.size() * sizeof(Step));
    made += schedule->nbytes;
    schedules.emplace_back(schedule);
  }
  ASSERT_GT(made, ScheduleCache::kKeptNbytes);
  size_t kept = 0;
  for (const auto& schedule : schedules) {
    kept += schedule.expired() ? 0 : schedule.lock()->nbytes;
  }
  EXPECT_LE(kept, ScheduleCache::kKeptNbytes);
  EXPECT_GT(kept, ScheduleCache::kKeptNbytes / 2);
  const std::weak_ptr<const PreparedSchedule> last = schedules.back();
  const std::weak_ptr<const PreparedSchedule> larger = get(ringOf(400000));
  EXPECT_TRUE(larger.expired());
  EXPECT_FALSE(last.expired()) << "which makes no room for it";
}

TEST_F(Cached, ARequestWithoutMeaningThrowsAndIsNotKept) {
  ScheduleRequest wrong = allReduce(-1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(static_cast<void>(get(wrong)), Error);
  }
}

std::vector<std::string> lines;

TEST_F(Cached, LogsTheChoiceOncePerPowerOfTwo) {
  lines.clear();
  setLogSink([](LogLevel, const char* line) { lines.emplace_back(line); }, LogLevel::Info);
  for (const int64_t numel : {1000, 1001, 1000, 1000000}) {
    static_cast<void>(get(allReduce(numel)));
  }
  setLogSink(nullptr, LogLevel::Warn);
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_THAT(lines[0], HasSubstr("group test: all_reduce of 4000 bytes uses "));
  EXPECT_THAT(lines[1], HasSubstr("all_reduce of 4000000 bytes uses "));
}

} // namespace
} // namespace pycomm::testing
