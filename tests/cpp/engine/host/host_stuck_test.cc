// The planes of some ranks over one mapping, on one thread and with a clock of the test's own: when is an operation stuck, and
// what is left of a burst of them?
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "allocations.h"
#include "engine/host/host_plane.h"
#include "views.h"

namespace pycomm {

/// Runs a plane one step at a time. One thread does, so it holds no mutex.
class HostPlaneStepper {
 public:
  /// As a thread does that is in poll().
  static std::unique_lock<std::mutex> hold(HostPlane& plane) {
    return std::unique_lock<std::mutex>(plane.run_mutex_);
  }
  static bool step(HostPlane& plane) {
    uint64_t blocked = 0;
    return plane.step(blocked);
  }
  static TimePoint reportStuck(HostPlane& plane, TimePoint now) {
    return plane.reportStuck(now);
  }
};

namespace testing {
namespace {

using std::chrono::milliseconds;

class SteppedRank {
 public:
  SteppedRank(const std::shared_ptr<const SharedArena>& arena, int rank, int size) : identity_(identityOf(rank, size)) {
    HostPlane::Events events;
    events.noticed = [this](const ErrorRecord& record) {
      EXPECT_TRUE(ends_) << record.text(); // it leaves in the middle
    };
    events.stuck = [this](const std::shared_ptr<Operation>& operation, uint64_t lacking) {
      stuck.emplace_back(operation->request().id.sequence, lacking);
    };
    plane_ = std::make_unique<HostPlane>(identity_, arena, HostHeaps(), HostPlane::Config(), std::move(events));
  }
  ~SteppedRank() {
    ends_ = true;
    ErrorRecord reason;
    reason.code = ErrorCode::ShutDown;
    plane_->close(reason);
  }

  std::shared_ptr<Operation> post(std::vector<float>& values, Deadline deadline = Deadline::never()) {
    const auto make = [&] {
      Operation::Request request;
      request.id = takeOperationId(issued_, 1);
      request.descriptor.kind = Collective::AllReduce;
      request.descriptor.dtype = DType::Float32;
      request.descriptor.reduce_op = ReduceOp::Sum;
      request.descriptor.numel = static_cast<int64_t>(values.size());
      request.descriptor.algorithm = Algorithm::SharedMemory;
      request.input = viewOf(values);
      request.output = viewOf(values);
      request.deadline = deadline;
      return std::make_shared<Operation>(std::move(request));
    };
    std::shared_ptr<Operation> made;
    EXPECT_TRUE(plane_->post(make, true, made));
    return made;
  }
  bool step() {
    return HostPlaneStepper::step(*plane_);
  }
  [[nodiscard]] const HostPlane& plane() const {
    return *plane_;
  }
  /// Another thread polls, and has taken what was posted before this operation.
  std::shared_ptr<Operation> postAndPollBesideAnother(std::vector<float>& values) {
    const auto other = HostPlaneStepper::hold(*plane_);
    std::shared_ptr<Operation> made = post(values);
    std::thread([this] { plane_->poll(); }).join();
    return made;
  }
  bool drive(const Operation& operation, Deadline deadline) {
    return plane_->drive(operation, deadline);
  }
  TimePoint look(TimePoint now) {
    return HostPlaneStepper::reportStuck(*plane_, now);
  }

  std::vector<std::pair<int64_t, uint64_t>> stuck; ///< number of the operation, and who lacks

 private:
  static GroupIdentity identityOf(int rank, int size) {
    GroupIdentity identity;
    identity.rank = rank;
    identity.size = size;
    identity.name = "test";
    identity.hosts.assign(static_cast<size_t>(size), "here");
    return identity;
  }

  const GroupIdentity identity_;
  std::atomic<int64_t> issued_{0};
  bool ends_ = false;
  std::unique_ptr<HostPlane> plane_;
};

class HostStuck : public ::testing::Test {
 protected:
  explicit HostStuck(int size = 2) {
    auto arena = std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(size)));
    arena->commit(0, HostView::commonNbytes(size));
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<SteppedRank>(arena, rank, size));
    }
  }
  void post(int rank, std::vector<float>& values, Deadline deadline = Deadline::never()) {
    posted.push_back(ranks[static_cast<size_t>(rank)]->post(values, deadline));
  }
  /// These ranks go on until they wait for others.
  void settle(const std::vector<size_t>& which) {
    for (bool moved = true; moved;) {
      moved = false;
      for (const size_t rank : which) {
        moved = ranks[rank]->step() || moved;
      }
    }
  }

  const TimePoint start = Clock::now();
  std::vector<std::vector<float>> values; ///< until the planes have closed
  std::vector<std::unique_ptr<SteppedRank>> ranks;
  std::vector<std::shared_ptr<Operation>> posted;
};

// Twenty operations of 100 ms and more each, and the last of them has waited for two seconds when its turn comes.
TEST_F(HostStuck, OperationsThatMoveAreNotStuckHoweverLongTheyTake) {
  values.assign(2 * 20, std::vector<float>(3 * kHostStageNbytes / sizeof(float)));
  for (size_t i = 0; i < values.size(); ++i) {
    post(static_cast<int>(i % 2), values[i]);
  }
  TimePoint now = start;
  const auto done = [&] { return posted[posted.size() - 1]->done() && posted[posted.size() - 2]->done(); };
  int steps = 0;
  for (; !done() && steps < 10000; ++steps) {
    while (ranks[0]->step()) {
    }
    static_cast<void>(ranks[0]->look(now));
    now += milliseconds(20);
    static_cast<void>(ranks[1]->step());
  }
  EXPECT_TRUE(done());
  EXPECT_GT(now - start, milliseconds(2000));
  EXPECT_TRUE(ranks[0]->stuck.empty());
}

// The thread that polled does something else then, and may wait for a peer that cannot go on before this rank has entered.
TEST_F(HostStuck, APollBesideAnotherOneLeavesNoOperationBehind) {
  values.assign(2, std::vector<float>(4, 1.0F));
  const auto mine = ranks[0]->postAndPollBesideAnother(values[0]);
  const auto theirs = ranks[1]->post(values[1]);
  const Deadline deadline = Deadline::after(5000);
  (void)ranks[1]->drive(*theirs, deadline);
  EXPECT_TRUE(theirs->done());
  EXPECT_TRUE(mine->wait(deadline));
  EXPECT_EQ(values[0], (std::vector<float>(4, 2.0F)));
}

TEST_F(HostStuck, OnlyTheOldestThatRunsIsStuckAndItSaysWhoLacks) {
  values.assign(4, std::vector<float>(4));
  for (int i = 0; i < 3; ++i) {
    post(0, values[static_cast<size_t>(i)]);
  }
  while (ranks[0]->step()) {
  }
  EXPECT_EQ(ranks[0]->look(start), start + milliseconds(50));
  static_cast<void>(ranks[0]->look(start + milliseconds(49)));
  EXPECT_TRUE(ranks[0]->stuck.empty());
  const std::pair<int64_t, uint64_t> first{1, hostBit(1)};
  for (const int ms : {50, 51, 1050, 1051}) {
    static_cast<void>(ranks[0]->look(start + milliseconds(ms)));
  }
  EXPECT_EQ(ranks[0]->stuck, (std::vector{first, first})) << "again each second";
}

// The data loop has the deadlines: also of one that waits for others, and of one that moves.
TEST_F(HostStuck, OneWhoseDeadlineComesNearIsReportedInAnyCase) {
  values.assign(2, std::vector<float>(4));
  post(0, values[0]);
  post(0, values[1], Deadline::at(start + milliseconds(10000)));
  while (ranks[0]->step()) {
  }
  static_cast<void>(ranks[0]->look(start));
  static_cast<void>(ranks[0]->look(start + milliseconds(8000)));
  ASSERT_EQ(ranks[0]->stuck.size(), 2U);
  EXPECT_EQ(ranks[0]->stuck[1].first, 2);
}

/// Rank 2 stops somewhere, and the deadlines of ranks 0 and 1 pass.
class HostStuckOfThree : public HostStuck {
 protected:
  HostStuckOfThree() : HostStuck(3) {
    values.resize(3);
  }
  /// Each rank issues so many.
  void postAll(int count, size_t numel) {
    for (size_t rank = 0; rank < 3; ++rank) {
      values[rank].resize(numel);
      for (int i = 0; i < count; ++i) {
        last[rank] = ranks[rank]->post(values[rank]);
      }
    }
  }
  void expectBothNameRankTwo(uint64_t not_entered, int behind) {
    for (size_t rank = 0; rank < 2; ++rank) {
      ASSERT_FALSE(last[rank]->done());
      const HostPlane::WaitsFor found = ranks[rank]->plane().waitsFor(*last[rank]);
      EXPECT_EQ(found.not_entered, not_entered) << "rank " << rank;
      EXPECT_EQ(found.behind, behind) << "rank " << rank;
    }
  }

  std::array<std::shared_ptr<Operation>, 3> last;
};

TEST_F(HostStuckOfThree, WhoHasNotEnteredIsWaitedFor) {
  postAll(1, 4);
  settle({0, 1});
  expectBothNameRankTwo(hostBit(2), -1);
}

// The operation that is waited for has no slot yet, so nobody has entered it.
TEST_F(HostStuckOfThree, WhoKeepsTheOthersFromEnteringIsWaitedFor) {
  postAll(40, 4);
  ASSERT_TRUE(ranks[2]->step()); // enters as many as there are slots
  settle({0, 1});
  expectBothNameRankTwo(0, 2);
}

TEST_F(HostStuckOfThree, WhoStoppedInTheMiddleIsWaitedForAlsoInWhatComesAfterIt) {
  for (const int count : {1, 3}) {
    postAll(count, 5 * kHostStageNbytes / sizeof(float));
    settle({0, 1});
    ASSERT_TRUE(ranks[2]->step()); // enters
    for (int steps = 0; steps < 4; ++steps) {
      settle({0, 1});
      expectBothNameRankTwo(0, 2);
      ASSERT_TRUE(ranks[2]->step());
    }
    settle({0, 1, 2});
    ASSERT_TRUE(last[0]->done());
  }
}

TEST_F(HostStuckOfThree, OneThatCannotEnterForItsOwnReasonsWaitsForNoOther) {
  postAll(1, 4);
  const HostPlane::WaitsFor found = ranks[0]->plane().waitsFor(*last[0]);
  EXPECT_EQ(found.not_entered, 0U);
  EXPECT_EQ(found.behind, -1);
}

TEST_F(HostStuck, ABurstGivesItsMemoryBack) {
  values.assign(2, std::vector<float>(4));
  const int64_t before = heldNbytes();
  for (int i = 0; i < 5000; ++i) {
    for (size_t rank = 0; rank < 2; ++rank) {
      static_cast<void>(ranks[rank]->post(values[rank]));
    }
  }
  const int64_t burst = heldNbytes() - before;
  for (bool moved = true; moved;) {
    moved = ranks[0]->step();
    moved = ranks[1]->step() || moved;
  }
  EXPECT_GT(burst, 1 << 20);
  EXPECT_LT(heldNbytes() - before, 512 << 10) << "the last 64, and two lists, of each";
}

} // namespace
} // namespace testing
} // namespace pycomm
