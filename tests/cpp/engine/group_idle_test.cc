// A group on one host uses two ways, shared memory and links, and its data loop watches operations that it does not run. What the data loop keeps of
// them ends with them: runRanks() looks at every group after each test (expectIdle).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "expect_done.h"
#include "ranks.h"

namespace pycomm::testing {
namespace {

Group::Call allToAllCall(std::vector<float>& mine, std::vector<float>& theirs, int size) {
  Group::Call call;
  call.schedule.kind = Collective::AllToAll;
  call.schedule.dtype = DType::Float32;
  call.schedule.numel = static_cast<int64_t>(mine.size()) / size;
  call.input = viewOf(mine);
  call.output = viewOf(theirs);
  call.deadline = Deadline::after(20000);
  return call;
}

template <typename Condition>
void waitUntil(const Condition& condition) {
  const Deadline most = Deadline::after(20000);
  bool met = condition();
  while (!met && !most.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    met = condition();
  }
  ASSERT_TRUE(met); // not asked again: what is so for a moment only may be over
}

// A peer's frame makes the data loop look for operations in shared memory (recall), and finds the sum under way.
TEST(IdleGroup, KeepsNothingOfOperationsInSharedMemoryThatAPeerSpokeOf) {
  std::atomic<int> here{0};
  runRanks(2, [&](Rank& self) {
    std::vector<float> sums(1 << 20, 1);
    std::vector<float> mine(2, 1);
    std::vector<float> theirs(2);
    for (int i = 0; i < 5; ++i) {
      Group::Call call = allReduceCall(sums);
      call.held = self.rank == 1; // so that rank 0 cannot end it before it has seen rank 1's frame
      const auto sum = self.group.start(call);
      if (self.rank == 0) {
        waitUntil([&] { return self.group.usage().on_host > 0; }); // the data loop watches the sum
      }
      const auto exchange = self.group.start(allToAllCall(mine, theirs, self.size));
      expectDone(exchange);
      waitForAll(here, 2 * (i + 1));
      if (self.rank == 1) {
        self.group.release(sum);
      }
      expectDone(sum);
    }
  });
}

// They wait so long that the data loop watches them: it asks, and is asked about what is not entered yet.
TEST(IdleGroup, KeepsNothingOfOperationsInSharedMemoryThatARankWasLateFor) {
  std::atomic<int> here{0};
  runRanks(2, [&](Rank& self) {
    if (self.rank == 1) {
      waitUntil([&] { return self.group.usage().tables.unexpected > 0; }); // rank 0 has asked
    }
    for (int i = 0; i < 100; ++i) { // more than the data loop finds when it looks
      const auto barrier = self.group.start(barrierCall());
      expectDone(barrier);
    }
    waitForAll(here, self.size);
  });
}

} // namespace
} // namespace pycomm::testing
