// The kernel takes 70 ms to take back 1 GiB. The thread that runs the data loop, which may be a caller's, does not wait for that.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "allocations.h"
#include "engine/loop/callback_pool.h"
#include "engine/operation/schedule_cache.h"
#include "engine/ranks.h"
#include "engine/sums.h"

namespace pycomm::testing {
namespace {

constexpr size_t kLarge = 4 << 20;
std::atomic<int> on_pool{0}; // frees of so much memory
std::atomic<int> elsewhere{0};

void countFrees() {
  on_pool = elsewhere = 0;
  watchFrees(kLarge, [] { ++(CallbackPool::ownsThisThread() ? on_pool : elsewhere); });
}

void waitForFrees(int count) {
  const Deadline most = Deadline::after(20000);
  while (on_pool + elsewhere < count && !most.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  watchFrees(0, nullptr);
  EXPECT_GE(on_pool, count);
  EXPECT_EQ(elsewhere, 0);
}

void throughLinks(Group::Config& config) {
  config.transport = Transport::Tcp;
}

TEST(LargeMemory, ScratchIsReleasedBesideTheDataLoop) {
  constexpr size_t kNumel = 9 << 20; // more than the loop keeps
  std::atomic<int> ready{0};
  std::atomic<int> ended{0};
  runRanks(
      3,
      [&](Rank& self) {
        std::vector<float> values = operandOf(self.rank, kNumel);
        Group::Call call = allReduceCall(values, Deadline::after(60000));
        call.schedule.algorithm =
            Algorithm::RecursiveDoubling; // rank 0 adds up rank 1's part, and has scratch for that
        call.waits = true;
        if (self.rank == 0) {
          countFrees();
        }
        waitForAll(ready, self.size);
        const auto operation = self.group.start(call);
        ASSERT_TRUE(self.group.wait(*operation, Deadline::after(60000)));
        ASSERT_FALSE(operation->error()) << operation->error()->text();
        if (self.rank == 0) {
          waitForFrees(1);
        }
        waitForAll(ended, self.size);
        EXPECT_EQ(values, sumOver(self.size, kNumel));
      },
      throughLinks);
}

// A schedule that is too large to be kept goes with its operation, and the data loop may be the last to have that.
TEST(LargeMemory, ALargeScheduleIsReleasedBesideTheDataLoop) {
  constexpr size_t kNumel = 450000;
  std::atomic<int> ready{0};
  std::atomic<int> ended{0};
  std::atomic<bool> dropped{false};
  runRanks(
      2,
      [&](Rank& self) {
        std::vector<float> values = operandOf(self.rank, kNumel);
        Group::Call call = allReduceCall(values, Deadline::after(60000));
        call.schedule.algorithm = Algorithm::Ring;
        call.schedule.segment_nbytes = 8;
        call.held = true; // until both schedules are made
        std::shared_ptr<Operation> operation = self.group.start(call);
        ASSERT_GT(operation->request().schedule->nbytes, ScheduleCache::kKeptNbytes);
        std::atomic<bool> done{false};
        if (self.rank == 0) { // which looks at it; elsewhere the call may come after wait()
          operation->onDone([&] { done = true; });
        }
        waitForAll(ready, self.size);
        if (self.rank == 0) {
          countFrees();
          self.group.release(operation);
          operation = nullptr;
          dropped = true;
          waitForFrees(1);
          EXPECT_TRUE(done);
        } else {
          while (!dropped) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          self.group.release(operation);
          EXPECT_TRUE(self.group.wait(*operation, Deadline::after(60000)));
        }
        waitForAll(ended, self.size); // until then rank 1 keeps its own
        EXPECT_EQ(values, sumOver(self.size, kNumel));
      },
      throughLinks);
}

} // namespace
} // namespace pycomm::testing
