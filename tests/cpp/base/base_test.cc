#include <gtest/gtest.h>

#include <fcntl.h>

#include <thread>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/dtype.h"
#include "base/reduce_op.h"
#include "base/unique_fd.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

TEST(Deadline, IsOneInstant) {
  const TimePoint now = Clock::now();
  const Deadline deadline = Deadline::after(100, now);
  EXPECT_FALSE(deadline.expired(now + milliseconds(99)));
  EXPECT_TRUE(deadline.expired(now + milliseconds(100)));
  EXPECT_EQ(deadline.remainingMs(1000, now + milliseconds(40)), 61); // rounded up, so that poll() never wakes early
  EXPECT_EQ(deadline.remainingMs(10, now), 10);
  EXPECT_EQ(deadline.remainingMs(1000, now + milliseconds(200)), 0);
}

TEST(Deadline, ZeroAndLessHaveExpired) {
  const TimePoint now = Clock::now();
  EXPECT_TRUE(Deadline::after(0, now).expired(now));
  EXPECT_TRUE(Deadline::after(-5, now).expired(now));
}

TEST(Deadline, NeverMeansNever) {
  EXPECT_FALSE(Deadline::never().expired(TimePoint::max()));
  EXPECT_EQ(Deadline::never().remainingMs(77), 77);
  EXPECT_TRUE(Deadline::after(INT64_MAX).isNever()) << "a huge timeout must not overflow into the past";
}

TEST(AbortToken, TheFirstReasonWins) {
  AbortToken token;
  EXPECT_NO_THROW(token.throwIfAborted());
  std::vector<std::thread> threads;
  std::atomic<int> won{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      ErrorRecord reason;
      reason.code = ErrorCode::Timeout;
      reason.peer = i;
      won += token.abort(reason) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(won, 1);
  EXPECT_TRUE(token.aborted());
  EXPECT_THROW(token.throwIfAborted(), Error);
}

TEST(UniqueFd, ClosesOnce) {
  int raw = -1;
  {
    UniqueFd fd(::open("/dev/null", O_RDONLY));
    raw = fd.get();
    UniqueFd moved = std::move(fd);
    EXPECT_FALSE(fd); // NOLINT: what a moved-from descriptor is, is the point
    EXPECT_EQ(moved.get(), raw);
  }
  EXPECT_EQ(::fcntl(raw, F_GETFD), -1);
}

TEST(DType, EveryTypeHasSizeAndName) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_GT(elementSize(dtype), 0U) << i;
    EXPECT_STRNE(dtypeName(dtype), "unknown") << i;
  }
  EXPECT_EQ(elementSize(static_cast<DType>(kDTypeCount)), 0U);
}

TEST(ReduceOp, CombinationsWithoutMeaningSayWhy) {
  EXPECT_EQ(whyUnsupported(ReduceOp::Sum, DType::Complex64), "");
  EXPECT_EQ(whyUnsupported(ReduceOp::Avg, DType::BFloat16), "");
  EXPECT_NE(whyUnsupported(ReduceOp::Avg, DType::Int32).find("not an integer"), std::string::npos);
  EXPECT_NE(whyUnsupported(ReduceOp::Max, DType::Complex128).find("no order"), std::string::npos);
  EXPECT_NE(whyUnsupported(ReduceOp::Bxor, DType::Float16).find("bitwise"), std::string::npos);
  EXPECT_NE(whyUnsupported(static_cast<ReduceOp>(77), DType::Float16), "");
}

} // namespace
} // namespace pycomm
