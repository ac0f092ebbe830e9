// The data plane of one rank: which way frames leave, how it ends, and what becomes of operations that come too late or cannot begin.
#include "engine/data/data_plane.h"

#include <gtest/gtest.h>

#include "allocations.h"
#include "engine/data/lone_data_loop.h"

namespace pycomm::testing {
namespace {

// ---- which way a frame leaves

FrameHeader questionOf(uint64_t id) {
  FrameHeader header = LoneDataLoop::frameOf(*LoneDataLoop(2).broadcast(id), FrameType::Waiting);
  header.op_id = id;
  return header;
}

TEST(DataPlaneFrames, ThoseToThisRankItselfTakeNoLink) {
  LoneDataLoop data_loop(2);
  const auto sent = data_loop.message(false, Deadline::never(), 0);
  data_loop.plane->post(sent);
  data_loop.plane->post(data_loop.message(true, Deadline::never(), 0));
  EXPECT_TRUE(sent->done());
  EXPECT_EQ(data_loop.connections, 0);
}

// A rank that only asks opens no bulk link: of many ranks, each would have one to every other.
TEST(DataPlaneFrames, QuestionsTakeControlLinksUntilThereIsABulkLink) {
  const FrameHeader question = questionOf(5);
  LoneDataLoop data_loop(2);
  data_loop.receive(1, question);
  EXPECT_EQ(data_loop.takeAsked().size(), 1U) << "its answer";
  EXPECT_EQ(data_loop.connections, 0);
  data_loop.plane->post(data_loop.broadcast(1));
  EXPECT_EQ(data_loop.takeDataFrames(1), std::vector<uint64_t>{1});
  FrameHeader other = question;
  other.op_id = 6;
  data_loop.receive(1, other);
  EXPECT_TRUE(data_loop.takeAsked().empty());
  EXPECT_TRUE(data_loop.takeDataFrames(1).empty());
  FrameHeader last;
  std::memcpy(
      static_cast<void*>(&last),
      data_loop.out[1].written.data() + data_loop.out[1].written.size() - sizeof last,
      sizeof last);
  EXPECT_EQ(last.type, FrameType::NotEntered);
  EXPECT_EQ(last.op_id, 6U);
}

TEST(DataPlaneFrames, OnlyOneThatNoOperationNeedsMayBeLost) {
  LoneDataLoop data_loop(2);
  data_loop.refuses = true;
  const auto receive = data_loop.message(true);
  data_loop.plane->post(receive);
  data_loop.tick(2); // it asks for its message
  EXPECT_EQ(data_loop.connections, 1);
  EXPECT_TRUE(data_loop.noticed.empty()) << data_loop.noticed.front().text();
  data_loop.plane->post(data_loop.broadcast(1));
  EXPECT_EQ(data_loop.noticed.size(), 1U);
}

TEST(DataPlaneFrames, NoneLeavesOnceThePlaneEnds) {
  const FrameHeader question = questionOf(5);
  LoneDataLoop data_loop(2);
  data_loop.plane->follow(data_loop.broadcast(1));
  data_loop.plane->fail(LoneDataLoop::because(ErrorCode::PeerDead));
  data_loop.receive(1, question);
  data_loop.tick(200);
  EXPECT_TRUE(data_loop.takeAsked().empty());
  EXPECT_EQ(data_loop.connections, 0);
}

// ---- how the plane ends

/// What an operation that comes now ends with.
ErrorCode late(LoneDataLoop& data_loop) {
  const auto operation = data_loop.broadcast(99);
  data_loop.plane->post(operation);
  EXPECT_TRUE(operation->done());
  const auto error = operation->error();
  EXPECT_TRUE(error.has_value());
  EXPECT_STREQ(error->phase.text(), "not_started");
  return error->code;
}

struct DataPlaneEnd : ::testing::Test {
  LoneDataLoop data_loop{2};
  int closed = 0;

  void fail(ErrorCode code) {
    data_loop.plane->fail(LoneDataLoop::because(code));
  }
  void close(ErrorCode code = ErrorCode::Aborted) {
    data_loop.plane->close(LoneDataLoop::because(code), [this] { ++closed; });
  }
  /// Opens a link to rank 1, on which a goodbye can be said.
  void open() {
    data_loop.plane->post(data_loop.broadcast(1));
    EXPECT_EQ(data_loop.takeDataFrames(1).size(), 1U);
    data_loop.tick(0); // nothing waits any more
  }
  /// The links end then, and not before.
  void expectEndAt(int ms) {
    EXPECT_EQ(data_loop.plane->nextTick(), data_loop.at(ms));
    data_loop.tick(ms - 1);
    EXPECT_EQ(closed, 0);
    data_loop.tick(ms);
    EXPECT_EQ(closed, 1);
    EXPECT_EQ(data_loop.plane->nextTick(), TimePoint::max()) << "once";
  }
};

TEST_F(DataPlaneEnd, AnOperationOfAWayThatIsOverAlreadyEndsAtOnce) {
  Operation::Request request;
  request.id = {1, 1};
  request.descriptor.kind = Collective::Broadcast;
  request.descriptor.algorithm = Algorithm::SharedMemory;
  const auto operation = std::make_shared<Operation>(std::move(request));
  data_loop.plane->post(operation);
  ASSERT_TRUE(operation->done());
  EXPECT_EQ(operation->error()->code, ErrorCode::ShutDown);
}

TEST_F(DataPlaneEnd, TheFirstFailureStays) {
  fail(ErrorCode::PeerDead);
  fail(ErrorCode::Timeout);
  EXPECT_EQ(late(data_loop), ErrorCode::PeerDead);
  EXPECT_EQ(data_loop.plane->nextTick(), TimePoint::max()) << "links stay open until the group is closed";
}

TEST_F(DataPlaneEnd, WithoutALinkNoGoodbyeIsWaitedFor) {
  close();
  EXPECT_EQ(late(data_loop), ErrorCode::Aborted);
  expectEndAt(0);
  EXPECT_EQ(late(data_loop), ErrorCode::Aborted);
}

TEST_F(DataPlaneEnd, GoodbyesThatHaveLeftNeedNoRoom) {
  open();
  close();
  expectEndAt(20);
}

TEST_F(DataPlaneEnd, LinksStayOpenForGoodbyesThatWaitForRoom) {
  open();
  data_loop.out[1].full = true;
  close();
  EXPECT_EQ(data_loop.plane->nextTick(), data_loop.at(1500));
  data_loop.passTo(100);
  data_loop.out[1].full = false;
  static_cast<void>(data_loop.takeDataFrames(1));
  expectEndAt(120);
}

// News of the failure is still on its way to other ranks, and an end of the links would look like a death.
TEST_F(DataPlaneEnd, LinksStayOpenForAWhileAfterAFailure) {
  fail(ErrorCode::PeerDead);
  data_loop.passTo(10);
  close();
  EXPECT_EQ(late(data_loop), ErrorCode::PeerDead) << "the group's cause, not that it is closed";
  expectEndAt(50);
}

TEST_F(DataPlaneEnd, AFailureThatIsLongAgoHoldsNothingUp) {
  fail(ErrorCode::PeerDead);
  data_loop.passTo(500);
  close();
  expectEndAt(500);
}

TEST_F(DataPlaneEnd, AGroupThatClosesMayFail) {
  open();
  data_loop.out[1].full = true;
  close();
  data_loop.passTo(1);
  fail(ErrorCode::PeerDead);
  EXPECT_EQ(late(data_loop), ErrorCode::PeerDead);
  expectEndAt(1500);
}

// ---- operations that cannot begin

TEST(DataPlaneRefused, OperationsEndWithTheGroupOldestFirst) {
  LoneDataLoop data_loop(2);
  data_loop.plane->post(data_loop.broadcast(1, Deadline::never(), 1 << 20)); // waits for credit
  std::vector<int> ended;
  for (const int ms : {50, 20}) {
    const auto operation = data_loop.broadcast(1, Deadline::at(data_loop.at(ms))); // a second one of that name
    operation->onDone([&ended, ms] { ended.push_back(ms); });
    data_loop.plane->post(operation);
    EXPECT_FALSE(operation->done()) << "its waiter would begin what the other ranks do not expect";
  }
  EXPECT_EQ(data_loop.noticed.size(), 2U);
  EXPECT_EQ(data_loop.plane->usage().refused, 2U);
  EXPECT_LE(data_loop.plane->nextTick(), data_loop.at(20));
  data_loop.plane->fail(LoneDataLoop::because(ErrorCode::PeerDead));
  EXPECT_EQ(ended, (std::vector<int>{50, 20}));
  EXPECT_EQ(data_loop.plane->usage().refused, 0U);
}

TEST(DataPlaneRefused, AFailureThatWasLostEndsThemAtTheirDeadlines) {
  LoneDataLoop data_loop(2);
  data_loop.plane->post(data_loop.broadcast(1, Deadline::never(), 1 << 20));
  const auto one = data_loop.broadcast(1, Deadline::at(data_loop.at(50)));
  const auto other = data_loop.broadcast(1, Deadline::at(data_loop.at(20)));
  data_loop.plane->post(one);
  data_loop.plane->post(other);
  data_loop.tick(19);
  EXPECT_FALSE(other->done());
  data_loop.tick(20);
  ASSERT_TRUE(other->done());
  EXPECT_EQ(other->error()->code, ErrorCode::OutOfMemory) << other->error()->text();
  EXPECT_FALSE(one->done());
  EXPECT_EQ(data_loop.plane->usage().refused, 1U);
}

TEST(DataPlaneRefused, WithoutMemoryToRememberItAnOperationEndsAtOnce) {
  int at_once = 0;
  bool struck = true;
  for (int64_t nth = 1; struck && nth < 100; ++nth) {
    LoneDataLoop data_loop(2);
    data_loop.plane->post(data_loop.broadcast(1, Deadline::never(), 1 << 20));
    const auto second = data_loop.broadcast(1);
    failAllocation(nth);
    data_loop.plane->post(second);
    struck = allocationFailed();
    failAllocation(0);
    EXPECT_TRUE(second->done() || data_loop.plane->usage().refused == 1) << "allocation " << nth;
    if (second->done()) {
      ++at_once;
      EXPECT_EQ(second->error()->code, ErrorCode::Internal) << "why it cannot begin: " << second->error()->text();
    }
  }
  EXPECT_GE(at_once, 1);
}

TEST(DataPlaneRefused, AMismatchThatWasFoundIsReportedEvenIfTheOperationThenGetsNoMemory) {
  int refused_after = 0;
  bool struck = true;
  for (int64_t nth = 1; struck && nth < 200; ++nth) {
    LoneDataLoop data_loop(3);
    data_loop.receive(1, LoneDataLoop::frameOf(*data_loop.broadcast(1, Deadline::never(), 11), FrameType::Waiting));
    data_loop.receive(2, LoneDataLoop::frameOf(*data_loop.broadcast(1), FrameType::Waiting));
    const auto operation = data_loop.broadcast(1);
    failAllocation(nth);
    data_loop.plane->post(operation);
    struck = allocationFailed();
    failAllocation(0);
    if (data_loop.noticed.empty()) {
      ADD_FAILURE() << "allocation " << nth << ": nothing is reported";
      continue;
    }
    const ErrorCode first = data_loop.noticed.front().code;
    EXPECT_TRUE(first == ErrorCode::CollectiveMismatch || first == ErrorCode::OutOfMemory);
    refused_after += struck && first == ErrorCode::CollectiveMismatch && data_loop.plane->usage().refused == 1 ? 1 : 0;
  }
  EXPECT_GE(refused_after, 1);
}

// The peer would take the second message for the first, or name this rank's next frame as the fault of another.
TEST(DataPlaneRefused, NothingLeavesBehindAMessageThatCouldNotBegin) {
  int refused = 0;
  bool struck = true;
  for (int64_t nth = 1; struck && nth < 100; ++nth) {
    LoneDataLoop data_loop(2);
    const auto first = data_loop.message(false);
    const auto second = data_loop.message(false);
    failAllocation(nth);
    data_loop.plane->post(first);
    struck = allocationFailed();
    failAllocation(0);
    data_loop.plane->post(second);
    const auto left = data_loop.takeDataFrames(1);
    if (data_loop.plane->usage().refused > 0) {
      ++refused;
      EXPECT_TRUE(left.empty()) << "allocation " << nth;
    }
    EXPECT_TRUE(!struck || left.size() < 2) << "allocation " << nth;
  }
  EXPECT_GE(refused, 1);
}

TEST(DataPlaneRefused, WhatCannotBeReportedIsReportedOnceThereIsMemory) {
  LoneDataLoop data_loop(2);
  const auto receive = data_loop.message(true);
  data_loop.plane->post(receive);
  const auto refused = data_loop.broadcast(1);
  data_loop.loses_news = true;
  failAllocation(1);
  data_loop.plane->post(refused);
  ASSERT_TRUE(allocationFailed());
  failAllocation(0);
  data_loop.tick(1000);
  data_loop.loses_news = false;
  EXPECT_TRUE(data_loop.noticed.empty());
  EXPECT_LE(data_loop.plane->nextTick(), data_loop.at(2000));
  data_loop.tick(2000);
  ASSERT_EQ(data_loop.noticed.size(), 1U);
  EXPECT_EQ(data_loop.noticed[0].code, ErrorCode::OutOfMemory);
}

// ---- links that arrive

/// There is no memory for what it brings.
class LinkWithoutMemory final : public Link {
 public:
  [[nodiscard]] int fd() const noexcept override {
    return 2000;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* /*views*/, size_t /*count*/) override {
    return {};
  }
  [[nodiscard]] Progress tryRead(BufferView /*into*/) override {
    throw std::bad_alloc();
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "a link of a test";
  }
};

TEST(DataPlaneLinks, OneWhoseFirstReadFindsNoMemoryHasEnded) {
  LoneDataLoop data_loop(2);
  data_loop.plane->post(data_loop.message(true));
  data_loop.plane->adopt(1, std::make_unique<LinkWithoutMemory>());
  ASSERT_EQ(data_loop.noticed.size(), 1U);
  EXPECT_EQ(data_loop.noticed[0].code, ErrorCode::OutOfMemory);
  data_loop.plane->peerLeft(1);
  ASSERT_EQ(data_loop.noticed.size(), 2U) << "nothing more can come from that peer";
  EXPECT_EQ(data_loop.noticed[1].code, ErrorCode::PeerLeft) << data_loop.noticed[1].text();
}

TEST(DataPlaneLinks, OneThatWasNotTakenForWantOfMemoryMayStillArrive) {
  LoneDataLoop data_loop(2);
  DataLoopWire in;
  data_loop.plane->post(data_loop.message(true));
  auto link = std::make_unique<DataLoopLink>(in, 2000);
  failAllocation(1);
  data_loop.plane->adopt(1, std::move(link));
  const bool struck = allocationFailed();
  failAllocation(0);
  ASSERT_TRUE(struck);
  ASSERT_EQ(data_loop.noticed.size(), 1U);
  EXPECT_EQ(data_loop.noticed[0].code, ErrorCode::OutOfMemory);
  data_loop.plane->peerLeft(1);
  EXPECT_EQ(data_loop.noticed.size(), 1U) << "its link has not ended: " << data_loop.noticed.back().text();
}

// A link is read, or it is not kept: one that was kept and that the loop does not watch would never end.
TEST(DataPlaneLinks, OneThatIsKeptIsWatched) {
  bool struck = true;
  int refused = 0;
  for (int64_t nth = 1; struck && nth < 100; ++nth) {
    LoneDataLoop data_loop(2);
    DataLoopWire in;
    auto link = std::make_unique<DataLoopLink>(in, 2000);
    failAllocation(nth);
    data_loop.plane->adopt(1, std::move(link));
    struck = allocationFailed();
    failAllocation(0);
    refused += struck ? 1 : 0;
    EXPECT_EQ(data_loop.loop.watches(2000), !struck) << "allocation " << nth;
    data_loop.plane->adopt(1, std::make_unique<DataLoopLink>(in, 2001));
    EXPECT_EQ(data_loop.loop.watches(2001), struck) << "allocation " << nth << ": the first one was kept";
  }
  EXPECT_GE(refused, 2);
}

// A chain from rank 2 over this one to rank 1: the frame of one rank is what opens the link to another.
TEST(DataPlaneLinks, OneThatCannotBeOpenedBlamesItsPeerAndNotTheSenderOfTheFrameThatNeedsIt) {
  LoneDataLoop data_loop;
  data_loop.refuses = true;
  const auto operation = data_loop.broadcast(1, Deadline::never(), 10, 2);
  data_loop.plane->post(operation);
  FrameHeader header = LoneDataLoop::frameOf(*operation, FrameType::Data, kEagerFlag);
  header.payload_nbytes = 40;
  DataLoopWire in;
  in.coming.assign(reinterpret_cast<const char*>(&header), sizeof header);
  in.coming.append(header.payload_nbytes, '\0');
  data_loop.plane->adopt(2, std::make_unique<DataLoopLink>(in, 2000));
  EXPECT_EQ(data_loop.connections, 1);
  ASSERT_EQ(data_loop.noticed.size(), 1U);
  EXPECT_EQ(data_loop.noticed[0].code, ErrorCode::ConnectFailed) << data_loop.noticed[0].text();
  EXPECT_EQ(data_loop.noticed[0].peer, 1) << data_loop.noticed[0].text();
  EXPECT_EQ(data_loop.noticed[0].peer_host, "host1");
}

} // namespace
} // namespace pycomm::testing
