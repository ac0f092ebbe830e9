// What a rank raises if another one has found why the group cannot be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_point.h"
#include "ranks.h"
#include "transport/loopback.h"
#include "transport/memory_store.h"
#include "transport/net/listener.h"
#include "transport/rendezvous/rank_record.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

std::vector<ErrorRecord> joinAll(SharedStore& store, const std::vector<Group::Config>& configs) {
  std::vector<ErrorRecord> errors(configs.size());
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < configs.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      Engine engine;
      try {
        (void)Group::join(engine, store, configs[rank]);
      } catch (const Error& error) {
        errors[rank] = error.record();
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return errors;
}

// The rank that finds the difference first writes its own view into the store, and the other one raises that.
TEST(JoinErrors, ThePeerIsTheOtherRankOnBothSides) {
  SharedStore store;
  std::vector<Group::Config> configs = {groupConfig(0, 2), groupConfig(1, 2)};
  configs[1].rendezvous.config_digest = 7;
  const std::vector<ErrorRecord> errors = joinAll(store, configs);
  for (const int rank : {0, 1}) {
    const ErrorRecord& error = errors[static_cast<size_t>(rank)];
    EXPECT_EQ(error.code, ErrorCode::ConfigMismatch) << error.text();
    EXPECT_EQ(error.rank, rank) << error.text();
    EXPECT_EQ(error.peer, 1 - rank) << error.text();
    EXPECT_EQ(error.peer_host, localHostName());
  }
}

// A third rank is neither of the two.
TEST(JoinErrors, AThirdRankNamesOneOfTheTwo) {
  SharedStore store;
  std::vector<Group::Config> configs = {groupConfig(0, 3), groupConfig(1, 3), groupConfig(2, 3)};
  configs[2].rendezvous.config_digest = 7;
  const ErrorRecord error = joinAll(store, configs)[1];
  EXPECT_EQ(error.code, ErrorCode::ConfigMismatch) << error.text();
  EXPECT_EQ(error.rank, 1);
  EXPECT_NE(error.peer, 1) << error.text();
}

/// The store as a rank reads it that finds nobody at rank 2's address.
class Misled final : public Store {
 public:
  explicit Misled(Store& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    const std::string value = store_.get(key, deadline);
    if (!key.ends_with("/address/all")) {
      return value;
    }
    std::vector<std::string> addresses = splitTexts(value).value();
    addresses.at(2) = nobody_.address().wireText();
    return joinTexts(addresses);
  }
  bool has(const std::string& key) override {
    return store_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(key, amount);
  }

 private:
  Store& store_;
  const Listener nobody_ = Listener::bind(kLoopback, {}); ///< connections wait there
};

// Rank 1 does not reach rank 2. Rank 0 reaches both, has begun to work, and would read only that they have left.
TEST(JoinErrors, ARankThatHasJoinedReadsWhyTheOthersLeft) {
  SharedStore store;
  Misled misled(store);
  std::atomic<int> failed{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      Engine engine;
      Group::Config config = groupConfig(rank, 3);
      config.transport = Transport::Tcp;
      if (rank != 0) {
        config.rendezvous.deadline = Deadline::after(4000); // rank 0 has joined by then
      }
      try {
        const auto group = Group::join(engine, rank == 1 ? static_cast<Store&>(misled) : store, config);
        EXPECT_EQ(rank, 0);
        std::vector<float> values(100, 1.0F);
        const auto operation = group->start(allReduceCall(values, Deadline::after(60000)));
        EXPECT_TRUE(operation->wait(Deadline::after(60000)));
        const auto error = operation->error();
        ASSERT_TRUE(error);
        EXPECT_EQ(error->code, ErrorCode::PeerLeft) << error->text();
        EXPECT_THAT(error->summary, HasSubstr(" still needs it, after it could not join: Rank "));
        EXPECT_THAT(error->hint, Not(HasSubstr("fewer steps")));
        EXPECT_THAT(error->hint, Not(HasSubstr("other group")));
        group->close();
      } catch (const Error& error) {
        EXPECT_NE(rank, 0) << error.what();
        const ErrorRecord& record =
            error.record(); // of the one that gives up later: that the other has left, from rank 0
        EXPECT_TRUE(record.code == ErrorCode::ConnectFailed || record.code == ErrorCode::PeerLeft) << record.text();
        ++failed;
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  EXPECT_EQ(failed, 2);
}

// They have met, and one of them cannot go on.
TEST(JoinErrors, OneRankThatFailsAfterTheMeetingLeavesNoRecordsOfTheOthers) {
  MemoryStore store;
  const std::vector<Group::Config> configs = {groupConfig(0, 3), groupConfig(1, 3), groupConfig(2, 3)};
  armFaultPoints("group.joined:1:nomem");
  std::vector<std::thread> ranks;
  std::atomic<int> failed{0};
  for (const Group::Config& config : configs) {
    ranks.emplace_back([&] {
      Engine engine;
      try {
        Group::join(engine, store, config)->close();
      } catch (const Error&) {
        ++failed;
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  armFaultPoints("");
  EXPECT_GE(failed, 1);
  for (const auto& [key, value] : store.values()) {
    const bool of_group = key == "pycomm/test/1/member/0" || key == "pycomm/test/1/made";
    EXPECT_TRUE(of_group || key.rfind("pycomm/test/owner/", 0) == 0 || key.rfind("pycomm/test/end/", 0) == 0) << key;
  }
}

} // namespace
} // namespace pycomm::testing
