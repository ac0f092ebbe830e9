#include "engine/data/refused_operations.h"

#include <gtest/gtest.h>

#include <new>

#include "allocations.h"
#include "base/error.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;

struct RefusedOperationsTest : ::testing::Test {
  GroupIdentity identity;
  const TimePoint start = Clock::now();
  const std::exception_ptr exception =
      std::make_exception_ptr(Error(ErrorCode::ProtocolViolation, "it does not fit", "report this as a bug"));

  RefusedOperationsTest() {
    identity.rank = 0;
    identity.size = 2;
    identity.name = "test";
    identity.hosts = {"alpha", "beta"};
  }
  std::shared_ptr<Operation> operation(int deadline_ms) const {
    Operation::Request request;
    request.descriptor.kind = Collective::AllReduce;
    request.deadline = Deadline::at(start + milliseconds(deadline_ms));
    return std::make_shared<Operation>(std::move(request));
  }
};

TEST_F(RefusedOperationsTest, OperationsEndWithTheGroup) {
  RefusedOperations refused(identity);
  const auto one = operation(50);
  const auto other = operation(20);
  refused.add(one, exception);
  refused.add(other, exception);
  EXPECT_TRUE(refused.has(*one));
  EXPECT_FALSE(one->done()) << "its waiter would begin what the other ranks do not expect";
  EXPECT_EQ(refused.nextDeadline(), start + milliseconds(20));
  std::vector<const Operation*> ended;
  refused.endAll([&](Operation& operation) { ended.push_back(&operation); });
  EXPECT_EQ(ended, (std::vector<const Operation*>{one.get(), other.get()}));
  EXPECT_FALSE(refused.has(*one));
  EXPECT_EQ(refused.nextDeadline(), TimePoint::max());
}

TEST_F(RefusedOperationsTest, AFailureThatCannotBeReportedEndsThem) {
  RefusedOperations refused(identity);
  const auto one = operation(50);
  refused.add(one, exception);
  refused.endWith(exception);
  ASSERT_TRUE(one->done());
  EXPECT_EQ(one->error()->code, ErrorCode::ProtocolViolation) << one->error()->text();
  EXPECT_FALSE(refused.has(*one));
}

TEST_F(RefusedOperationsTest, AFailureThatWasLostEndsThemAtTheirDeadlines) {
  RefusedOperations refused(identity);
  const auto one = operation(50);
  const auto other = operation(20);
  refused.add(one, exception);
  refused.add(other, exception);
  refused.endLate(start + milliseconds(19));
  EXPECT_FALSE(other->done());
  refused.endLate(start + milliseconds(20));
  ASSERT_TRUE(other->done());
  EXPECT_EQ(other->error()->code, ErrorCode::OutOfMemory) << other->error()->text();
  EXPECT_FALSE(one->done());
  EXPECT_EQ(refused.nextDeadline(), start + milliseconds(50));
}

TEST_F(RefusedOperationsTest, WithoutMemoryToRememberItAnOperationEndsAtOnce) {
  RefusedOperations refused(identity);
  const auto one = operation(50);
  testing::failAllocation(1);
  refused.add(one, exception);
  const bool failed = testing::allocationFailed();
  testing::failAllocation(0);
  ASSERT_TRUE(failed);
  ASSERT_TRUE(one->done());
  EXPECT_EQ(one->error()->code, ErrorCode::ProtocolViolation) << one->error()->text();
  EXPECT_FALSE(refused.has(*one));
}

} // namespace
} // namespace pycomm
