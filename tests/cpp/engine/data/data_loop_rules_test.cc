// Rules of a group on its data loop that no single class shows, one rule per test: docs/evidence/simulator.md lists them all. Each drives the data
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
#include "engine/data/lone_data_loop.h"
#include "engine/host/host_plane.h"
#include "views.h"

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
    events.noticed = [](const ErrorRecord&) {}; // at its end: that this rank has left in the middle
    events.stuck = [](const std::shared_ptr<Operation>&, uint64_t) {};
    events.ended = [this](const OperationId& id, const Descriptor&) { told.push_back(id); };
    plane = std::make_unique<HostPlane>(identity, arena_, HostHeaps(), HostPlane::Config(), std::move(events));
  }
  ~IdleHost() {
    plane->close(LoneDataLoop::because(ErrorCode::ShutDown));
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
TEST(DataLoopRules, OperationsInSharedMemoryAreForgottenAtTheEndAndNotEnded) {
  for (const bool closes : {false, true}) {
    LoneDataLoop data_loop(2);
    IdleHost host(data_loop.identity);
    data_loop.plane->accompany(host.plane.get());
    const auto operation = host.post(data_loop.broadcast(1));
    data_loop.plane->hostStuck(operation, hostBit(1));
    ASSERT_EQ(data_loop.plane->usage().on_host, 1U);
    if (closes) {
      data_loop.plane->close(LoneDataLoop::because(ErrorCode::ShutDown), [] {});
    } else {
      data_loop.plane->fail(LoneDataLoop::because(ErrorCode::Aborted));
    }
    EXPECT_EQ(data_loop.plane->usage().on_host, 0U);
    EXPECT_FALSE(operation->done());
    host.plane->close(LoneDataLoop::because(ErrorCode::PeerLeft));
    ASSERT_TRUE(operation->done());
    EXPECT_EQ(operation->error()->code, ErrorCode::PeerLeft);
  }
}

TEST(DataLoopRules, AHeldOperationIsNotEnteredSoThisRankIsLate) {
  LoneDataLoop data_loop;
  const auto operation = data_loop.broadcast(1);
  data_loop.plane->hold(operation);
  data_loop.tick(10250);
  EXPECT_TRUE(data_loop.takeAsked().empty()) << "it asks nobody";
  data_loop.receive(1, LoneDataLoop::frameOf(*operation, FrameType::Waiting));
  std::vector<Question> answers = data_loop.takeAsked();
  ASSERT_EQ(answers.size(), 1U);
  EXPECT_EQ(answers[0].to, 1);
  EXPECT_EQ(answers[0].header.type, FrameType::NotEntered);
  EXPECT_EQ(answers[0].header.aux, 0U) << "no operation yet";
  data_loop.plane->release(operation);
  answers = data_loop.takeAsked();
  ASSERT_EQ(answers.size(), 1U) << "who was refused learns that this rank has come";
  EXPECT_EQ(answers[0].to, 1);
  EXPECT_EQ(answers[0].header.type, FrameType::Waiting);
}

TEST(DataLoopRules, AFollowedOperationHasNoEdgesAndAsksAllRanksAfter200Ms) {
  LoneDataLoop data_loop;
  data_loop.plane->follow(data_loop.broadcast(1));
  data_loop.tick(199);
  EXPECT_TRUE(data_loop.takeAsked().empty());
  data_loop.tick(200);
  EXPECT_EQ(data_loop.takeQuestions(), (std::vector<std::pair<uint64_t, int>>{{1, 1}, {1, 2}}));
}

TEST(DataLoopRules, AFollowedOperationThatHasEndedIsForgotten) {
  LoneDataLoop data_loop;
  const auto operation = data_loop.broadcast(1);
  data_loop.plane->follow(operation);
  EXPECT_EQ(heldText(data_loop.plane->usage()), "followed operations: 1, operations that are entered: 1");
  data_loop.plane->followedEnded(1, std::nullopt);
  EXPECT_TRUE(operation->done());
  EXPECT_EQ(heldText(data_loop.plane->usage()), "");
}

TEST(DataLoopRules, AStuckOperationInSharedMemoryAsksAtOnceThoseThatLackItAndNoOthers) {
  LoneDataLoop data_loop(4);
  IdleHost host(data_loop.identity);
  data_loop.plane->accompany(host.plane.get());
  const auto operation = host.post(data_loop.broadcast(1));
  data_loop.plane->hostStuck(operation, hostBit(2));
  EXPECT_EQ(data_loop.takeQuestions(), (std::vector<std::pair<uint64_t, int>>{{1, 2}}));
  data_loop.tick(199);
  EXPECT_TRUE(data_loop.takeAsked().empty());
  data_loop.tick(200);
  EXPECT_EQ(data_loop.takeQuestions(), (std::vector<std::pair<uint64_t, int>>{{1, 2}}));
  data_loop.plane->fail(LoneDataLoop::because(ErrorCode::Aborted));
}

TEST(DataLoopRules, AQuestionFindsTheLast64OperationsInSharedMemoryWhichThenAskNobody) {
  LoneDataLoop data_loop(2);
  IdleHost host(data_loop.identity);
  data_loop.plane->accompany(host.plane.get());
  const auto first = host.post(data_loop.broadcast(1));
  for (uint64_t id = 2; id <= 64; ++id) {
    host.post(data_loop.broadcast(id));
  }
  data_loop.receive(1, LoneDataLoop::frameOf(*first, FrameType::Waiting));
  EXPECT_TRUE(data_loop.takeAsked().empty()) << "it is entered here";
  EXPECT_EQ(data_loop.plane->usage().on_host, 64U);
  data_loop.tick(10250);
  EXPECT_TRUE(data_loop.takeAsked().empty()) << "their slots show who lacks them";
  data_loop.plane->fail(LoneDataLoop::because(ErrorCode::Aborted));
}

// Its rank may be so much faster that this one still makes its plane: counted ones end there, and derived ones never do.
TEST(DataLoopRules, AQuestionFromBeforeThePlaneOfSharedMemoryIsKeptUntilItsOperationEndsThere) {
  LoneDataLoop data_loop(2);
  IdleHost host(data_loop.identity);
  const auto first = data_loop.broadcast(1);
  const auto second = data_loop.broadcast(2);
  data_loop.receive(1, LoneDataLoop::frameOf(*data_loop.broadcast(kDerivedIdBit | 7), FrameType::Waiting));
  data_loop.receive(1, LoneDataLoop::frameOf(*first, FrameType::Waiting));
  ASSERT_EQ(data_loop.plane->usage().tables.unexpected, 2U);
  data_loop.plane->accompany(host.plane.get());
  host.post(first);
  host.post(second);
  host.plane->close(LoneDataLoop::because(ErrorCode::ShutDown));
  ASSERT_EQ(host.told.size(), 1U) << "nobody asked about the second";
  EXPECT_EQ(host.told[0].id, 1U);
  data_loop.plane->hostEnded(host.told[0], first->request().descriptor);
  EXPECT_EQ(data_loop.plane->usage().tables.unexpected, 1U) << "the derived one";
}

// ---- operations that cannot begin

TEST(DataLoopRules, WhatCannotBeginEndsWithTheFailureOrAtItsDeadlineIfThatIsLost) {
  for (const bool lost : {false, true}) {
    LoneDataLoop data_loop;
    const auto operation = data_loop.broadcast(1, Deadline::at(data_loop.at(500)));
    failAllocation(1);
    data_loop.plane->post(operation);
    const bool struck = allocationFailed();
    failAllocation(0);
    ASSERT_TRUE(struck);
    ASSERT_EQ(data_loop.noticed.size(), 1U);
    EXPECT_EQ(data_loop.noticed[0].code, ErrorCode::OutOfMemory);
    EXPECT_EQ(data_loop.plane->usage().refused, 1U);
    data_loop.tick(499);
    EXPECT_FALSE(operation->done()) << "its waiter would begin what the other ranks do not expect";
    EXPECT_LE(data_loop.plane->nextTick(), data_loop.at(500));
    if (lost) {
      data_loop.tick(500);
    } else {
      data_loop.plane->fail(LoneDataLoop::because(ErrorCode::PeerDead));
    }
    ASSERT_TRUE(operation->done());
    EXPECT_EQ(operation->error()->code, lost ? ErrorCode::OutOfMemory : ErrorCode::PeerDead);
    EXPECT_EQ(data_loop.plane->usage().refused, 0U);
  }
}

TEST(DataLoopRules, WhatCannotBeginEndsAtOnceIfNothingCanBeReported) {
  LoneDataLoop data_loop;
  data_loop.loses_news = true;
  const auto operation = data_loop.broadcast(1);
  failAllocation(1);
  data_loop.plane->post(operation);
  failAllocation(0);
  ASSERT_TRUE(operation->done());
  EXPECT_EQ(operation->error()->code, ErrorCode::OutOfMemory);
}

// It ends with its group, and if the news of the failure is lost, its deadline is not.
TEST(DataLoopRules, WhatBeginsWithoutMemoryStillHasItsDeadline) {
  using Begin = std::function<void(LoneDataLoop&, const std::shared_ptr<Operation>&)>;
  const Begin post = [](LoneDataLoop& data_loop, const auto& operation) { data_loop.plane->post(operation); };
  const Begin follow = [](LoneDataLoop& data_loop, const auto& operation) { data_loop.plane->follow(operation); };
  const Begin hold = [](LoneDataLoop& data_loop, const auto& operation) { data_loop.plane->hold(operation); };
  for (const Begin& begin : {post, follow, hold}) {
    int strikes = 0;
    bool struck = true;
    for (int64_t nth = 1; struck && nth < 200; ++nth) {
      LoneDataLoop data_loop;
      const auto operation = data_loop.broadcast(1, Deadline::at(data_loop.at(500)));
      failAllocation(nth);
      begin(data_loop, operation);
      struck = allocationFailed();
      failAllocation(0);
      strikes += struck ? 1 : 0;
      EXPECT_EQ(has(data_loop.noticed, ErrorCode::OutOfMemory), struck) << "allocation " << nth;
      data_loop.tick(500);
      EXPECT_TRUE(operation->done() || has(data_loop.noticed, ErrorCode::Timeout)) << "allocation " << nth;
      data_loop.plane->fail(LoneDataLoop::because(ErrorCode::Aborted));
      EXPECT_TRUE(operation->done()) << "allocation " << nth;
    }
    EXPECT_GE(strikes, 1);
  }
}

// There may be millions of steps. Each is looked at when its input has come.
TEST(DataLoopRules, ATurnBeginsABoundedNumberOfSteps) {
  constexpr int64_t kNumel = 2 << 20;
  for (const bool in_pieces : {false, true}) {
    std::vector<float> values(kNumel);
    LoneDataLoop data_loop(2);
    data_loop.out[1].full = true;
    ScheduleRequest wish;
    wish.kind = Collective::AllReduce;
    wish.algorithm = Algorithm::Ring;
    wish.dtype = DType::Float32;
    wish.reduce_op = ReduceOp::Sum;
    wish.size = 2;
    wish.numel = kNumel;
    wish.segment_nbytes = 64;
    Operation::Request request;
    request.id = {1, 1};
    request.schedule = prepare(makeSchedule(wish));
    request.descriptor = Descriptor::of(wish, Algorithm::Ring);
    request.output = viewOf(values);
    request.input = request.output;
    const size_t steps = request.schedule->schedule.steps.size();
    ASSERT_GT(steps, 100000U);
    if (in_pieces) {
      const PieceFlow::Operand operand{request.input.nbytes, PieceFlow::kPlain};
      request.extras().pieces = PieceFlow::ofSchedule(*request.schedule, operand, operand, true);
    }
    const auto operation = std::make_shared<Operation>(std::move(request));
    const int64_t before = heldNbytes();
    const auto runTurns = [&](const auto& first, size_t among) {
      first();
      size_t turns = 1;
      int64_t held = heldNbytes();
      EXPECT_LT(held - before, static_cast<int64_t>(steps) * 8) << "the first frames, and not each step's";
      for (; data_loop.plane->nextTick() == Loop::Ticker::kAtOnce; ++turns) {
        data_loop.tick(0);
        EXPECT_LT(heldNbytes() - held, 64 << 10);
        held = heldNbytes();
      }
      EXPECT_GT(turns, among / 2048);
    };
    if (in_pieces) {
      PieceFlow& pieces = *operation->request().extras().pieces;
      data_loop.plane->hold(operation);
      for (const size_t half : {1, 2}) {
        pieces.arrive(pieces.arriving().size() / 2 * half);
        runTurns([&] { data_loop.plane->release(operation); }, steps / 2);
      }
    } else {
      runTurns([&] { data_loop.plane->post(operation); }, steps);
    }
    EXPECT_LT(heldNbytes() - before, static_cast<int64_t>(steps) * 16) << "what is made must be released at the end";
  }
}

// ---- what is over

// A question comes after 10.25 s, and says what another rank did; nothing was sent to that rank meanwhile.
TEST(DataLoopRules, ALateQuestionIsComparedWithTheLast256OperationsThatHaveEnded) {
  for (const uint64_t since : {255, 256}) {
    LoneDataLoop data_loop;
    data_loop.followToItsEnd(1);
    for (uint64_t id = 2; id <= 1 + since; ++id) {
      data_loop.followToItsEnd(id);
    }
    data_loop.tick(10250);
    FrameHeader other = LoneDataLoop::frameOf(*data_loop.broadcast(1), FrameType::Waiting);
    other.numel = 99;
    data_loop.receive(1, other);
    EXPECT_EQ(has(data_loop.noticed, ErrorCode::CollectiveMismatch), since == 255) << since;
    EXPECT_LE(data_loop.plane->usage().tables.history, 256U);
  }
}

// Their numbers say it.
TEST(DataLoopRules, AMessageIsNeverKeptAsPastAndACollectiveIs) {
  for (const bool is_message : {true, false}) {
    LoneDataLoop data_loop(2);
    const auto operation = is_message ? data_loop.message(false) : data_loop.broadcast(1);
    data_loop.plane->post(operation);
    EXPECT_EQ(data_loop.takeDataFrames(1).size(), 1U);
    ASSERT_TRUE(operation->done());
    ASSERT_FALSE(operation->error());
    EXPECT_EQ(data_loop.plane->usage().tables.past, is_message ? 0U : 1U);
  }
}

TEST(DataLoopRules, AMessageToOneselfIsTwoOperationsWhoseIdsDifferInOneBit) {
  LoneDataLoop data_loop(2);
  const auto sent = data_loop.message(false, Deadline::never(), 0);
  const auto received = data_loop.message(true, Deadline::never(), 0);
  std::memset(sent->request().output.ptr, 7, sent->request().output.nbytes);
  data_loop.plane->post(received);
  data_loop.plane->post(sent);
  ASSERT_TRUE(sent->done() && received->done());
  EXPECT_FALSE(sent->error());
  EXPECT_FALSE(received->error());
  EXPECT_EQ(sent->request().id.id ^ PointToPoint::kSelfBit, received->request().id.id);
  EXPECT_EQ(std::memcmp(sent->request().output.ptr, received->request().output.ptr, sent->request().output.nbytes), 0);
}

// ---- order

TEST(DataLoopRules, OfManyOperationsThe64OldestAskAndAllDerivedOnes) {
  LoneDataLoop data_loop(2);
  std::vector<std::pair<uint64_t, int>> expected;
  for (uint64_t id = 70; id >= 1; --id) {
    data_loop.plane->follow(data_loop.broadcast(id));
  }
  for (uint64_t id = 1; id <= 64; ++id) {
    expected.emplace_back(id, 1);
  }
  for (const uint64_t number : {8, 4}) {
    data_loop.plane->follow(data_loop.broadcast(kDerivedIdBit | number));
  }
  expected.emplace_back(kDerivedIdBit | 4, 1);
  expected.emplace_back(kDerivedIdBit | 8, 1);
  data_loop.tick(200);
  EXPECT_EQ(data_loop.takeQuestions(), expected) << "oldest first, derived ones last";
}

TEST(DataLoopRules, RoomThatComesBackGoesToTheOldestOperationsInOrder) {
  Limits limits;
  limits.eager_nbytes = 1000;
  limits.eager_pool_nbytes = 4 * (1000 + static_cast<int64_t>(sizeof(FrameHeader)));
  LoneDataLoop data_loop(2, limits);
  for (const uint64_t id : {1, 2, 3, 4}) {
    data_loop.plane->post(data_loop.broadcast(id, Deadline::never(), 250));
  }
  EXPECT_EQ(data_loop.takeDataFrames(1), (std::vector<uint64_t>{1, 2, 3, 4}));
  for (const uint64_t id : {9, 7, 8, 6, 5}) {
    data_loop.plane->post(data_loop.broadcast(id, Deadline::never(), 250));
  }
  EXPECT_TRUE(data_loop.takeDataFrames(1).empty()) << "the pool is full";
  FrameHeader room;
  room.type = FrameType::Credit;
  room.group = 7;
  room.aux = 3 * (1000 + sizeof(FrameHeader));
  data_loop.receive(1, room);
  EXPECT_EQ(data_loop.takeDataFrames(1), (std::vector<uint64_t>{5, 6, 7}));
}

// ---- the end of a group

TEST(DataLoopRules, NothingCountsOnceAFailureIsFoundAlthoughTheGroupHasNotFailedYet) {
  LoneDataLoop data_loop;
  const auto operation = data_loop.broadcast(1);
  data_loop.plane->follow(operation);
  FrameHeader other = LoneDataLoop::frameOf(*operation, FrameType::Waiting);
  other.numel = 99;
  data_loop.receive(1, other);
  ASSERT_EQ(data_loop.noticed.size(), 1U);
  EXPECT_EQ(data_loop.noticed[0].peer, 1);
  data_loop.receive(2, other);
  data_loop.receive(2, LoneDataLoop::frameOf(*data_loop.broadcast(5), FrameType::Waiting));
  EXPECT_EQ(data_loop.noticed.size(), 1U) << "the first error wins";
  EXPECT_TRUE(data_loop.takeAsked().empty()) << "and no question is answered";
  EXPECT_EQ(data_loop.plane->usage().tables.unexpected, 0U);
  EXPECT_FALSE(operation->done()) << "it ends with the group's cause, which the ranks have yet to agree on";
}

std::string bytesOf(const FrameHeader& header) {
  return {reinterpret_cast<const char*>(&header), sizeof header};
}

TEST(DataLoopRules, AClosingRankTakesNoNewFramesButFinishesThoseUnderWayAndReadsGoodbyes) {
  constexpr int kInFd = 2000;
  LoneDataLoop data_loop(2);
  DataLoopWire in;
  data_loop.plane->adopt(1, std::make_unique<DataLoopLink>(in, kInFd));
  FrameHeader data = LoneDataLoop::frameOf(*data_loop.broadcast(1), FrameType::Data, kEagerFlag);
  data.payload_nbytes = 40;
  const std::string frame = bytesOf(data) + std::string(40, '\1');
  in.coming = frame.substr(0, 80); // the header has come, a part of the payload has not
  data_loop.loop.ready(kInFd, EPOLLIN);
  ASSERT_EQ(data_loop.plane->usage().tables.unexpected, 1U);

  data_loop.plane->close(LoneDataLoop::because(ErrorCode::ShutDown), [] {});
  FrameHeader other = data;
  other.op_id = 2;
  FrameHeader goodbye;
  goodbye.type = FrameType::Goodbye;
  goodbye.group = 7;
  in.coming = frame.substr(80) + bytesOf(other) + std::string(40, '\1') + bytesOf(goodbye);
  data_loop.loop.ready(kInFd, EPOLLIN);
  EXPECT_EQ(data_loop.left, std::vector<int>{1});
  EXPECT_EQ(data_loop.plane->usage().tables.unexpected, 1U) << "nothing of operation 2";
  EXPECT_TRUE(data_loop.noticed.empty()) << data_loop.noticed.front().text();
}

TEST(DataLoopRules, AllOperationsEndOnceOldestFirstAndNoFrameStaysHeld) {
  constexpr int kInFd = 2000;
  LoneDataLoop data_loop(2);
  DataLoopWire in;
  data_loop.plane->adopt(1, std::make_unique<DataLoopLink>(in, kInFd));
  FrameHeader data = LoneDataLoop::frameOf(*data_loop.broadcast(3), FrameType::Data, kEagerFlag);
  data.payload_nbytes = 40;
  in.coming = bytesOf(data) + std::string(40, '\1');
  data_loop.loop.ready(kInFd, EPOLLIN);
  std::vector<uint64_t> ended;
  for (const uint64_t id : {2, 1}) { // each waits for credit
    const auto operation = data_loop.broadcast(id, Deadline::never(), 1 << 20);
    operation->onDone([&data_loop, &ended, id] {
      EXPECT_EQ(data_loop.plane->usage().transfers, 0U) << "none is found while they end";
      ended.push_back(id);
    });
    data_loop.plane->post(operation);
  }
  EXPECT_EQ(data_loop.plane->usage().transfers, 2U);
  EXPECT_EQ(data_loop.plane->usage().unexpected_frames, 1U);
  EXPECT_EQ(data_loop.plane->usage().staging_nbytes, 40U);
  data_loop.plane->fail(LoneDataLoop::because(ErrorCode::Aborted));
  EXPECT_EQ(ended, (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(data_loop.plane->usage().unexpected_frames, 0U);
  EXPECT_EQ(data_loop.plane->usage().staging_nbytes, 0U);
}

// ---- want of memory

/// The first, the second, … allocation of the tick at the deadline fails: the timeout is reported nevertheless. Returns how many failed.
int deadlinesAreReported(const std::function<void(LoneDataLoop&, Deadline)>& begin) {
  int strikes = 0;
  bool struck = true;
  for (int64_t nth = 1; struck && nth < 200; ++nth) {
    LoneDataLoop data_loop;
    data_loop.noticed.reserve(16);
    begin(data_loop, Deadline::at(data_loop.at(1000)));
    data_loop.tick(999);
    static_cast<void>(data_loop.takeAsked());
    failAllocation(nth);
    data_loop.tick(1000);
    struck = allocationFailed();
    failAllocation(0);
    strikes += struck ? 1 : 0;
    EXPECT_LE(data_loop.plane->nextTick(), data_loop.at(2000)) << "allocation " << nth;
    if (nth == 1) {
      data_loop.tick(1001);
      EXPECT_TRUE(has(data_loop.noticed, ErrorCode::Timeout)) << "at the next tick, as nothing was reported";
    }
    data_loop.tick(2001);
    EXPECT_TRUE(has(data_loop.noticed, ErrorCode::Timeout)) << "allocation " << nth;
  }
  return strikes;
}

TEST(DataLoopRules, TheDeadlineOfAnOperationIsReportedAlthoughTheTickFoundNoMemory) {
  const int strikes = deadlinesAreReported(
      [](LoneDataLoop& data_loop, Deadline deadline) { data_loop.plane->follow(data_loop.broadcast(1, deadline)); });
  EXPECT_GE(strikes, 2);
}

TEST(DataLoopRules, TheDeadlineOfAHeldOperationIsReportedAlthoughTheTickFoundNoMemory) {
  const int strikes = deadlinesAreReported(
      [](LoneDataLoop& data_loop, Deadline deadline) { data_loop.plane->hold(data_loop.broadcast(1, deadline)); });
  EXPECT_GE(strikes, 2);
}

TEST(DataLoopRules, TheDeadlineOfAMessageIsReportedAlthoughTheTickFoundNoMemory) {
  const int strikes = deadlinesAreReported(
      [](LoneDataLoop& data_loop, Deadline deadline) { data_loop.plane->post(data_loop.message(true, deadline)); });
  EXPECT_GE(strikes, 2);
}

} // namespace
} // namespace pycomm::testing
