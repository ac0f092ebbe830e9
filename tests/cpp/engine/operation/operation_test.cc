#include "engine/operation/operation.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>
#include <vector>

#include "allocations.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

// A program may have a million sends under way.
TEST(Operation, TakesAtMost176Bytes) {
  EXPECT_LE(sizeof(Operation), 176U)
      << "with the counts of its shared_ptr and malloc's header: 208 for each pending message";
}

/// Holds the lock that an operation shares with others, and runs `body` meanwhile.
template <typename Body>
void whileLocked(Operation& operation, const Body& body) {
  std::atomic<bool> locked{false};
  std::atomic<bool> go{false};
  std::thread holder([&] {
    std::function<void()> listener = [] {};
    holdNextAllocation(locked, go); // of the list that keeps it
    operation.onDone(std::move(listener));
  });
  for (const Deadline deadline = Deadline::after(20000); !locked && !deadline.expired();) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(locked) << "nothing is allocated there";
  body();
  go = true;
  holder.join();
}

// Operations share locks. A child that is forked while a thread of its parent holds one finds it held for ever.
TEST(Operation, AForkedChildReadsWhyAnOperationEndedWhileItsLockIsHeld) {
  Operation ended{Operation::Request()};
  EXPECT_FALSE(ended.wait(Deadline::after(0))); // makes the locks
  std::vector<std::unique_ptr<Operation>> others; // one of them shares the lock of `ended`
  for (bool shares = false; !shares;) {
    ASSERT_LT(others.size(), 5000U);
    others.push_back(std::make_unique<Operation>(Operation::Request()));
    std::future<bool> waited;
    whileLocked(*others.back(), [&] {
      waited = std::async(std::launch::async, [&] { return ended.wait(Deadline::after(0)); });
      shares = waited.wait_for(std::chrono::seconds(2)) == std::future_status::timeout;
    });
    EXPECT_FALSE(waited.get());
  }
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  record.summary = "Rank 1 is gone.";
  ended.finish(record);
  others.back()->onDone([] {}); // the second: the list is full again
  whileLocked(*others.back(), [&] {
    EXPECT_TRUE(Process([&] {
                  const auto error = ended.error();
                  bool told = false;
                  ended.onDone([&] { told = true; });
                  return error && error->code == ErrorCode::PeerDead && error->summary == "Rank 1 is gone." && told &&
                      ended.wait(Deadline::never());
                }).join());
  });
}

} // namespace
} // namespace pycomm::testing
