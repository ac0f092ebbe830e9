// What a rank raises if another one has found why the group cannot be made.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/fault_point.h"
#include "ranks.h"
#include "transport/memory_store.h"

namespace pycomm::testing {
namespace {

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
