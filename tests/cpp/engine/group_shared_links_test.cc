// Links between ranks of one host through shared memory.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "base/fault_point.h"
#include "engine/ranks.h"
#include "transport/error_matchers.h"

namespace pycomm::testing {
namespace {

std::vector<float> numbers(int rank, size_t numel) {
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) {
    values[i] = static_cast<float>(i % 1013 + static_cast<size_t>(rank));
  }
  return values;
}

// Sums that go round the ring, of sizes from less than a frame to more than the memory of a link, many at once.
void sumsOfManySizes(Rank& self) {
  std::vector<std::vector<float>> tensors;
  std::vector<std::shared_ptr<Operation>> operations;
  for (const size_t numel : {1, 16, 1000, 20000, 1000003, 5}) {
    tensors.push_back(numbers(self.rank, numel));
  }
  for (std::vector<float>& values : tensors) {
    Group::Call call = allReduceCall(values, Deadline::after(60000));
    call.schedule.algorithm = Algorithm::Ring; // by name: not through the host plane
    operations.push_back(self.group.start(call));
  }
  for (size_t k = 0; k < operations.size(); ++k) {
    ASSERT_TRUE(self.group.wait(*operations[k], Deadline::after(60000)));
    const auto error = operations[k]->error();
    ASSERT_FALSE(error) << error->text();
    for (size_t i = 0; i < tensors[k].size(); i += 97) {
      float sum = 0;
      for (int rank = 0; rank < self.size; ++rank) {
        sum += static_cast<float>(i % 1013 + static_cast<size_t>(rank));
      }
      ASSERT_EQ(tensors[k][i], sum) << i;
    }
  }
}

TEST(SharedLinks, CarryWhatHasAnAlgorithmByName) {
  runRanks(3, [](Rank& self) {
    sumsOfManySizes(self);
    EXPECT_GE(
        self.group.usage().shared_links,
        2U); // to the next rank, and from the one before; more where a rank asked what another is in
  });
}

// What each rank says about its memory comes late to one of them, which meanwhile is asked why it does not answer.
class LateVotes final : public Store {
 public:
  explicit LateVotes(Store& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    std::string value = store_.get(key, deadline);
    if (key.find("shared_memory") != std::string::npos) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      ++late;
    }
    return value;
  }
  bool has(const std::string& key) override {
    return store_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(key, amount);
  }

  int late = 0;

 private:
  Store& store_;
};

TEST(SharedLinks, AreWhatARankAnswersByThatLearnsLastThatItHasThem) {
  SharedStore store;
  const auto live = [&](int rank) {
    LateVotes late(store);
    Store& own = rank == 0 ? static_cast<Store&>(store) : late;
    Engine engine;
    const auto group = Group::join(engine, own, groupConfig(rank, 2));
    Rank self{rank, 2, engine, *group};
    sumsOfManySizes(self);
    EXPECT_EQ(group->usage().shared_links, 2U) << "rank " << rank;
    EXPECT_EQ(late.late > 0, rank == 1);
    group->close();
  };
  auto other = std::async(std::launch::async, live, 1);
  live(0);
  other.get();
}

TEST(SharedLinks, AreNotThereWhereTcpIsAskedFor) {
  const auto body = [](Rank& self) {
    sumsOfManySizes(self);
    EXPECT_EQ(self.group.usage().shared_links, 0U);
  };
  runRanks(3, body, [](Group::Config& config) { config.transport = Transport::Tcp; });
}

TEST(SharedLinks, GoByTcpWhereThereIsNoRoomForTheirPages) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs a build with fault points";
  }
  armFaultPoints("ring.commit:1:errno=ENOSPC");
  runRanks(2, [](Rank& self) {
    sumsOfManySizes(self);
    EXPECT_EQ(self.group.usage().shared_links, 1U); // one of the two ranks found no room
  });
  armFaultPoints("");
}

// An impossible value of a counter ends the group on both ranks, with the error of the rank that saw it.
TEST(SharedLinks, EndWhereACounterInMemoryIsBroken) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs a build with fault points";
  }
  for (const char* site : {"ring.written", "ring.taken"}) {
    runRanks(2, [&](Rank& self) {
      const auto meet = [&] {
        const auto barrier = self.group.start(barrierCall());
        ASSERT_TRUE(self.group.wait(*barrier, Deadline::after(20000)));
      };
      sumsOfManySizes(self);
      meet();
      if (self.rank == 0) {
        armFaultPoints(std::string(site) + ":20+:flip"); // of the process, which is that of both ranks
      }
      meet();
      std::vector<float> values = numbers(self.rank, 4 << 20); // several times what the memory of a link holds
      Group::Call call = allReduceCall(values, Deadline::after(60000));
      call.schedule.algorithm = Algorithm::Ring;
      const auto operation = self.group.start(call);
      ASSERT_TRUE(self.group.wait(*operation, Deadline::after(60000)));
      const auto error = operation->error();
      ASSERT_TRUE(error) << site;
      EXPECT_EQ(error->code, ErrorCode::ProtocolViolation) << error->text();
      EXPECT_GE(error->peer, 0) << error->text();
      const std::string culprit = "Rank " + std::to_string(error->peer) + " on ";
      EXPECT_NE(error->summary.find(culprit), std::string::npos) << error->text();
    });
    armFaultPoints("");
  }
}

// The waiting thread drives and leaves, and the loop's thread takes over, asleep or not. Without a wake-up a thread would sleep for a
// second, the longest sleep of a loop.
TEST(SharedLinks, WakeTheThreadThatReadsNext) {
  runRanks(2, [](Rank& self) {
    int late = 0;
    for (int round = 0; round < 30; ++round) {
      const TimePoint began = Clock::now();
      std::vector<float> values = numbers(self.rank, 3000);
      Group::Call call = allReduceCall(values, Deadline::after(20000));
      call.schedule.algorithm = Algorithm::Ring;
      call.waits = (round + self.rank) % 2 == 0;
      const auto operation = self.group.start(call);
      // Either way it ends: driven by this thread, or by the loop's own.
      ASSERT_TRUE(
          call.waits ? self.group.wait(*operation, Deadline::after(20000)) : operation->wait(Deadline::after(20000)));
      ASSERT_FALSE(operation->error());
      late += Clock::now() - began > std::chrono::milliseconds(900) ? 1 : 0;
      if (round % 3 == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3)); // beyond the grace of a loop's thread
      }
    }
    EXPECT_LT(late, 4); // a machine that is busy may stop a thread for that long, but not again and again
  });
}

} // namespace
} // namespace pycomm::testing
