#include "engine/host/host_inbox.h"

#include <gtest/gtest.h>

#include <new>

#include "allocations.h"

namespace pycomm {
namespace {

std::shared_ptr<Operation> postedWith(uint64_t id) {
  Operation::Request request;
  request.id.id = id;
  request.descriptor.kind = Collective::AllReduce;
  request.descriptor.dtype = DType::Float32;
  request.descriptor.numel = 3;
  return std::make_shared<Operation>(std::move(request));
}

TEST(HostInbox, OperationsGetTicketsInTheOrderInWhichTheyArePosted) {
  HostInbox inbox;
  std::shared_ptr<Operation> made;
  EXPECT_FALSE(inbox.arrived());
  EXPECT_TRUE(inbox.allEnded());
  ASSERT_TRUE(inbox.post([] { return postedWith(7); }, made));
  ASSERT_TRUE(inbox.post([] { return postedWith(8); }, made));
  EXPECT_EQ(made->shared().ticket, 2U);
  EXPECT_EQ(made->shared().bytes_total, 12);
  EXPECT_TRUE(inbox.arrived());
  std::vector<std::shared_ptr<Operation>> taken;
  inbox.take(taken);
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_EQ(taken[0]->request().id.id, 7U);
  EXPECT_FALSE(inbox.arrived());
  inbox.ended();
  EXPECT_FALSE(inbox.allEnded());
  inbox.ended();
  EXPECT_TRUE(inbox.allEnded());
}

TEST(HostInbox, AClosedInboxReturnsWhatNobodyTookAndTakesNothing) {
  HostInbox inbox;
  std::shared_ptr<Operation> made;
  ASSERT_TRUE(inbox.post([] { return postedWith(1); }, made));
  const std::vector<std::shared_ptr<Operation>> rest = inbox.close();
  ASSERT_EQ(rest.size(), 1U);
  EXPECT_EQ(rest[0], made);
  EXPECT_FALSE(inbox.post([] { return postedWith(2); }, made));
  EXPECT_EQ(made->request().id.id, 2U) << "the caller has it and runs it elsewhere";
  EXPECT_EQ(made->shared().ticket, 0U);
  EXPECT_TRUE(inbox.close().empty());
}

TEST(HostInbox, TheLast64AreRemembered) {
  HostInbox inbox;
  std::shared_ptr<Operation> made;
  for (uint64_t id = 1; id <= 70; ++id) {
    ASSERT_TRUE(inbox.post([&] { return postedWith(id); }, made));
  }
  const std::vector<std::shared_ptr<Operation>> recent = inbox.recent();
  ASSERT_EQ(recent.size(), 64U);
  EXPECT_EQ(recent.front()->request().id.id, 7U);
  EXPECT_EQ(recent.back()->request().id.id, 70U);
}

TEST(HostInbox, WithoutMemoryNoTicketIsTaken) {
  int strikes = 0;
  for (int64_t nth = 1; nth <= 8; ++nth) {
    HostInbox inbox;
    std::shared_ptr<Operation> made;
    bool posted = true;
    const auto operation = postedWith(1);
    testing::failAllocation(nth);
    try {
      (void)inbox.post([&] { return operation; }, made);
    } catch (const std::bad_alloc&) {
      posted = false;
      ++strikes;
    }
    testing::failAllocation(0);
    EXPECT_EQ(inbox.recent().size(), posted ? 1U : 0U);
    EXPECT_EQ(inbox.allEnded(), !posted);
    EXPECT_EQ(operation->shared().ticket, posted ? 1U : 0U);
    ASSERT_TRUE(inbox.post([] { return postedWith(2); }, made));
    EXPECT_EQ(made->shared().ticket, posted ? 2U : 1U);
  }
  EXPECT_GE(strikes, 2);
}

} // namespace
} // namespace pycomm
