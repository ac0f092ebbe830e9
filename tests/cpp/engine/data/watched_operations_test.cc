#include "engine/data/watched_operations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "engine/data/matching.h"
#include "engine/host/host_plane.h"

namespace pycomm {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

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

/// Rank 0 of three that share a host waits in #1; the test is the others, and rank 2 has entered it.
class WatchedOnHost : public ::testing::Test {
 protected:
  WatchedOnHost() {
    arena_->commit(0, HostView::commonNbytes(kSize));
    HostPlane::Events events;
    events.noticed = [](const ErrorRecord&) {};
    events.stuck = [](const std::shared_ptr<Operation>&, uint64_t) {};
    events.ended = [](const OperationId&, const Descriptor&) {};
    plane = std::make_unique<HostPlane>(identity_, arena_, HostHeaps(), HostPlane::Config(), std::move(events));
    watched.accompany(plane.get());
    enter(2, 1);
  }
  ~WatchedOnHost() override {
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    plane->close(reason);
  }

  static Descriptor descriptor() {
    Descriptor descriptor;
    descriptor.kind = Collective::Barrier;
    descriptor.algorithm = Algorithm::SharedMemory;
    return descriptor;
  }
  /// That rank has entered this operation as its first.
  void enter(int rank, uint64_t op_id) {
    HostSlot& slot = HostView{arena_->at(0), 0, kSize}.slot(rank, 1);
    slot.op_id.store(op_id);
    descriptor().writeTo(slot.header);
    slot.ticket.store(1);
  }
  /// Rank 0 enters it, if its input is not held, and then asks those that lack, as its plane says.
  void wait(uint64_t lacking, int64_t sequence = 1, bool held = false) {
    std::shared_ptr<Operation> operation;
    (void)plane->post(
        [&] {
          Operation::Request request;
          request.id = {static_cast<uint64_t>(sequence), sequence};
          request.descriptor = descriptor();
          auto made = std::make_shared<Operation>(std::move(request));
          made->makeShared().held.store(held);
          return made;
        },
        true,
        operation);
    plane->poll();
    watched.stuck(operation, lacking);
  }
  void arrive(int peer, FrameType type, uint64_t aux = 0) {
    FrameHeader header;
    header.type = type;
    header.op_id = 1;
    header.aux = aux;
    descriptor().writeTo(header);
    (void)matching::headerArrived(tables, tables.find(1), peer, header, Clock::now());
  }
  ErrorRecord record(uint64_t op_id) {
    return watched.overdue(*tables.find(op_id)).value_or(ErrorRecord());
  }
  std::string overdue() {
    return record(1).summary;
  }

  static constexpr int kSize = 3;

 private:
  static GroupIdentity identityOf() {
    GroupIdentity identity;
    identity.rank = 0;
    identity.size = kSize;
    identity.name = "test";
    identity.hosts.assign(kSize, "alpha");
    return identity;
  }
  const GroupIdentity identity_ = identityOf();
  std::shared_ptr<SharedArena> arena_ =
      std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(kSize)));

 protected:
  Tables tables{identity_, Limits()};
  std::unique_ptr<HostPlane> plane;
  WatchedOperations watched{tables};
};

TEST_F(WatchedOnHost, TheRankWhoseSlotLacksItHasNotEnteredIt) {
  wait(hostBit(1));
  EXPECT_THAT(overdue(), HasSubstr("rank 1 on alpha has not entered it (its last: not known)"));
  arrive(1, FrameType::NotEntered);
  EXPECT_THAT(overdue(), HasSubstr("rank 1 on alpha has not entered it (its last: no operation yet)"));
}

// Its input is on its way from a device, or it was stopped before it came to its slot.
TEST_F(WatchedOnHost, ARankThatAsksAboutItIsNotSaidNotToHaveEnteredIt) {
  wait(hostBit(1));
  arrive(1, FrameType::Waiting);
  EXPECT_THAT(overdue(), HasSubstr("it waits for rank 1 on alpha."));
}

TEST_F(WatchedOnHost, ARankThatWentAstrayHasNotEnteredIt) {
  enter(1, 2);
  wait(hostBit(1));
  arrive(1, FrameType::NotEntered, 2);
  EXPECT_THAT(overdue(), HasSubstr("rank 1 on alpha has not entered it (its last: barrier"));
}

// It tells nobody that it has, and who lacks is looked up again only once a second.
TEST_F(WatchedOnHost, ARankThatHasEnteredItSinceItWasAskedIsNotSaidNotToHave) {
  wait(hostBit(1));
  arrive(1, FrameType::NotEntered);
  enter(1, 1);
  const ErrorRecord late = record(1);
  EXPECT_EQ(late.phase, ErrorPhase::Transfer) << late.summary;
  EXPECT_EQ(late.peer, -1);
  EXPECT_THAT(late.summary, HasSubstr("it waits for its own memory."));
}

TEST_F(WatchedOnHost, OneBehindAnotherWhoseInputHasNotComeWaitsForThat) {
  wait(0, 1, true);
  wait(0, 2);
  const ErrorRecord late = record(2);
  EXPECT_EQ(late.phase, ErrorPhase::CopyToHost) << late.summary;
  EXPECT_EQ(late.peer, 0);
  EXPECT_EQ(late.sequence, 1);
}

} // namespace
} // namespace pycomm
