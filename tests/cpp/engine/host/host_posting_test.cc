// What callers post to a plane that nobody runs.
#include <gtest/gtest.h>

#include <new>

#include "allocations.h"
#include "engine/host/host_plane.h"

namespace pycomm {
namespace {

class HostPosting : public ::testing::Test {
 protected:
  HostPosting() {
    reopen();
  }
  ~HostPosting() override {
    close();
  }
  void reopen() {
    close();
    identity_.size = 2;
    identity_.hosts = {"here", "here"};
    arena_ = std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(2)));
    arena_->commit(0, HostView::commonNbytes(2));
    HostPlane::Events events;
    events.noticed = [](const ErrorRecord&) {}; // of memory, and at the end that this rank has left in the middle
    plane = std::make_unique<HostPlane>(identity_, arena_, HostHeaps(), HostPlane::Config(), std::move(events));
  }
  void close() {
    if (plane != nullptr) {
      ErrorRecord reason;
      reason.code = ErrorCode::ShutDown;
      plane->close(reason);
    }
  }
  static std::shared_ptr<Operation> operationOf(uint64_t id) {
    Operation::Request request;
    request.id.id = id;
    request.descriptor.kind = Collective::AllReduce;
    request.descriptor.dtype = DType::Float32;
    request.descriptor.numel = 3;
    return std::make_shared<Operation>(std::move(request));
  }
  bool post(uint64_t id) {
    return plane->post([&] { return operationOf(id); }, true, made);
  }

  std::unique_ptr<HostPlane> plane;
  std::shared_ptr<Operation> made;

 private:
  GroupIdentity identity_;
  std::shared_ptr<SharedArena> arena_;
};

TEST_F(HostPosting, OperationsGetTicketsInTheOrderInWhichTheyArePosted) {
  EXPECT_EQ(plane->pending(), 0U);
  ASSERT_TRUE(post(7));
  EXPECT_EQ(made->shared().ticket, 1U);
  ASSERT_TRUE(post(8));
  EXPECT_EQ(made->shared().ticket, 2U);
  EXPECT_EQ(made->shared().bytes_total, 12);
  EXPECT_EQ(plane->pending(), 2U);
}

TEST_F(HostPosting, ClosingEndsWhatNobodyTookAndThenNothingIsTaken) {
  ASSERT_TRUE(post(1));
  const std::shared_ptr<Operation> first = made;
  close();
  ASSERT_TRUE(first->done());
  EXPECT_EQ(first->error()->code, ErrorCode::ShutDown);
  EXPECT_EQ(plane->pending(), 0U);
  EXPECT_FALSE(post(2));
  EXPECT_EQ(made->request().id.id, 2U) << "the caller has it and runs it elsewhere";
  EXPECT_EQ(made->shared().ticket, 0U);
  EXPECT_FALSE(made->done());
}

TEST_F(HostPosting, TheLast64AreRemembered) {
  for (uint64_t id = 1; id <= 70; ++id) {
    ASSERT_TRUE(post(id));
    const std::vector<std::shared_ptr<Operation>> recent = plane->recent();
    ASSERT_EQ(recent.size(), std::min<uint64_t>(id, 64));
    EXPECT_EQ(recent.front()->request().id.id, id <= 64 ? 1 : id - 63);
    EXPECT_EQ(recent.back()->request().id.id, id);
  }
}

TEST_F(HostPosting, WithoutMemoryNoTicketIsTaken) {
  int strikes = 0;
  for (int64_t nth = 1; nth <= 8; ++nth) {
    reopen();
    bool posted = true;
    const auto operation = operationOf(1);
    testing::failAllocation(nth);
    try {
      (void)plane->post([&] { return operation; }, true, made);
    } catch (const std::bad_alloc&) {
      posted = false;
      ++strikes;
    }
    testing::failAllocation(0);
    EXPECT_EQ(plane->recent().size(), posted ? 1U : 0U);
    EXPECT_EQ(plane->pending(), posted ? 1U : 0U);
    EXPECT_EQ(operation->shared().ticket, posted ? 1U : 0U);
    ASSERT_TRUE(post(2));
    EXPECT_EQ(made->shared().ticket, posted ? 2U : 1U);
  }
  EXPECT_GE(strikes, 2);
}

} // namespace
} // namespace pycomm
