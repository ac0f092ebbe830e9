// A group on one host uses two ways, shared memory and links, and its lane watches operations that it does not run. What the lane keeps of
// them ends with them: runRanks() looks at every group after each test (expectIdle).
#include <gtest/gtest.h>

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

// A peer's frame makes the lane look for operations in shared memory (recall), and finds them under way.
TEST(IdleGroup, KeepsNothingOfOperationsInSharedMemoryThatAPeerSpokeOf) {
  runRanks(2, [](Rank& self) {
    std::vector<float> sums(1 << 20, 1);
    std::vector<float> mine(2, 1);
    std::vector<float> theirs(2);
    for (int i = 0; i < 20; ++i) {
      const auto sum = self.group.start(allReduceCall(sums));
      const auto exchange = self.group.start(allToAllCall(mine, theirs, self.size));
      ASSERT_TRUE(self.group.wait(*exchange, Deadline::after(20000)));
      ASSERT_TRUE(self.group.wait(*sum, Deadline::after(20000)));
    }
  });
}

// They wait so long that the lane watches them: it asks, and is asked about what is not entered yet.
TEST(IdleGroup, KeepsNothingOfOperationsInSharedMemoryThatARankWasLateFor) {
  std::atomic<int> here{0};
  runRanks(2, [&](Rank& self) {
    if (self.rank == 1) { // rank 0 asks after 50 ms; nothing else tells that it has
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
    for (int i = 0; i < 100; ++i) { // more than the lane finds when it looks
      const auto barrier = self.group.start(barrierCall());
      ASSERT_TRUE(self.group.wait(*barrier, Deadline::after(20000)));
    }
    waitForAll(here, self.size);
  });
}

} // namespace
} // namespace pycomm::testing
