// A plane counts the ranks of its host, and what it reports has the numbers of the group and of the job: ranks 1, 3 and 4 of a group
// of six share a host here.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "engine/host/host_plane.h"
#include "views.h"

namespace pycomm::testing {
namespace {

const std::vector<int> kOnHost = {1, 3, 4};
const std::vector<int> kInJob = {10, 11, 12, 13, 14, 15};
constexpr size_t kLarge = 100000;

GroupIdentity identityOf(int rank) {
  GroupIdentity identity;
  identity.rank = rank;
  identity.size = static_cast<int>(kInJob.size());
  identity.job = JobRanks(kInJob);
  identity.name = "test";
  for (const char* host : {"alpha", "beta", "alpha", "beta", "beta", "gamma"}) {
    identity.hosts.emplace_back(host);
  }
  return identity;
}

class HostRanks : public ::testing::Test {
 protected:
  HostRanks() {
    const int size = static_cast<int>(kOnHost.size());
    arena_->commit(0, HostView::commonNbytes(size));
    HostHeaps heaps;
    for (int i = 0; i < size; ++i) {
      heaps_.push_back(std::make_shared<SharedHeap>(SharedArena::create(64 << 20)));
      heaps.ranges.push_back(heaps_.back()->range());
    }
    for (size_t i = 0; i < kOnHost.size(); ++i) {
      HostPlane::Events events;
      events.noticed = [this](ErrorRecord record) { // on the threads of all planes
        const std::lock_guard<std::mutex> lock(mutex_);
        first_ = first_.value_or(std::move(record));
        reported_.notify_all();
      };
      events.stuck = [this, i](const std::shared_ptr<Operation>&, uint64_t lacking) {
        const std::lock_guard<std::mutex> lock(mutex_);
        lacking_[i] = lacking;
        reported_.notify_all();
      };
      HostHeaps own = heaps;
      own.own = heaps_[i];
      HostPlane::Config config;
      config.ranks = kOnHost;
      planes_.push_back(
          std::make_unique<HostPlane>(
              identities_.emplace_back(identityOf(kOnHost[i])), arena_, std::move(own), config, std::move(events)));
    }
  }
  ~HostRanks() override {
    for (const auto& plane : planes_) {
      plane->close(causeOf(ErrorCode::ShutDown));
    }
  }
  static ErrorRecord causeOf(ErrorCode code) {
    ErrorRecord cause;
    cause.code = code;
    return cause;
  }

  HostPlane& plane(size_t i) {
    return *planes_[i];
  }
  float* allocate(size_t i, size_t numel) {
    return static_cast<float*>(heaps_[i]->allocate(numel * sizeof(float)));
  }
  HostProgress& progress(int i) {
    return HostView{arena_->at(0), 0, static_cast<int>(kOnHost.size())}.progress(i);
  }
  SharedHeap& heap(size_t i) {
    return *heaps_[i];
  }
  std::shared_ptr<Operation> post(size_t i, Collective kind, float* values, size_t numel, int root = -1) {
    const auto make = [&] {
      Operation::Request request;
      request.id = takeOperationId(issued_[i], 1);
      request.descriptor.kind = kind;
      request.descriptor.dtype = DType::Float32;
      request.descriptor.reduce_op = kind == Collective::AllReduce ? ReduceOp::Sum : ReduceOp::None;
      request.descriptor.numel = static_cast<int64_t>(numel);
      request.descriptor.root = root;
      request.descriptor.algorithm = Algorithm::SharedMemory;
      request.output = {reinterpret_cast<std::byte*>(values), numel * sizeof(float)};
      request.input = request.output;
      return std::make_shared<Operation>(std::move(request));
    };
    std::shared_ptr<Operation> made;
    EXPECT_TRUE(plane(i).post(make, true, made));
    return made;
  }
  /// Runs all planes in turn until this operation has ended on each.
  void finish(const std::vector<std::shared_ptr<Operation>>& operations) {
    const Deadline deadline = Deadline::after(20000);
    bool done = false;
    while (!done && !noticed() && !deadline.expired()) {
      done = true;
      for (size_t i = 0; i < operations.size(); ++i) {
        (void)plane(i).drive(*operations[i], Deadline::after(0));
        done = done && operations[i]->done();
      }
    }
    ASSERT_TRUE(done) << noticed().value_or(ErrorRecord()).text();
  }

  [[nodiscard]] std::optional<ErrorRecord> noticed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return first_;
  }
  /// The same, once there is something. A plane's own thread may be the one to report it, whenever the machine lets it run.
  [[nodiscard]] std::optional<ErrorRecord> awaitNoticed() {
    std::unique_lock<std::mutex> lock(mutex_);
    reported_.wait_for(lock, std::chrono::seconds(20), [this] { return first_.has_value(); });
    return first_;
  }
  /// The ranks (bits) that lacked when this plane reported its operation as stuck. Each plane has its own: another one may have looked earlier,
  /// when more of them lacked.
  [[nodiscard]] uint64_t awaitLacking(size_t i) {
    std::unique_lock<std::mutex> lock(mutex_);
    reported_.wait_for(lock, std::chrono::seconds(20), [&] { return lacking_[i] != 0; });
    return lacking_[i];
  }
  std::vector<std::vector<float>> values = std::vector<std::vector<float>>(3, std::vector<float>(kLarge));

 private:
  std::mutex mutex_; ///< guards the next three
  std::condition_variable reported_;
  std::optional<ErrorRecord> first_;
  std::array<uint64_t, 3> lacking_{}; ///< by plane
  std::shared_ptr<SharedArena> arena_ =
      std::make_shared<SharedArena>(SharedArena::create(HostView::totalNbytes(static_cast<int>(kOnHost.size()))));
  std::vector<std::shared_ptr<SharedHeap>> heaps_;
  std::deque<GroupIdentity> identities_;
  std::atomic<int64_t> issued_[3] = {0, 0, 0};
  std::vector<std::unique_ptr<HostPlane>> planes_;
};

TEST_F(HostRanks, TheRootIsARankOfTheGroup) {
  for (const size_t numel : {size_t{5}, kLarge}) {
    for (const bool in_place : {false, true}) {
      for (size_t root = 0; root < 3; ++root) {
        std::vector<float*> tensors;
        std::vector<std::shared_ptr<Operation>> operations;
        for (size_t i = 0; i < 3; ++i) {
          tensors.push_back(in_place ? allocate(i, numel) : values[i].data());
          std::fill_n(tensors[i], numel, static_cast<float>(i + 1));
          operations.push_back(post(i, Collective::Broadcast, tensors[i], numel, kOnHost[root]));
        }
        finish(operations);
        for (size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(tensors[i][numel - 1], static_cast<float>(root + 1)) << numel << ' ' << in_place << ' ' << i;
          if (in_place) {
            heap(i).release(tensors[i]);
          }
        }
      }
    }
  }
}

TEST_F(HostRanks, AMismatchNamesTheRankByItsNumberInTheJob) {
  (void)post(2, Collective::AllReduce, values[2].data(), 4);
  const auto mine = post(0, Collective::AllReduce, values[0].data(), 5);
  (void)post(1, Collective::AllReduce, values[1].data(), 5);
  for (size_t i = 3; i-- > 0;) {
    (void)plane(i).drive(*mine, Deadline::after(0));
  }
  const std::optional<ErrorRecord> found = awaitNoticed();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->code, ErrorCode::CollectiveMismatch);
  // Their own threads run, too: the first one names the other side.
  const int other = found->rank == 14 ? found->peer : found->rank;
  EXPECT_TRUE(found->rank == 14 || found->peer == 14) << found->text();
  EXPECT_TRUE(other == 11 || other == 13) << found->text();
  EXPECT_NE(found->summary.find("ank 14"), std::string::npos) << found->summary;
}

TEST_F(HostRanks, WhoIsWaitedForIsARankOfTheGroup) {
  const auto mine = post(0, Collective::AllReduce, values[0].data(), 4);
  const auto other = post(1, Collective::AllReduce, values[1].data(), 4);
  (void)plane(1).drive(*other, Deadline::after(0));
  (void)plane(0).drive(*mine, Deadline::after(100)); // it sleeps; this thread or the plane's own reports it
  EXPECT_EQ(plane(0).inGroup(plane(0).waitsFor(*mine).not_entered), std::vector<int>{4});
  EXPECT_EQ(plane(0).inGroup(awaitLacking(0)), std::vector<int>{4});
  EXPECT_EQ(plane(0).inGroup(hostBit(0) | hostBit(1)), (std::vector<int>{1, 3}));
}

TEST_F(HostRanks, ARankThatLeavesIsNamedByItsNumberInTheJob) {
  const auto mine = post(0, Collective::AllReduce, values[0].data(), 4);
  const auto other = post(1, Collective::AllReduce, values[1].data(), 4);
  (void)plane(1).drive(*other, Deadline::after(0)); // so that only the one that leaves is waited for
  plane(2).close(causeOf(ErrorCode::ShutDown));
  (void)plane(0).drive(*mine, Deadline::after(20));
  const std::optional<ErrorRecord> found = awaitNoticed();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->code, ErrorCode::PeerLeft);
  EXPECT_EQ(found->peer, 14);
  EXPECT_EQ(found->summary.rfind("Rank 14 on beta closed its process group", 0), 0U) << found->summary;
}

std::string g_warned;

class HostRanksOfWhichOneDied : public HostRanks, public ::testing::WithParamInterface<int> {
 protected:
  void SetUp() override {
    g_warned.clear();
    setLogSink([](LogLevel, const char* line) { g_warned += line; }, LogLevel::Warn);
  }
  void TearDown() override {
    setLogSink(nullptr, LogLevel::Warn);
  }
};

// Rank 14 of the job, the last of the host, is in the middle of a write into a tensor of rank 11 when the group takes it for dead. If the
// kernel has ended its process it writes no more. If nobody knows that, or another process has ended, it is waited for, and what it may
// still write is taken away from it.
TEST_P(HostRanksOfWhichOneDied, ItAloneIsNotWaitedFor) {
  float* const tensor = allocate(0, kLarge);
  const auto mine = post(0, Collective::AllReduce, tensor, kLarge);
  (void)plane(0).drive(*mine, Deadline::after(0));
  progress(2).writes.store(1);
  ErrorRecord cause = causeOf(ErrorCode::PeerDead);
  cause.peer = 14;
  plane(0).died(GetParam());
  std::promise<void> ended;
  plane(0).fail(cause, nullptr, [&] { ended.set_value(); });
  ASSERT_EQ(ended.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  ASSERT_TRUE(mine->error());
  const bool kept = heap(0).placeOf(tensor, 4096).has_value();
  EXPECT_EQ(kept, GetParam() == 4);
  EXPECT_EQ(g_warned.empty(), kept) << g_warned;
  if (!kept) {
    const std::string expected = "rank 14 on beta stopped in the middle of a write into a tensor of rank 11 on beta";
    EXPECT_NE(g_warned.find(expected), std::string::npos) << g_warned;
  }
}

INSTANTIATE_TEST_SUITE_P(Job, HostRanksOfWhichOneDied, ::testing::Values(4, 3, 2, -1));

} // namespace
} // namespace pycomm::testing
