#include "engine/data/watched_operations.h"

#include <gtest/gtest.h>

namespace pycomm {
namespace {

using std::chrono::milliseconds;

// Its first report may be lost for want of memory on its way to the control plane.
TEST(WatchedOperations, AHeldOperationThatIsOverdueIsReportedEachSecond) {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 2;
  identity.name = "test";
  identity.hosts = {"alpha", "beta"};
  Tables tables(identity, Limits());
  WatchedOperations watched(tables);
  const TimePoint start = Clock::now();
  const auto held = [&](int64_t sequence, int deadline_ms) {
    Operation::Request request;
    request.id = {static_cast<uint64_t>(sequence), sequence};
    request.descriptor.kind = Collective::AllReduce;
    request.deadline = Deadline::at(start + milliseconds(deadline_ms));
    return std::make_shared<Operation>(std::move(request));
  };
  const auto late = held(1, 50);
  const auto later = held(2, 5000);
  watched.hold(late);
  watched.hold(later);
  for (const int ms : {50, 1050, 2050}) {
    EXPECT_EQ(watched.nextDeadline(), start + milliseconds(ms));
    EXPECT_TRUE(watched.overdueHeld(start + milliseconds(ms - 1)).empty());
    const std::vector<ErrorRecord> records = watched.overdueHeld(start + milliseconds(ms));
    ASSERT_EQ(records.size(), 1U) << ms;
    EXPECT_EQ(records[0].sequence, 1);
    EXPECT_EQ(records[0].code, ErrorCode::Timeout);
  }
  EXPECT_TRUE(watched.release(late));
  EXPECT_TRUE(watched.overdueHeld(start + milliseconds(3050)).empty());
  EXPECT_EQ(watched.nextDeadline(), start + milliseconds(5000));
}

} // namespace
} // namespace pycomm
