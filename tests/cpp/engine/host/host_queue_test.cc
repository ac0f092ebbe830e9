// The queues of two ranks over one mapping, on one thread and with a clock of the test's own: when is an operation stuck?
#include "engine/host/host_queue.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "views.h"

namespace pycomm::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kQueueSize = 2;

class QueueOfRank {
 public:
  QueueOfRank(const std::shared_ptr<const SharedArena>& arena, int rank)
      : identity_(identityOf(rank)), memory_(arena, HostHeaps(), identity_), bell_(memory_.view()) {
    events_.notice = [](const ErrorRecord& record) { ADD_FAILURE() << record.text(); };
    events_.stuck = [this](const std::shared_ptr<Operation>& operation, uint64_t lacking) {
      stuck.emplace_back(operation->request().id.sequence, lacking);
    };
    queue_ = std::make_unique<HostQueue>(HostQueue::Parts{identity_, memory_, bell_, inbox_, events_, ending_}, 50);
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
    EXPECT_TRUE(inbox_.post(make, made));
    return made;
  }
  bool step() {
    uint64_t blocked = 0;
    return queue_->step(blocked);
  }
  TimePoint look(TimePoint now) {
    return queue_->reportStuck(now);
  }

  std::vector<std::pair<int64_t, uint64_t>> stuck; ///< number of the operation, and who lacks

 private:
  static GroupIdentity identityOf(int rank) {
    GroupIdentity identity;
    identity.rank = rank;
    identity.size = kQueueSize;
    identity.name = "test";
    identity.hosts = {"here", "here"};
    return identity;
  }

  const GroupIdentity identity_;
  HostMemory memory_;
  const HostBell bell_;
  HostInbox inbox_;
  HostQueue::Events events_;
  std::atomic<bool> ending_{false};
  std::atomic<int64_t> issued_{0};
  std::unique_ptr<HostQueue> queue_;
};

class HostQueueTest : public ::testing::Test {
 protected:
  HostQueueTest() {
    auto arena = std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(kQueueSize)));
    arena->commit(0, HostView::commonNbytes(kQueueSize));
    for (int rank = 0; rank < kQueueSize; ++rank) {
      ranks.push_back(std::make_unique<QueueOfRank>(arena, rank));
    }
  }
  ~HostQueueTest() override {
    for (const auto& operation : posted) {
      operation->finish(std::nullopt);
    }
  }
  void post(int rank, std::vector<float>& values, Deadline deadline = Deadline::never()) {
    posted.push_back(ranks[static_cast<size_t>(rank)]->post(values, deadline));
  }

  const TimePoint start = Clock::now();
  std::vector<std::unique_ptr<QueueOfRank>> ranks;
  std::vector<std::shared_ptr<Operation>> posted;
};

// Twenty operations of 100 ms and more each, and the last of them has waited for two seconds when its turn comes.
TEST_F(HostQueueTest, OperationsThatMoveAreNotStuckHoweverLongTheyTake) {
  std::vector<std::vector<float>> values(2 * 20, std::vector<float>(3 * kHostStageNbytes / sizeof(float)));
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

TEST_F(HostQueueTest, OnlyTheOldestThatRunsIsStuckAndItSaysWhoLacks) {
  std::vector<std::vector<float>> values(4, std::vector<float>(4));
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

// The lane has the deadlines: also of one that waits for others, and of one that moves.
TEST_F(HostQueueTest, OneWhoseDeadlineComesNearIsReportedInAnyCase) {
  std::vector<std::vector<float>> values(2, std::vector<float>(4));
  post(0, values[0]);
  post(0, values[1], Deadline::at(start + milliseconds(10000)));
  while (ranks[0]->step()) {
  }
  static_cast<void>(ranks[0]->look(start));
  static_cast<void>(ranks[0]->look(start + milliseconds(8000)));
  ASSERT_EQ(ranks[0]->stuck.size(), 2U);
  EXPECT_EQ(ranks[0]->stuck[1].first, 2);
}

} // namespace
} // namespace pycomm::testing
