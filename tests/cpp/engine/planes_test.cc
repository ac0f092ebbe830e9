// The wiring between the planes of a group, on loops that run nothing by themselves.
#include "engine/planes.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <atomic>
#include <map>
#include <new>

#include "base/log.h"
#include "transport/socket_pairs.h"

namespace pycomm {
namespace {

class StillLoop final : public TaskLoop {
 public:
  void post(Task task) override {
    if (has_no_memory) {
      throw std::bad_alloc();
    }
    tasks_.push_back(std::move(task));
  }
  void watch(int fd, uint32_t, Handler& handler) override {
    handlers_[fd] = &handler;
  }
  void unwatch(int fd) noexcept override {
    handlers_.erase(fd);
  }
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}

  void readAll() {
    for (const auto& entry : std::map<int, Handler*>(handlers_)) {
      entry.second->onReady(EPOLLIN);
    }
  }
  [[nodiscard]] size_t tasks() const noexcept {
    return tasks_.size();
  }
  void runTasks() {
    for (Task& task : std::exchange(tasks_, {})) {
      task();
    }
  }

  bool has_no_memory = false;

 private:
  std::map<int, Handler*> handlers_; ///< by descriptor, alive until unwatch
  std::vector<Task> tasks_;
};

GroupIdentity identityOfTwo(int rank) {
  GroupIdentity identity;
  identity.rank = rank;
  identity.size = 2;
  identity.name = "test";
  identity.hash = 7;
  identity.hosts = {"alpha", "alpha"};
  return identity;
}

/// Of a group on one host. Returns the memory that its ranks share.
std::shared_ptr<SharedArena> openAll(
    Planes& planes,
    const GroupIdentity& identity,
    HostHeaps heaps,
    const HostPlane::Config& config) {
  Membership::Config membership;
  membership.hosts = identity.hosts;
  planes.openData();
  planes.openControl({}, membership);
  auto arena = std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(identity.size)));
  arena->commit(0, HostView::commonNbytes(identity.size));
  planes.openHost(arena, std::move(heaps), config);
  return arena;
}

// The data loop of a process serves all its groups, and a caller may be in the middle of a large sum on it. Operations in shared memory do not wait
// for that when their group fails; that all have ended is reported once the data loop's have, too.
TEST(Planes, AFailureReachesSharedMemoryWithoutTheDataLoop) {
  const GroupIdentity identity = identityOfTwo(0);
  StillLoop data_loop;
  StillLoop control;
  std::atomic<int> failed{0};
  std::atomic<int> ended{0};
  Planes::Events events;
  events.failed = [&](const ErrorRecord&) { ++failed; };
  events.ended = [&] { ++ended; };
  Planes planes(identity, data_loop, control, std::move(events));
  openAll(planes, identity, HostHeaps(), HostPlane::Config());
  data_loop.runTasks();
  std::shared_ptr<Operation> operation;
  const auto make = [] {
    Operation::Request request;
    request.id.id = request.id.sequence = 1;
    request.descriptor.kind = Collective::Barrier;
    request.descriptor.algorithm = Algorithm::SharedMemory;
    return std::make_shared<Operation>(std::move(request));
  };
  ASSERT_TRUE(planes.host()->post(make, true, operation)); // the other rank never enters it

  ErrorRecord cause;
  cause.code = ErrorCode::Aborted;
  cause.rank = 0;
  cause.summary = "The test ends it.";
  planes.control()->notice(cause);
  planes.control()->tick(Clock::now() + std::chrono::seconds(1));
  EXPECT_EQ(failed.load(), 1);
  EXPECT_EQ(data_loop.tasks(), 1U) << "for the data plane";
  ASSERT_TRUE(operation->wait(Deadline::after(20000))) << "it waits for the data loop";
  EXPECT_EQ(operation->error()->code, ErrorCode::Aborted);
  planes.host()->close(cause); // what its thread has to do is done after this
  EXPECT_EQ(ended.load(), 0) << "the data loop has not come to its operations";
  data_loop.runTasks();
  EXPECT_EQ(ended.load(), 1);
  static_cast<void>(planes.control()->close());
}

// A reader of the failure also reads what was written beside it, without a lock.
TEST(Planes, AFailureIsToldOnceAlsoIfTheDataLoopGetsItLaterForWantOfMemory) {
  const GroupIdentity identity = identityOfTwo(0);
  StillLoop data_loop;
  StillLoop control;
  int failed = 0;
  int ended = 0;
  Planes::Events events;
  events.failed = [&](const ErrorRecord&) { ++failed; };
  events.ended = [&] { ++ended; };
  Planes planes(identity, data_loop, control, std::move(events));
  Membership::Config membership;
  membership.hosts = identity.hosts;
  planes.openData();
  planes.openControl({}, membership);
  ErrorRecord cause;
  cause.code = ErrorCode::Aborted;
  cause.rank = 0;
  planes.control()->notice(cause);
  data_loop.has_no_memory = true;
  const TimePoint later = Clock::now() + std::chrono::seconds(1);
  EXPECT_THROW(planes.control()->tick(later), std::bad_alloc);
  data_loop.has_no_memory = false;
  planes.control()->tick(later);
  data_loop.runTasks();
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(ended, 1);
  static_cast<void>(planes.control()->close());
}

// Rank 1 is killed in the middle of a write into a tensor of rank 0. They are no neighbours: a neighbour of rank 1 reports what its kernel says.
// The end of a connection proves nothing: such a rank is waited for, and what it may still write is taken away from it.
TEST(Planes, ADeathThatAnotherRankHasFromTheKernelIsNotWaitedFor) {
  constexpr size_t kNumel = 100000;
  setLogSink([](LogLevel, const char*) {}, LogLevel::Warn); // of the one that is waited for
  for (const bool proved : {false, true}) {
    GroupIdentity identity = identityOfTwo(0);
    identity.size = 3;
    identity.hosts.assign(3, "alpha");
    StillLoop data_loop;
    StillLoop control;
    Planes::Events events;
    events.failed = [](const ErrorRecord&) {};
    Planes planes(identity, data_loop, control, std::move(events));
    HostHeaps heaps;
    heaps.own = std::make_shared<SharedHeap>(SharedArena::create(64 << 20));
    const auto other = std::make_shared<SharedHeap>(SharedArena::create(64 << 20));
    heaps.ranges = {heaps.own->range(), other->range(), other->range()};
    const std::shared_ptr<SharedHeap> heap = heaps.own;
    HostPlane::Config config;
    config.ranks = {0, 1, 2};
    const auto arena = openAll(planes, identity, std::move(heaps), config);
    data_loop.runTasks();
    auto* const tensor = static_cast<std::byte*>(heap->allocate(kNumel * sizeof(float)));
    std::shared_ptr<Operation> operation;
    const auto make = [&] {
      Operation::Request request;
      request.id.id = request.id.sequence = 1;
      request.descriptor.kind = Collective::AllReduce;
      request.descriptor.dtype = DType::Float32;
      request.descriptor.reduce_op = ReduceOp::Sum;
      request.descriptor.numel = kNumel;
      request.descriptor.algorithm = Algorithm::SharedMemory;
      request.input = request.output = {tensor, kNumel * sizeof(float)};
      return std::make_shared<Operation>(std::move(request));
    };
    ASSERT_TRUE(planes.host()->post(make, true, operation));
    (void)planes.host()->drive(*operation, Deadline::after(0));
    HostView{arena->at(0), 0, 3}.progress(1).writes.store(1);

    ErrorRecord cause;
    cause.code = ErrorCode::PeerDead;
    cause.rank = 2;
    cause.peer = 1;
    cause.cause = proved ? kEndedByKernel : "end of the connection";
    planes.control()->notice(cause);
    planes.control()->tick(Clock::now() + std::chrono::seconds(1));
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    EXPECT_EQ(operation->error()->code, ErrorCode::PeerDead);
    planes.host()->close(cause);
    EXPECT_EQ(heap->placeOf(tensor, 4096).has_value(), proved);
    data_loop.runTasks();
    static_cast<void>(planes.control()->close());
  }
  setLogSink(nullptr, LogLevel::Warn);
}

// A data loop that is busy for seconds must not fill the memory with what its peers ask meanwhile. They ask again.
TEST(Planes, QuestionsThatTheDataLoopCannotTakeAreDropped) {
  constexpr size_t kMost = 64 << 10;
  constexpr size_t kBatch = 1 << 10;
  const GroupIdentity identity = identityOfTwo(1);
  Membership::Config membership;
  membership.rank = 1;
  membership.hosts = identity.hosts;
  membership.neighbours = {0};
  StillLoop data_loop;
  StillLoop control;
  Planes::Events events;
  events.failed = [](const ErrorRecord& cause) { ADD_FAILURE() << cause.text(); };
  Planes planes(identity, data_loop, control, std::move(events));
  planes.openControl({}, membership);
  testing::SocketPair pair = testing::namelessPair();
  SocketLink& peer = *pair.first;
  planes.control()->adopt(0, std::move(pair.second));

  FrameHeader question;
  question.type = FrameType::Waiting;
  question.group = 7;
  question.op_id = 5;
  Route{0, 1}.writeTo(question);
  const std::vector<FrameHeader> batch(kBatch, question);
  const auto ask = [&] {
    const AbortToken none;
    for (size_t sent = 0; sent < kBatch * sizeof question;) {
      const ConstBufferView rest{
          reinterpret_cast<const std::byte*>(batch.data()) + sent, kBatch * sizeof question - sent};
      sent += peer.tryWrite(&rest, 1).nbytes;
      control.readAll();
    }
  };
  for (size_t asked = 0; asked < 2 * kMost; asked += kBatch) {
    ask();
  }
  EXPECT_EQ(data_loop.tasks(), kMost);
  data_loop.runTasks();
  EXPECT_EQ(data_loop.tasks(), 0U);
  ask();
  EXPECT_EQ(data_loop.tasks(), kBatch) << "there is room again";
  data_loop.runTasks();
  static_cast<void>(planes.control()->close());
}

} // namespace
} // namespace pycomm
