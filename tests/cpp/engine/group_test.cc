#include "base/fault_point.h"
#include "engine/group.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <optional>

#include "expect_done.h"
#include "ranks.h"
#include "within.h"

namespace pycomm::testing {
namespace {

std::vector<float> startValues(int rank, size_t numel) {
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) {
    values[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101);
  }
  return values;
}

std::vector<float> expectedSum(int size, size_t numel) {
  std::vector<float> sum(numel, 0.0F);
  for (int rank = 0; rank < size; ++rank) {
    const std::vector<float> values = startValues(rank, numel);
    for (size_t i = 0; i < numel; ++i) {
      sum[i] += values[i]; // integers: exact in any order
    }
  }
  return sum;
}

class AllReduce : public ::testing::TestWithParam<int> {};

TEST_P(AllReduce, SumsEverySize) {
  runRanks(GetParam(), [](Rank& self) {
    for (const size_t numel : {size_t{0}, size_t{1}, size_t{3}, size_t{1000}, size_t{40000}, size_t{1000003}}) {
      std::vector<float> values = startValues(self.rank, numel);
      expectDone(self.group.start(allReduceCall(values)));
      EXPECT_EQ(values, expectedSum(self.size, numel)) << numel;
    }
  });
}

TEST_P(AllReduce, ManyInFlight) {
  runRanks(GetParam(), [](Rank& self) {
    std::vector<std::vector<float>> tensors;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int k = 0; k < 200; ++k) {
      tensors.push_back(startValues(self.rank, static_cast<size_t>(k * 97 % 5000)));
    }
    for (std::vector<float>& values : tensors) {
      operations.push_back(self.group.start(allReduceCall(values)));
    }
    for (size_t k = 0; k < operations.size(); ++k) {
      expectDone(operations[k]);
      EXPECT_EQ(tensors[k], expectedSum(self.size, tensors[k].size()));
    }
  });
}

// A waiting caller runs the data loop itself; here two callers of each rank compete for it.
TEST_P(AllReduce, CallersDriveTheDataLoop) {
  runRanks(GetParam(), [](Rank& self) {
    std::vector<std::vector<float>> tensors;
    std::vector<std::shared_ptr<Operation>> operations;
    for (int k = 0; k < 100; ++k) {
      tensors.push_back(startValues(self.rank, static_cast<size_t>(k * 331 % 70000)));
    }
    for (std::vector<float>& values : tensors) {
      operations.push_back(self.group.start(allReduceCall(values)));
    }
    std::vector<float> last = startValues(self.rank, 5);
    Group::Call call = allReduceCall(last);
    call.waits = true;
    const auto quiet = self.group.start(call);
    std::thread other([&] {
      for (size_t k = 1; k < operations.size(); k += 2) {
        EXPECT_TRUE(self.group.wait(*operations[k], Deadline::after(20000)));
      }
    });
    EXPECT_TRUE(self.group.wait(*quiet, Deadline::after(20000)));
    for (size_t k = 0; k < operations.size(); k += 2) {
      EXPECT_TRUE(self.group.wait(*operations[k], Deadline::after(20000)));
    }
    other.join();
    EXPECT_EQ(last, expectedSum(self.size, 5));
    for (size_t k = 0; k < operations.size(); ++k) {
      EXPECT_FALSE(operations[k]->error());
      EXPECT_EQ(tensors[k], expectedSum(self.size, tensors[k].size())) << k;
    }
  });
}

// A caller that computes meanwhile looks now and then; the last wait() finds the rest, also of a rank that comes late.
TEST_P(AllReduce, CallersPoll) {
  const auto body = [](Rank& self) {
    for (int k = 0; k < 50; ++k) {
      std::vector<float> values = startValues(self.rank, 4);
      Group::Call call = allReduceCall(values);
      call.waits = true;
      if (k % 7 == self.rank) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
      const auto operation = self.group.start(call);
      for (int look = 0; look < k % 5 && !self.group.poll(*operation); ++look) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      EXPECT_TRUE(self.group.wait(*operation, Deadline::after(20000)));
      EXPECT_TRUE(self.group.poll(*operation));
      EXPECT_EQ(values, expectedSum(self.size, 4));
    }
  };
  for (const Transport transport : {Transport::Auto, Transport::Tcp}) {
    runRanks(GetParam(), body, [transport](Group::Config& config) { config.transport = transport; });
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, AllReduce, ::testing::Values(1, 2, 3, 4, 5));

TEST(Group, BarrierBroadcastAllGather) {
  runRanks(3, [](Rank& self) {
    expectDone(self.group.start(barrierCall()));

    std::vector<float> values = startValues(self.rank, 300000);
    Group::Call broadcast = allReduceCall(values);
    broadcast.schedule.kind = Collective::Broadcast;
    broadcast.schedule.reduce_op = ReduceOp::None;
    broadcast.schedule.root = 1;
    expectDone(self.group.start(broadcast));
    EXPECT_EQ(values, startValues(1, 300000));

    std::vector<float> mine = startValues(self.rank, 1001);
    std::vector<float> all(3 * 1001);
    Group::Call gather = allReduceCall(mine);
    gather.schedule.kind = Collective::AllGather;
    gather.schedule.reduce_op = ReduceOp::None;
    gather.output = viewOf(all);
    expectDone(self.group.start(gather));
    for (int rank = 0; rank < 3; ++rank) {
      const std::vector<float> part(all.begin() + rank * 1001, all.begin() + (rank + 1) * 1001);
      EXPECT_EQ(part, startValues(rank, 1001));
    }
  });
}

TEST(Group, PartsInBuffersOfTheirOwn) {
  runRanks(3, [](Rank& self) {
    const size_t counts[] = {40000, 1, 120000}; // elements of each rank's part
    std::vector<float> mine = startValues(self.rank, counts[self.rank]);
    std::vector<std::vector<float>> all;
    Group::Call gather = allReduceCall(mine);
    gather.schedule.kind = Collective::AllGather;
    gather.schedule.reduce_op = ReduceOp::None;
    gather.schedule.numel = 0;
    gather.output = BufferView();
    for (const size_t count : counts) {
      gather.schedule.counts.push_back(static_cast<int64_t>(count));
      all.emplace_back(count);
    }
    for (std::vector<float>& part : all) {
      gather.output_parts.push_back(viewOf(part));
    }
    ASSERT_TRUE(self.group.keepsParts(gather.schedule));
    expectDone(self.group.start(gather));
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(all[static_cast<size_t>(rank)], startValues(rank, counts[rank]));
    }

    // Each gathered part goes back to its rank, summed over three ranks: three times itself.
    Group::Call scatter = gather;
    scatter.schedule.kind = Collective::ReduceScatter;
    scatter.schedule.reduce_op = ReduceOp::Sum;
    scatter.input = ConstBufferView();
    scatter.output_parts.clear();
    for (std::vector<float>& part : all) {
      scatter.input_parts.push_back(viewOf(part));
    }
    std::vector<float> sum(counts[self.rank]);
    scatter.output = viewOf(sum);
    expectDone(self.group.start(scatter));
    for (size_t i = 0; i < sum.size(); ++i) {
      ASSERT_EQ(sum[i], 3 * mine[i]);
    }
  });
}

TEST(Group, DifferentSizesAreAMismatchOnEveryRank) {
  runRanks(3, [](Rank& self) {
    std::vector<float> values(self.rank == 2 ? 10 : 11);
    const auto operation = self.group.start(allReduceCall(values));
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    const auto error = operation->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::CollectiveMismatch) << error->text();
    EXPECT_NE(error->text().find("x 10"), std::string::npos) << error->text();
    EXPECT_NE(error->text().find("x 11"), std::string::npos) << error->text();
  });
}

TEST(Group, KindsWhoseSchedulesNeverMeetAreAMismatch) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values(4);
    Group::Call call = allReduceCall(values);
    call.schedule.kind = self.rank == 0 ? Collective::Broadcast : Collective::Reduce;
    call.schedule.reduce_op = self.rank == 0 ? ReduceOp::None : ReduceOp::Sum;
    call.schedule.root = self.rank == 0 ? 1 : 0; // each waits for the other
    const auto operation = self.group.start(call);
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    if (const auto error = operation->error()) {
      EXPECT_EQ(error->code, ErrorCode::CollectiveMismatch) << error->text();
    }
    for (int i = 0; i < 2000 && !self.group.failure(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ASSERT_TRUE(self.group.failure());
    EXPECT_EQ(self.group.failure()->code, ErrorCode::CollectiveMismatch);
  });
}

TEST(Group, DeadlineNamesWhoHasNotEntered) {
  std::atomic<int> here{0};
  runRanks(3, [&](Rank& self) {
    std::vector<float> warm(8);
    expectDone(self.group.start(allReduceCall(warm)));
    waitForAll(here, 3); // so that rank 1 enters before rank 0's deadline
    if (self.rank == 2) {
      for (int i = 0; i < 2000 && !self.group.failure(); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      ASSERT_TRUE(self.group.failure());
      return;
    }
    std::vector<float> values(100000);
    const auto operation = self.group.start(allReduceCall(values, Deadline::after(1500)));
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    const auto error = operation->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::Timeout) << error->text();
    EXPECT_EQ(error->peer, 2) << error->text();
    EXPECT_NE(error->text().find("has not entered"), std::string::npos) << error->text();
  });
}

TEST(Group, AbortReachesEveryRankAndSticks) {
  std::atomic<int> summed{0};
  runRanks(4, [&](Rank& self) {
    std::vector<float> values(1000000);
    std::vector<float> joined(1);
    expectDone(self.group.start(allReduceCall(joined))); // an abort before that would end another rank's join instead
    waitForAll(summed, 4);
    if (self.rank == 1) {
      ErrorRecord reason;
      reason.code = ErrorCode::Aborted;
      reason.peer = 1;
      reason.summary = "stop";
      self.group.abort(reason);
    }
    // Ranks take some milliseconds to agree on the reason; what they begin before that may end well.
    const auto ends = [&] {
      const auto operation = self.group.start(allReduceCall(values));
      EXPECT_TRUE(operation->wait(Deadline::after(20000)));
      return operation->error();
    };
    std::optional<ErrorRecord> error;
    for (const Deadline deadline = Deadline::after(20000); !error && !deadline.expired();) {
      error = ends();
    }
    for (int attempt = 0; attempt < 2; ++attempt, error = ends()) {
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code, ErrorCode::Aborted) << error->text();
    }
  });
}

// News travels over control links; a bulk link that ends before the news has arrived looks like a death.
TEST(Group, BulkLinksOutliveAFailureUntilTheNewsIsEverywhere) {
  std::atomic<int> summed{0};
  runRanks(2, [&](Rank& self) {
    std::vector<float> values(1000);
    Group::Call call = allReduceCall(values);
    call.schedule.algorithm = Algorithm::Ring; // over links
    expectDone(self.group.start(call));
    waitForAll(summed, 2); // an abort may end a sum that the other rank has not finished
    const TimePoint begin = Clock::now();
    ErrorRecord reason;
    reason.code = ErrorCode::Aborted;
    reason.summary = "stop";
    self.group.abort(reason);
    for (const Deadline most = Deadline::after(20000); !self.group.failure() && !most.expired();) {
      std::this_thread::yield();
    }
    ASSERT_TRUE(self.group.failure());
    EXPECT_EQ(self.group.failure()->code, ErrorCode::Aborted) << self.group.failure()->text();
    self.group.close();
    EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(50));
    EXPECT_WITHIN_MS(elapsedMs(begin), 5000);
  });
}

TEST(Group, LeavingEarlyIsNamed) {
  runRanks(3, [](Rank& self) {
    std::vector<float> values(100);
    expectDone(self.group.start(allReduceCall(values)));
    if (self.rank == 1) {
      return; // closes in order
    }
    const auto operation = self.group.start(allReduceCall(values));
    ASSERT_TRUE(operation->wait(Deadline::after(20000)));
    ASSERT_TRUE(operation->error());
    EXPECT_EQ(operation->error()->code, ErrorCode::PeerLeft) << operation->error()->text();
    EXPECT_EQ(operation->error()->peer, 1) << operation->error()->text();
  });
}

TEST(Group, CloseWithWorkUnderWay) {
  runRanks(2, [](Rank& self) {
    std::vector<float> values(5000000);
    std::vector<std::shared_ptr<Operation>> operations;
    for (int i = 0; i < (self.rank == 0 ? 4 : 0); ++i) {
      operations.push_back(self.group.start(allReduceCall(values)));
    }
    self.group.close();
    for (const auto& operation : operations) {
      ASSERT_TRUE(operation->wait(Deadline::after(20000)));
      EXPECT_TRUE(operation->error());
    }
    const auto late = self.group.start(allReduceCall(values));
    ASSERT_TRUE(late->wait(Deadline::after(20000)));
    EXPECT_EQ(late->error()->code, ErrorCode::ShutDown);
  });
}

// 2.4 MB of eager payloads, of which the pool holds 1 MiB: the rest needs explicit credit, in any order in which the callers wait.
TEST(Group, MoreEagerBytesThanThePoolHolds) {
  runRanks(2, [](Rank& self) {
    std::vector<std::vector<float>> many(300);
    std::vector<std::shared_ptr<Operation>> operations;
    for (auto& values : many) {
      values.assign(2048, static_cast<float>(operations.size()));
      operations.push_back(self.group.start(allReduceCall(values)));
    }
    for (size_t i = operations.size(); i-- > 0;) {
      expectDone(operations[i]);
      EXPECT_EQ(many[i], std::vector<float>(2048, 2.0F * static_cast<float>(i))) << i;
    }
  });
}

// A faster rank may call something and fail before this one has made its plane of the memory that all share.
/// Of the calling thread, and of those that it starts.
class OnCores {
 public:
  explicit OnCores(int cores) {
    ::sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t fewer;
    CPU_ZERO(&fewer);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&fewer) < cores; ++cpu) {
      if (CPU_ISSET(cpu, &before_)) {
        CPU_SET(cpu, &fewer);
      }
    }
    good_ = CPU_COUNT(&fewer) == cores && ::sched_setaffinity(0, sizeof fewer, &fewer) == 0;
  }
  ~OnCores() {
    ::sched_setaffinity(0, sizeof before_, &before_);
  }
  OnCores(const OnCores&) = delete;
  OnCores& operator=(const OnCores&) = delete;
  [[nodiscard]] bool good() const {
    return good_;
  }

 private:
  cpu_set_t before_{};
  bool good_ = false;
};

TEST(Group, APoolOfCoresIsCrowdedWhileAnyGroupHasMoreRanks) {
  const OnCores two(2);
  if (!two.good()) {
    GTEST_SKIP() << "needs two cores";
  }
  SharedStore pairs;
  runRanks(3, [&](Rank& self) {
    EventLoop& data_loop = self.engine.dataLoop();
    EXPECT_TRUE(data_loop.crowded()) << "three ranks on two cores";
    if (self.rank < 2) {
      const std::shared_ptr<Group> pair = Group::join(self.engine, pairs, groupConfig(self.rank, 2, "pair"));
      EXPECT_TRUE(data_loop.crowded()) << "a smaller group does not make room";
      self.group.close();
      EXPECT_FALSE(data_loop.crowded()) << "two ranks on two cores";
      pair->close();
      EXPECT_FALSE(data_loop.crowded());
    }
  });
}

TEST(Group, AllGroupsOfADataLoopKeepPayloadMemoryTogether) {
  constexpr size_t kNumel = 3 << 20;
  constexpr size_t kMostNbytes = size_t{32} << 20;
  std::array<SharedStore, 3> stores;
  runRanks(2, [&](Rank& self) {
    std::vector<std::shared_ptr<Group>> groups;
    for (SharedStore& store : stores) {
      Group::Config config = groupConfig(self.rank, 2, "one of many");
      config.transport = Transport::Tcp;
      groups.push_back(Group::join(self.engine, store, config));
      std::vector<float> values(kNumel, 1.0F);
      expectDone(groups.back()->start(allReduceCall(values)));
      size_t kept = 0;
      self.engine.dataLoop().run([&] { kept = self.engine.dataLoop().stagingMemory().keptNbytes(); });
      EXPECT_GT(kept, 0U);
      EXPECT_LE(kept, kMostNbytes);
    }
    for (const std::shared_ptr<Group>& group : groups) {
      group->close();
    }
  });
}

TEST(Group, EndsWhatIsIssuedAfterAFailureThatCameWhileItJoined) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs a build with fault points";
  }
  armFaultPoints("host.make:2:delay=400"); // of the two ranks, the one that comes second
  runRanks(2, [](Rank& self) {
    ErrorRecord reason;
    reason.code = ErrorCode::Aborted;
    reason.summary = "over";
    self.group.abort(reason);
    std::vector<float> values(10, 1.0F);
    std::optional<ErrorRecord> error;
    // It takes a moment to fail, in which both may still meet.
    for (const Deadline deadline = Deadline::after(30000); !error && !deadline.expired();) {
      const auto operation = self.group.start(allReduceCall(values, Deadline::after(60000)));
      ASSERT_TRUE(self.group.wait(*operation, Deadline::after(20000))) << "nobody ends it";
      error = operation->error();
    }
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::Aborted);
  });
  armFaultPoints("");
}

} // namespace
} // namespace pycomm::testing
