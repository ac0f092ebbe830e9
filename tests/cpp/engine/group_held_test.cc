// Operations that begin later than they were issued, because their input was not there (Group::Call::held): in shared memory and over
// TCP they keep the place that they had when they were issued.
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "ranks.h"

namespace pycomm::testing {
namespace {

class Held : public ::testing::TestWithParam<Transport> {
 protected:
  static void run(int size, const std::function<void(Rank&)>& body) {
    runRanks(size, body, [](Group::Config& config) { config.transport = GetParam(); });
  }
};

void awaitEnd(Group& group, const Operation& operation) {
  ASSERT_TRUE(group.wait(operation, Deadline::after(20000)));
}

TEST_P(Held, KeepsItsPlaceAndReadsWhatIsThereWhenItIsReleased) {
  run(3, [](Rank& self) {
    std::vector<float> late(3000, -1);
    std::vector<float> next(5, 1);
    Group::Call call = allReduceCall(late);
    call.held = self.rank != 0; // rank 0's tensor is on the CPU
    if (!call.held) {
      late.assign(late.size(), 1);
    }
    const auto first = self.group.start(call);
    const auto second = self.group.start(allReduceCall(next));
    std::thread device;
    if (call.held) {
      EXPECT_FALSE(first->done());
      device = std::thread([&] {
        late.assign(late.size(), static_cast<float>(self.rank + 1));
        self.group.release(first);
      });
    }
    awaitEnd(self.group, *second);
    awaitEnd(self.group, *first);
    if (device.joinable()) {
      device.join();
    }
    ASSERT_FALSE(first->error()) << first->error()->text();
    ASSERT_FALSE(second->error()) << second->error()->text();
    EXPECT_EQ(late, std::vector<float>(late.size(), 6));
    EXPECT_EQ(next, std::vector<float>(next.size(), 3));
  });
}

TEST_P(Held, SeveralAreReleasedInAnyOrder) {
  run(2, [](Rank& self) {
    std::vector<std::vector<float>> tensors(20, std::vector<float>(100, 1));
    std::vector<std::shared_ptr<Operation>> operations;
    for (std::vector<float>& tensor : tensors) {
      Group::Call call = allReduceCall(tensor);
      call.held = true;
      operations.push_back(self.group.start(call));
    }
    for (size_t k = 0; k < operations.size(); ++k) {
      self.group.release(operations[self.rank == 0 ? k : operations.size() - 1 - k]);
    }
    for (const auto& operation : operations) {
      awaitEnd(self.group, *operation);
      ASSERT_FALSE(operation->error()) << operation->error()->text();
    }
    for (const std::vector<float>& tensor : tensors) {
      EXPECT_EQ(tensor, std::vector<float>(100, 2));
    }
  });
}

TEST_P(Held, EndsWithTheGroupsFailureAndIsReleasedInVain) {
  run(2, [](Rank& self) {
    std::vector<float> late(10, 1);
    std::vector<float> other(10, 1);
    std::vector<float> joined(1);
    awaitEnd(self.group, *self.group.start(allReduceCall(joined))); // an abort before that may end the other's join
    if (self.rank == 0) {
      ErrorRecord reason;
      reason.code = ErrorCode::Aborted;
      reason.peer = 0;
      reason.summary = "Rank 0 has had enough.";
      self.group.abort(reason);
      const auto operation = self.group.start(allReduceCall(other));
      awaitEnd(self.group, *operation);
      EXPECT_TRUE(operation->error());
      return;
    }
    Group::Call call = allReduceCall(late);
    call.held = true;
    const auto held = self.group.start(call);
    const auto second = self.group.start(allReduceCall(other));
    awaitEnd(self.group, *second);
    ASSERT_TRUE(second->error());
    awaitEnd(self.group, *held);
    ASSERT_TRUE(held->error());
    EXPECT_EQ(held->error()->code, ErrorCode::Aborted);
    self.group.release(held);
  });
}

TEST_P(Held, NothingThatIsStartedAfterAnAbortSucceedsOnAnyRank) {
  run(2, [](Rank& self) {
    std::vector<float> joined(1);
    awaitEnd(self.group, *self.group.start(allReduceCall(joined)));
    std::vector<float> values(10, 1);
    if (self.rank == 0) { // the other one's operation waits for this one
      ErrorRecord reason;
      reason.code = ErrorCode::Aborted;
      reason.peer = 0;
      reason.summary = "Rank 0 has had enough.";
      self.group.abort(reason);
    }
    const auto operation = self.group.start(allReduceCall(values));
    awaitEnd(self.group, *operation);
    ASSERT_TRUE(operation->error());
    EXPECT_EQ(operation->error()->code, ErrorCode::Aborted);
  });
}

// The ranks agree a little later. What began meanwhile would meet what the others began before: this rank's numbers may have a gap.
TEST_P(Held, NothingBeginsThatIsReleasedAfterAnAbort) {
  std::promise<void> stands;
  std::promise<void> goes_on;
  run(2, [&](Rank& self) {
    std::vector<float> joined(1);
    awaitEnd(self.group, *self.group.start(allReduceCall(joined)));
    std::vector<float> values(10, 1);
    Group::Call call = allReduceCall(values);
    call.held = self.rank == 0;
    const auto operation = self.group.start(call);
    if (self.rank == 0) {
      stands.get_future().wait();
      ErrorRecord reason;
      reason.code = ErrorCode::Aborted;
      self.group.abort(reason);
      self.group.release(operation);
    } else {
      self.engine.control().post([&]() noexcept { // it agrees to nothing
        stands.set_value();
        goes_on.get_future().wait();
      });
      EXPECT_FALSE(self.group.wait(*operation, Deadline::after(500)));
      goes_on.set_value();
    }
    awaitEnd(self.group, *operation);
    ASSERT_TRUE(operation->error());
    EXPECT_EQ(operation->error()->code, ErrorCode::Aborted);
  });
}

TEST_P(Held, OneWhoseInputNeverComesEndsAtItsDeadlineOnAllRanks) {
  run(2, [](Rank& self) {
    std::vector<float> values(10, 1);
    Group::Call call = allReduceCall(values, Deadline::after(self.rank == 1 ? 1500 : 20000));
    call.held = self.rank == 1;
    const auto operation = self.group.start(call);
    awaitEnd(self.group, *operation);
    const auto error = operation->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::Timeout) << error->text();
    EXPECT_EQ(error->peer, 1) << error->text();
    EXPECT_NE(error->summary.find("has not left its device"), std::string::npos) << error->text();
  });
}

TEST_P(Held, ClosingEndsIt) {
  run(1, [](Rank& self) {
    std::vector<float> values(10, 1);
    Group::Call call = allReduceCall(values);
    call.held = true;
    const auto operation = self.group.start(call);
    self.group.close();
    awaitEnd(self.group, *operation);
    ASSERT_TRUE(operation->error());
    EXPECT_EQ(operation->error()->code, ErrorCode::ShutDown);
    self.group.release(operation);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Transports,
    Held,
    ::testing::Values(Transport::SharedMemory, Transport::Tcp),
    [](const auto& each) { return each.param == Transport::Tcp ? "Tcp" : "SharedMemory"; });

} // namespace
} // namespace pycomm::testing
