#include "engine/data/plane_end.h"

#include <gtest/gtest.h>

#include <memory>

namespace pycomm {
namespace {

using std::chrono::milliseconds;

GroupIdentity identityOfTest() {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 2;
  identity.name = "test";
  identity.hosts = {"alpha", "beta"};
  return identity;
}

ErrorRecord recordOf(ErrorCode code) {
  ErrorRecord record;
  record.code = code;
  record.summary = "The end.";
  return record;
}

/// What an operation that comes now ends with.
ErrorCode late(const PlaneEnd& end) {
  Operation::Request request;
  request.descriptor.kind = Collective::AllReduce;
  Operation operation(std::move(request));
  end.endAtOnce(operation);
  const auto error = operation.error();
  EXPECT_TRUE(error.has_value());
  EXPECT_STREQ(error->phase.text(), "not_started");
  return error->code;
}

struct PlaneEndTest : ::testing::Test {
  const GroupIdentity of = identityOfTest();
  PlaneEnd end{of};
  const TimePoint start = Clock::now();
  int closed = 0;

  void close(ErrorCode code, TimePoint now) {
    end.close(recordOf(code), [this] { ++closed; }, now);
  }
  void finish() {
    end.end()();
    EXPECT_EQ(closed, 1);
    EXPECT_EQ(end.endsAt(), TimePoint::max()) << "once";
    EXPECT_TRUE(end.failed());
  }
};

TEST_F(PlaneEndTest, TheFirstFailureStays) {
  EXPECT_TRUE(end.running());
  EXPECT_EQ(late(end), ErrorCode::ShutDown) << "an operation of a way that is over already";
  EXPECT_TRUE(end.fail(recordOf(ErrorCode::PeerDead), start));
  EXPECT_FALSE(end.running());
  EXPECT_TRUE(end.failed());
  EXPECT_FALSE(end.fail(recordOf(ErrorCode::Timeout), start));
  EXPECT_EQ(late(end), ErrorCode::PeerDead);
  EXPECT_EQ(end.endsAt(), TimePoint::max()) << "links stay open until the group is closed";
}

TEST_F(PlaneEndTest, LinksStayOpenForGoodbyes) {
  close(ErrorCode::Aborted, start);
  EXPECT_FALSE(end.running());
  EXPECT_FALSE(end.failed());
  EXPECT_EQ(end.endsAt(), start) << "no link, no goodbye";
  EXPECT_EQ(late(end), ErrorCode::Aborted);
  end.goodbyesQueued(true, start);
  EXPECT_EQ(end.endsAt(), start + milliseconds(1500));
  end.goodbyesSaid(start + milliseconds(100));
  EXPECT_EQ(end.endsAt(), start + milliseconds(120));
  finish();
  EXPECT_EQ(late(end), ErrorCode::Aborted);
}

TEST_F(PlaneEndTest, GoodbyesThatHaveLeftNeedNoRoom) {
  close(ErrorCode::Aborted, start);
  end.goodbyesQueued(false, start);
  EXPECT_EQ(end.endsAt(), start + milliseconds(20));
}

// News of the failure is still on its way to other ranks, and an end of the links would look like a death.
TEST_F(PlaneEndTest, LinksStayOpenForAWhileAfterAFailure) {
  EXPECT_TRUE(end.fail(recordOf(ErrorCode::PeerDead), start));
  close(ErrorCode::Aborted, start + milliseconds(10));
  EXPECT_EQ(end.endsAt(), start + milliseconds(50));
  EXPECT_EQ(late(end), ErrorCode::PeerDead) << "the group's cause, not that it is closed";
  finish();
}

TEST_F(PlaneEndTest, AFailureThatIsLongAgoHoldsNothingUp) {
  EXPECT_TRUE(end.fail(recordOf(ErrorCode::PeerDead), start));
  close(ErrorCode::Aborted, start + milliseconds(500));
  EXPECT_EQ(end.endsAt(), start + milliseconds(500));
}

TEST_F(PlaneEndTest, AGroupThatClosesMayFail) {
  close(ErrorCode::Aborted, start);
  end.goodbyesQueued(true, start);
  EXPECT_TRUE(end.fail(recordOf(ErrorCode::PeerDead), start + milliseconds(1)));
  EXPECT_EQ(end.endsAt(), start + milliseconds(1500));
  finish();
  EXPECT_EQ(late(end), ErrorCode::PeerDead);
}

} // namespace
} // namespace pycomm
