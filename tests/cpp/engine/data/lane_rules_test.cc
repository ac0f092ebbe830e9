// Rules of a group on its lane that no single class shows, one rule per test: docs/evidence/simulator.md lists them all. Each drives the data
// plane of one rank with frames, links and time of the test's own, so that it holds however the plane is divided into classes.
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "engine/data/lone_lane.h"
#include "engine/host/host_plane.h"

namespace pycomm::testing {
namespace {

using std::chrono::milliseconds;

bool has(const std::vector<ErrorRecord>& records, ErrorCode code) {
  return std::any_of(records.begin(), records.end(), [&](const ErrorRecord& each) { return each.code == code; });
}

/// What the ranks of one host share, for rank 0 of two: nobody runs its operations.
class IdleHost {
 public:
  explicit IdleHost(const GroupIdentity& identity)
      : arena_(std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(identity.size)))) {
    arena_->commit(0, HostView::commonNbytes(identity.size));
    HostPlane::Events events;
    events.notice = [](const ErrorRecord&) {}; // at its end: that this rank has left in the middle
    events.stuck = [](const std::shared_ptr<Operation>&, uint64_t) {};
    events.ended = [this](const OperationId& id, const Descriptor&) { told.push_back(id); };
    plane = std::make_unique<HostPlane>(identity, arena_, HostHeaps(), HostPlane::Config(), std::move(events));
  }
  ~IdleHost() {
    plane->close(LoneLane::because(ErrorCode::ShutDown));
  }
  std::shared_ptr<Operation> post(const std::shared_ptr<Operation>& operation) const {
    std::shared_ptr<Operation> made;
    EXPECT_TRUE(plane->post([&] { return operation; }, true, made));
    return made;
  }

  std::unique_ptr<HostPlane> plane;
  std::vector<OperationId> told; ///< the ended operations that `ended` reported

 private:
  std::shared_ptr<SharedArena> arena_;
};

// ---- operations that run elsewhere, or not yet

// Another thread still reads and writes their memory.
TEST(LaneRules, OperationsInSharedMemoryAreForgottenAtTheEndAndNotEnded) {
  for (const bool closes : {false, true}) {
    LoneLane lane(2);
    IdleHost host(lane.identity);
    lane.plane->accompany(host.plane.get());
    const auto operation = host.post(lane.broadcast(1));
    lane.plane->hostStuck(operation, hostBit(1));
    ASSERT_EQ(lane.plane->usage().on_host, 1U);
    if (closes) {
      lane.plane->close(LoneLane::because(ErrorCode::ShutDown), [] {});
    } else {
      lane.plane->fail(LoneLane::because(ErrorCode::Aborted));
    }
    EXPECT_EQ(lane.plane->usage().on_host, 0U);
    EXPECT_FALSE(operation->done());
    host.plane->close(LoneLane::because(ErrorCode::PeerLeft));
    ASSERT_TRUE(operation->done());
    EXPECT_EQ(operation->error()->code, ErrorCode::PeerLeft);
  }
}

TEST(LaneRules, AHeldOperationIsNotEnteredSoThisRankIsLate) {
  LoneLane lane;
  const auto operation = lane.broadcast(1);
  lane.plane->hold(operation);
  lane.tick(10250);
  EXPECT_TRUE(lane.takeAsked().empty()) << "it asks nobody";
  lane.receive(1, LoneLane::frameOf(*operation, FrameType::Waiting));
  std::vector<Question> answers = lane.takeAsked();
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(answers[0].to, 1);
  EXPECT_EQ(answers[0].header.type, FrameType::NotEntered);
  EXPECT_EQ(answers[0].header.aux, 0U) << "no operation yet";
  lane.plane->release(operation);
  answers = lane.takeAsked();
  ASSERT_EQ(answers.size(), 1U) << "who was refused learns that this rank has come";
  EXPECT_EQ(answers[0].to, 1);
  EXPECT_EQ(answers[0].header.type, FrameType::Waiting);
}

TEST(LaneRules, AFollowedOperationHasNoEdgesAndAsksAllRanksAfter200Ms) {
  LoneLane lane;
  lane.plane->follow(lane.broadcast(1));
  lane.tick(199);
  EXPECT_TRUE(lane.takeAsked().empty());
  lane.tick(200);
  EXPECT_EQ(lane.takeQuestions(), (std::vector<std::pair<uint64_t, int>>{{1, 1}, {1, 2}}));
}

TEST(LaneRules, AStuckOperationInSharedMemoryAsksAtOnceThoseThatLackItAndNoOthers) {
  LoneLane lane(4);
  IdleHost host(lane.identity);
  lane.plane->accompany(host.plane.get());
  const auto operation = host.post(lane.broadcast(1));
  lane.plane->hostStuck(operation, hostBit(2));
  EXPECT_EQ(lane.takeQuestions(), (std::vector<std::pair<uint64_t, int>>{{1, 2}}));
  lane.tick(199);
  EXPECT_TRUE(lane.takeAsked().empty());
  lane.tick(200);
  EXPECT_EQ(lane.takeQuestions(), (std::vector<std::pair<uint64_t, int>>{{1, 2}}));
  lane.plane->fail(LoneLane::because(ErrorCode::Aborted));
}

TEST(LaneRules, AQuestionFindsTheLast64OperationsInSharedMemoryWhichThenAskNobody) {
  LoneLane lane(2);
  IdleHost host(lane.identity);
  lane.plane->accompany(host.plane.get());
  const auto first = host.post(lane.broadcast(1));
  for (uint64_t id = 2; id <= 64; ++id) {
    host.post(lane.broadcast(id));
  }
  lane.receive(1, LoneLane::frameOf(*first, FrameType::Waiting));
  EXPECT_TRUE(lane.takeAsked().empty()) << "it is entered here";
  EXPECT_EQ(lane.plane->usage().on_host, 64U);
  lane.tick(10250);
  EXPECT_TRUE(lane.takeAsked().empty()) << "their slots show who lacks them";
  lane.plane->fail(LoneLane::because(ErrorCode::Aborted));
}

// Its rank may be so much faster that this one still makes its plane: counted ones end there, and derived ones never do.
TEST(LaneRules, AQuestionFromBeforeThePlaneOfSharedMemoryIsKeptUntilItsOperationEndsThere) {
  LoneLane lane(2);
  IdleHost host(lane.identity);
  const auto first = lane.broadcast(1);
  const auto second = lane.broadcast(2);
  lane.receive(1, LoneLane::frameOf(*lane.broadcast(kDerivedIdBit | 7), FrameType::Waiting));
  lane.receive(1, LoneLane::frameOf(*first, FrameType::Waiting));
  ASSERT_EQ(lane.plane->usage().tables.unexpected, 2U);
  lane.plane->accompany(host.plane.get());
  host.post(first);
  host.post(second);
  host.plane->close(LoneLane::because(ErrorCode::ShutDown));
  ASSERT_EQ(host.told.size(), 1U) << "nobody asked about the second";
  EXPECT_EQ(host.told[0].id, 1U);
  lane.plane->hostEnded(host.told[0], first->request().descriptor);
  EXPECT_EQ(lane.plane->usage().tables.unexpected, 1U) << "the derived one";
}

// ---- operations that cannot begin

TEST(LaneRules, WhatCannotBeginEndsWithTheFailureOrAtItsDeadlineIfThatIsLost) {
  for (const bool lost : {false, true}) {
    LoneLane lane;
    const auto operation = lane.broadcast(1, Deadline::at(lane.at(500)));
    failAllocation(1);
    lane.plane->post(operation);
    const bool struck = allocationFailed();
    failAllocation(0);
    ASSERT_TRUE(struck);
    ASSERT_EQ(lane.noticed.size(), 1U);
    EXPECT_EQ(lane.noticed[0].code, ErrorCode::OutOfMemory);
    EXPECT_EQ(lane.plane->usage().refused, 1U);
    lane.tick(499);
    EXPECT_FALSE(operation->done()) << "its waiter would begin what the other ranks do not expect";
    EXPECT_LE(lane.plane->nextTick(), lane.at(500));
    if (lost) {
      lane.tick(500);
    } else {
      lane.plane->fail(LoneLane::because(ErrorCode::PeerDead));
    }
    ASSERT_TRUE(operation->done());
    EXPECT_EQ(operation->error()->code, lost ? ErrorCode::OutOfMemory : ErrorCode::PeerDead);
    EXPECT_EQ(lane.plane->usage().refused, 0U);
  }
}

TEST(LaneRules, WhatCannotBeginEndsAtOnceIfNothingCanBeReported) {
  LoneLane lane;
  lane.loses_news = true;
  const auto operation = lane.broadcast(1);
  failAllocation(1);
  lane.plane->post(operation);
  failAllocation(0);
  ASSERT_TRUE(operation->done());
  EXPECT_EQ(operation->error()->code, ErrorCode::OutOfMemory);
}

// It ends with its group, and if the news of the failure is lost, its deadline is not.
TEST(LaneRules, WhatBeginsWithoutMemoryStillHasItsDeadline) {
  using Begin = std::function<void(LoneLane&, const std::shared_ptr<Operation>&)>;
  const Begin post = [](LoneLane& lane, const auto& operation) { lane.plane->post(operation); };
  const Begin follow = [](LoneLane& lane, const auto& operation) { lane.plane->follow(operation); };
  const Begin hold = [](LoneLane& lane, const auto& operation) { lane.plane->hold(operation); };
  for (const Begin& begin : {post, follow, hold}) {
    int strikes = 0;
    bool struck = true;
    for (int64_t nth = 1; struck && nth < 200; ++nth) {
      LoneLane lane;
      const auto operation = lane.broadcast(1, Deadline::at(lane.at(500)));
      failAllocation(nth);
      begin(lane, operation);
      struck = allocationFailed();
      failAllocation(0);
      strikes += struck ? 1 : 0;
      EXPECT_EQ(has(lane.noticed, ErrorCode::OutOfMemory), struck) << "allocation " << nth;
      lane.tick(500);
      EXPECT_TRUE(operation->done() || has(lane.noticed, ErrorCode::Timeout)) << "allocation " << nth;
      lane.plane->fail(LoneLane::because(ErrorCode::Aborted));
      EXPECT_TRUE(operation->done()) << "allocation " << nth;
    }
    EXPECT_GE(strikes, 1);
  }
}

// ---- what is over

// A question comes after 10.25 s, and says what another rank did; nothing was sent to that rank meanwhile.
TEST(LaneRules, ALateQuestionIsComparedWithTheLast256OperationsThatHaveEnded) {
  for (const uint64_t since : {255, 256}) {
    LoneLane lane;
    lane.followToItsEnd(1);
    for (uint64_t id = 2; id <= 1 + since; ++id) {
      lane.followToItsEnd(id);
    }
    lane.tick(10250);
    FrameHeader other = LoneLane::frameOf(*lane.broadcast(1), FrameType::Waiting);
    other.numel = 99;
    lane.receive(1, other);
    EXPECT_EQ(has(lane.noticed, ErrorCode::CollectiveMismatch), since == 255) << since;
    EXPECT_LE(lane.plane->usage().tables.history, 256U);
  }
}

// Their numbers say it.
TEST(LaneRules, AMessageIsNeverKeptAsPastAndACollectiveIs) {
  for (const bool is_message : {true, false}) {
    LoneLane lane(2);
    const auto operation = is_message ? lane.message(false) : lane.broadcast(1);
    lane.plane->post(operation);
    EXPECT_EQ(lane.takeDataFrames(1).size(), 1U);
    ASSERT_TRUE(operation->done());
    ASSERT_FALSE(operation->error());
    EXPECT_EQ(lane.plane->usage().tables.past, is_message ? 0U : 1U);
  }
}

TEST(LaneRules, AMessageToOneselfIsTwoOperationsWhoseIdsDifferInOneBit) {
  LoneLane lane(2);
  const auto sent = lane.message(false, Deadline::never(), 0);
  const auto received = lane.message(true, Deadline::never(), 0);
  std::memset(sent->request().output.ptr, 7, sent->request().output.nbytes);
  lane.plane->post(received);
  lane.plane->post(sent);
  ASSERT_TRUE(sent->done() && received->done());
  EXPECT_FALSE(sent->error());
  EXPECT_FALSE(received->error());
  EXPECT_EQ(sent->request().id.id ^ PointToPoint::kSelfBit, received->request().id.id);
  EXPECT_EQ(std::memcmp(sent->request().output.ptr, received->request().output.ptr, sent->request().output.nbytes), 0);
}

// ---- order

TEST(LaneRules, OfManyOperationsThe64OldestAskAndAllDerivedOnes) {
  LoneLane lane(2);
  std::vector<std::pair<uint64_t, int>> expected;
  for (uint64_t id = 70; id >= 1; --id) {
    lane.plane->follow(lane.broadcast(id));
  }
  for (uint64_t id = 1; id <= 64; ++id) {
    expected.emplace_back(id, 1);
  }
  for (const uint64_t number : {8, 4}) {
    lane.plane->follow(lane.broadcast(kDerivedIdBit | number));
  }
  expected.emplace_back(kDerivedIdBit | 4, 1);
  expected.emplace_back(kDerivedIdBit | 8, 1);
  lane.tick(200);
  EXPECT_EQ(lane.takeQuestions(), expected) << "oldest first, derived ones last";
}

TEST(LaneRules, RoomThatComesBackGoesToTheOldestOperationsInOrder) {
  Limits limits;
  limits.eager_nbytes = 1000;
  limits.eager_pool_nbytes = 4 * (1000 + static_cast<int64_t>(sizeof(FrameHeader)));
  LoneLane lane(2, limits);
  for (const uint64_t id : {1, 2, 3, 4}) {
    lane.plane->post(lane.broadcast(id, Deadline::never(), 250));
  }
  EXPECT_EQ(lane.takeDataFrames(1), (std::vector<uint64_t>{1, 2, 3, 4}));
  for (const uint64_t id : {9, 7, 8, 6, 5}) {
    lane.plane->post(lane.broadcast(id, Deadline::never(), 250));
  }
  EXPECT_TRUE(lane.takeDataFrames(1).empty()) << "the pool is full";
  FrameHeader room;
  room.type = FrameType::Credit;
  room.group = 7;
  room.aux = 3 * (1000 + sizeof(FrameHeader));
  lane.receive(1, room);
  EXPECT_EQ(lane.takeDataFrames(1), (std::vector<uint64_t>{5, 6, 7}));
}

// ---- the end of a group

TEST(LaneRules, NothingCountsOnceAFailureIsFoundAlthoughTheGroupHasNotFailedYet) {
  LoneLane lane;
  const auto operation = lane.broadcast(1);
  lane.plane->follow(operation);
  FrameHeader other = LoneLane::frameOf(*operation, FrameType::Waiting);
  other.numel = 99;
  lane.receive(1, other);
  ASSERT_EQ(lane.noticed.size(), 1U);
  EXPECT_EQ(lane.noticed[0].peer, 1);
  lane.receive(2, other);
  lane.receive(2, LoneLane::frameOf(*lane.broadcast(5), FrameType::Waiting));
  EXPECT_EQ(lane.noticed.size(), 1U) << "the first error wins";
  EXPECT_TRUE(lane.takeAsked().empty()) << "and no question is answered";
  EXPECT_EQ(lane.plane->usage().tables.unexpected, 0U);
  EXPECT_FALSE(operation->done()) << "it ends with the group's cause, which the ranks have yet to agree on";
}

std::string bytesOf(const FrameHeader& header) {
  return {reinterpret_cast<const char*>(&header), sizeof header};
}

TEST(LaneRules, AClosingRankTakesNoNewFramesButFinishesThoseUnderWayAndReadsGoodbyes) {
  constexpr int kInFd = 2000;
  LoneLane lane(2);
  LaneWire in;
  lane.plane->adopt(1, std::make_unique<LaneLink>(in, kInFd));
  FrameHeader data = LoneLane::frameOf(*lane.broadcast(1), FrameType::Data, kEagerFlag);
  data.payload_nbytes = 40;
  const std::string frame = bytesOf(data) + std::string(40, '\1');
  in.coming = frame.substr(0, 80); // the header has come, a part of the payload has not
  lane.loop.ready(kInFd, EPOLLIN);
  ASSERT_EQ(lane.plane->usage().tables.unexpected, 1U);

  lane.plane->close(LoneLane::because(ErrorCode::ShutDown), [] {});
  FrameHeader other = data;
  other.op_id = 2;
  FrameHeader goodbye;
  goodbye.type = FrameType::Goodbye;
  goodbye.group = 7;
  in.coming = frame.substr(80) + bytesOf(other) + std::string(40, '\1') + bytesOf(goodbye);
  lane.loop.ready(kInFd, EPOLLIN);
  EXPECT_EQ(lane.left, std::vector<int>{1});
  EXPECT_EQ(lane.plane->usage().tables.unexpected, 1U) << "nothing of operation 2";
  EXPECT_TRUE(lane.noticed.empty()) << lane.noticed.front().text();
}

TEST(LaneRules, AllOperationsEndOnceOldestFirstAndNoFrameStaysHeld) {
  constexpr int kInFd = 2000;
  LoneLane lane(2);
  LaneWire in;
  lane.plane->adopt(1, std::make_unique<LaneLink>(in, kInFd));
  FrameHeader data = LoneLane::frameOf(*lane.broadcast(3), FrameType::Data, kEagerFlag);
  data.payload_nbytes = 40;
  in.coming = bytesOf(data) + std::string(40, '\1');
  lane.loop.ready(kInFd, EPOLLIN);
  std::vector<uint64_t> ended;
  for (const uint64_t id : {2, 1}) { // each waits for credit
    const auto operation = lane.broadcast(id, Deadline::never(), 1 << 20);
    operation->onDone([&lane, &ended, id] {
      EXPECT_EQ(lane.plane->usage().transfers, 0U) << "none is found while they end";
      ended.push_back(id);
    });
    lane.plane->post(operation);
  }
  EXPECT_EQ(lane.plane->usage().transfers, 2U);
  EXPECT_EQ(lane.plane->usage().unexpected_frames, 1U);
  EXPECT_EQ(lane.plane->usage().staging_nbytes, 40U);
  lane.plane->fail(LoneLane::because(ErrorCode::Aborted));
  EXPECT_EQ(ended, (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(lane.plane->usage().unexpected_frames, 0U);
  EXPECT_EQ(lane.plane->usage().staging_nbytes, 0U);
}

// ---- want of memory

/// The first, the second, … allocation of the tick at the deadline fails: the timeout is reported nevertheless. Returns how many failed.
int deadlinesAreReported(const std::function<void(LoneLane&, Deadline)>& begin) {
  int strikes = 0;
  bool struck = true;
  for (int64_t nth = 1; struck && nth < 200; ++nth) {
    LoneLane lane;
    lane.noticed.reserve(16);
    begin(lane, Deadline::at(lane.at(1000)));
    lane.tick(999);
    static_cast<void>(lane.takeAsked());
    failAllocation(nth);
    lane.tick(1000);
    struck = allocationFailed();
    failAllocation(0);
    strikes += struck ? 1 : 0;
    EXPECT_LE(lane.plane->nextTick(), lane.at(2000)) << "allocation " << nth;
    if (nth == 1) {
      lane.tick(1001);
      EXPECT_TRUE(has(lane.noticed, ErrorCode::Timeout)) << "at the next tick, as nothing was reported";
    }
    lane.tick(2001);
    EXPECT_TRUE(has(lane.noticed, ErrorCode::Timeout)) << "allocation " << nth;
  }
  return strikes;
}

TEST(LaneRules, TheDeadlineOfAnOperationIsReportedAlthoughTheTickFoundNoMemory) {
  const int strikes =
      deadlinesAreReported([](LoneLane& lane, Deadline deadline) { lane.plane->follow(lane.broadcast(1, deadline)); });
  EXPECT_GE(strikes, 2);
}

TEST(LaneRules, TheDeadlineOfAHeldOperationIsReportedAlthoughTheTickFoundNoMemory) {
  const int strikes =
      deadlinesAreReported([](LoneLane& lane, Deadline deadline) { lane.plane->hold(lane.broadcast(1, deadline)); });
  EXPECT_GE(strikes, 2);
}

TEST(LaneRules, TheDeadlineOfAMessageIsReportedAlthoughTheTickFoundNoMemory) {
  const int strikes =
      deadlinesAreReported([](LoneLane& lane, Deadline deadline) { lane.plane->post(lane.message(true, deadline)); });
  EXPECT_GE(strikes, 2);
}

} // namespace
} // namespace pycomm::testing
