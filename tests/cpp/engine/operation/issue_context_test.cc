#include "engine/operation/issue_context.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

namespace pycomm {
namespace {

TEST(OperationIds, AreEqualOnAllRanksHoweverThreadsInterleave) {
  std::atomic<int64_t> counter_a{0};
  std::atomic<int64_t> counter_b{0};
  const OperationId user_a = takeOperationId(counter_a, 1);
  const OperationId user_b = takeOperationId(counter_b, 1);
  EXPECT_EQ(user_a.id, user_b.id);

  // Rank a: the callback issues between the user's two operations; rank b: after both.
  uint64_t callback_a = 0;
  uint64_t callback_b = 0;
  {
    const IssueScope scope(callbackContext(nullptr, user_a.id, 1));
    callback_a = takeOperationId(counter_a, 1).id;
  }
  const uint64_t second_a = takeOperationId(counter_a, 1).id;
  const uint64_t second_b = takeOperationId(counter_b, 1).id;
  {
    const IssueScope scope(callbackContext(nullptr, user_b.id, 1));
    callback_b = takeOperationId(counter_b, 1).id;
    EXPECT_NE(takeOperationId(counter_b, 1).id, callback_b);
  }
  EXPECT_EQ(second_a, second_b);
  EXPECT_EQ(callback_a, callback_b);
  EXPECT_NE(callback_a & kDerivedIdBit, 0U);
}

TEST(OperationIds, AChainGoesOnInItsCallbacks) {
  std::atomic<int64_t> counter{0};
  const auto chain = std::make_shared<IssueContext>(IssueContext::Kind::Chain, 42);
  const IssueScope scope(chain);
  const uint64_t first = takeOperationId(counter, 1).id;
  EXPECT_EQ(callbackContext(chain, first, 1), chain);
  EXPECT_EQ(counter.load(), 0);
}

} // namespace
} // namespace pycomm
