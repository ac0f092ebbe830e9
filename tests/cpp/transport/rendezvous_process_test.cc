// Ranks as processes: what counts here is which process holds a rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "transport/directory_store.h"
#include "transport/process.h"
#include "transport/rendezvous_try.h"

namespace pycomm {
namespace {

using testing::configOf;
using testing::DirectoryStore;
using ::testing::HasSubstr;
using testing::Outcome;
using testing::Process;
using testing::SharedFlag;
using testing::tryToMake;
using testing::tryToMeet;

TEST(MeetInProcesses, BringsThreeTogether) {
  DirectoryStore store;
  std::vector<Process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&store, rank] {
      const Outcome outcome = tryToMeet(store, configOf(rank, 3));
      return outcome.good() && outcome.met.members[static_cast<size_t>(rank)].pid == ::getpid() &&
          outcome.met.members[0].pid != outcome.met.members[1].pid;
    });
  }
  for (Process& rank : ranks) {
    EXPECT_TRUE(rank.join());
  }
}

TEST(MeetInProcesses, RefusesASecondOwnerOfARankAndLetsTheFirstLive) {
  DirectoryStore store;
  Process first([&] { return tryToMeet(store, configOf(1, 2)).good(); });
  (void)store.get("pycomm/world/1/member/1", Deadline::after(60000));
  const pid_t first_pid = first.pid();
  // Twice: a refused attempt must not let the next one in.
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Process([&] {
                  const Outcome second = tryToMeet(store, configOf(1, 2));
                  const std::string us = localHostName() + ":" + std::to_string(::getpid());
                  const std::string them = localHostName() + ":" + std::to_string(first_pid);
                  EXPECT_EQ(second.error.code, ErrorCode::DuplicateRank) << second.error.text();
                  EXPECT_THAT(second.error.summary, HasSubstr(them + " came first, " + us + " is refused"));
                  EXPECT_WITHIN_MS(second.elapsed_ms, 10000);
                  return !::testing::Test::HasFailure();
                }).join());
  }
  EXPECT_TRUE(tryToMeet(store, configOf(0, 2)).good());
  EXPECT_TRUE(first.join());
}

TEST(MeetInProcesses, TellsAStaleStoreFromALivingRank) {
  DirectoryStore store;
  Process dead([&] { return !tryToMeet(store, configOf(0, 2)).good(); });
  (void)store.get("pycomm/world/1/member/0", Deadline::after(60000));
  dead.kill();
  EXPECT_FALSE(dead.join());
  const Outcome outcome = tryToMeet(store, configOf(0, 2));
  EXPECT_EQ(outcome.error.code, ErrorCode::DuplicateRank);
  EXPECT_THAT(outcome.error.summary, HasSubstr("earlier run"));
  EXPECT_THAT(outcome.error.hint, HasSubstr("delete the store's file"));
}

TEST(MeetInProcesses, TakesARankOverAfterAnOrderlyEnd) {
  DirectoryStore store;
  for (int64_t generation = 1; generation <= 2; ++generation) {
    EXPECT_TRUE(Process([&] {
                  const Outcome outcome = tryToMeet(store, configOf(0, 1));
                  leave(store, outcome.met.claim);
                  return outcome.good() && outcome.met.claim.generation == generation;
                }).join());
  }
}

TEST(MeetInProcesses, NamesARankThatWasKilledOnTheWay) {
  DirectoryStore store;
  Process dead([&] { return tryToMeet(store, configOf(1, 3)).good(); });
  (void)store.get("pycomm/world/1/member/1", Deadline::after(60000));
  dead.kill();
  (void)dead.join();
  const Outcome outcome = tryToMeet(store, configOf(0, 3, 300));
  EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
  EXPECT_THAT(outcome.error.summary, HasSubstr("missing: 2;"));
}

// Restarts by a launcher that has ended all ranks of the last run.

RendezvousConfig restarted(int rank, int size, int timeout_ms = 20000) {
  RendezvousConfig config = configOf(rank, size, timeout_ms);
  config.takeover = Takeover::FromEndedRun;
  return config;
}

Process rankOf(Store& store, const RendezvousConfig& config) {
  return Process([&store, config] { return tryToMake(store, config).good(); });
}

void killed(Process rank) {
  rank.kill();
  EXPECT_FALSE(rank.join());
}

// All ranks of a new run, in the order of `order`, `pause_ms` from one to the next.
void expectRunOf(Store& store, const std::vector<int>& order, int pause_ms = 0) {
  std::vector<Process> ranks;
  for (const int rank : order) {
    ranks.push_back(rankOf(store, restarted(rank, static_cast<int>(order.size()))));
    (void)::poll(nullptr, 0, pause_ms);
  }
  for (Process& rank : ranks) {
    EXPECT_TRUE(rank.join());
  }
}

TEST(MeetAfterARestart, NeedsNoGoodbyes) {
  DirectoryStore store;
  for (int run = 0; run < 3; ++run) { // they end as soon as they have met, and say nothing
    expectRunOf(store, {0, 1, 2});
  }
}

TEST(MeetAfterARestart, FollowsRankZeroHoweverLateItComes) {
  DirectoryStore store;
  expectRunOf(store, {0, 1, 2});
  expectRunOf(store, {2, 1, 0}, 100);
}

TEST(MeetAfterARestart, MayFollowARunThatNeverMet) {
  DirectoryStore store;
  Process zero = rankOf(store, restarted(0, 3)); // rank 2 died before it came here
  Process one = rankOf(store, restarted(1, 3));
  (void)store.get("pycomm/world/1/member/1", Deadline::after(60000));
  killed(std::move(zero));
  killed(std::move(one));
  expectRunOf(store, {2, 1, 0}, 100); // rank 2 joins the old rank 0 first, whose record looks like a new one's
}

TEST(MeetAfterARestart, MayHaveAnotherNumberOfRanks) {
  DirectoryStore store;
  expectRunOf(store, {0, 1, 2});
  expectRunOf(store, {1, 0}, 100);
  Process zero = rankOf(store, restarted(0, 2));
  (void)store.get("pycomm/world/3/member/0", Deadline::after(60000));
  killed(std::move(zero));
  expectRunOf(store, {3, 1, 2, 0}, 100);
}

TEST(MeetAfterARestart, ForgetsAFailureOfTheLastRun) {
  DirectoryStore store;
  Process zero = rankOf(store, restarted(0, 2));
  (void)store.get("pycomm/world/1/member/0", Deadline::after(60000));
  ErrorRecord failure;
  failure.code = ErrorCode::PortsExhausted;
  failure.rank = 1;
  store.set("pycomm/world/1/error", failure.serialize());
  killed(std::move(zero));
  expectRunOf(store, {1, 0}, 300);
}

TEST(MeetAfterARestart, TellsAllRanksOfAFailure) {
  DirectoryStore store;
  expectRunOf(store, {0, 1, 2});
  RendezvousConfig other = restarted(1, 3);
  other.config_digest = 7;
  Process two([&] { return tryToMake(store, restarted(2, 3)).error.code == ErrorCode::ConfigMismatch; });
  Process one([&] { return tryToMake(store, other).error.code == ErrorCode::ConfigMismatch; });
  EXPECT_EQ(tryToMake(store, restarted(0, 3)).error.code, ErrorCode::ConfigMismatch);
  EXPECT_TRUE(one.join());
  EXPECT_TRUE(two.join());
}

// Rank 0 has left by then, but its process lives: so the failure is of this run.
TEST(MeetAfterARestart, TellsAFailureToARankThatComesAfterIt) {
  DirectoryStore store;
  expectRunOf(store, {0, 1, 2});
  RendezvousConfig other = restarted(1, 3);
  other.config_digest = 7;
  Process one([&] { return tryToMake(store, other).error.code == ErrorCode::ConfigMismatch; });
  EXPECT_EQ(tryToMake(store, restarted(0, 3)).error.code, ErrorCode::ConfigMismatch);
  EXPECT_TRUE(one.join());
  const Outcome late = tryToMake(store, restarted(2, 3));
  EXPECT_EQ(late.error.code, ErrorCode::ConfigMismatch) << late.error.text();
  EXPECT_EQ(late.error.rank, 0) << "the rank whose error it is";
  EXPECT_WITHIN_MS(late.elapsed_ms, 5000);
  expectRunOf(store, {1, 2, 0}, 100);
}

// Rank 0 alone, whose deadline passed. It is gone, so nobody can know of which run that was.
void failARun(Store& store) {
  EXPECT_TRUE(Process([&] {
                return tryToMake(store, restarted(0, 2, 100)).error.code == ErrorCode::RendezvousTimeout;
              }).join());
}

TEST(MeetAfterARestart, NeverBelievesAFailureOfARankZeroThatIsGone) {
  DirectoryStore store;
  failARun(store);
  const Outcome waited = tryToMake(store, restarted(1, 2, 500));
  EXPECT_THAT(
      waited.error.summary,
      HasSubstr(
          "rank 1 waited for rank 0, which did not come; the last attempt of rank 0, maybe in an earlier run, "
          "ended with: The rendezvous timed out: rank 0 waited "));
  EXPECT_EQ(waited.error.rank, 1);
  EXPECT_GE(waited.elapsed_ms, 490);
  expectRunOf(store, {1, 0}, 100);
}

/// Tells how often all processes together have looked for keys.
class WatchedStore final : public DirectoryStore {
 public:
  [[nodiscard]] bool has(const std::string& key) override {
    looks_.raise(looks_.value() + 1); // lossy, which only makes it fewer
    return DirectoryStore::has(key);
  }
  /// False if nobody looks `times` more times for a minute.
  [[nodiscard]] bool waitForLooks(int64_t times) const {
    const int64_t target = looks_.value() + times;
    const Deadline end = Deadline::after(60000);
    while (looks_.value() < target && !end.expired()) {
      (void)::poll(nullptr, 0, 1);
    }
    return looks_.value() >= target;
  }

 private:
  SharedFlag looks_;
};

// The same processes, which did not end in between.
TEST(MeetAfterARestart, ARankThatTriesAgainIsNotToldOfItsFirstAttempt) {
  WatchedStore store;
  RendezvousConfig other = restarted(1, 2);
  other.config_digest = 7;
  Process one([&] {
    return tryToMake(store, other).error.code == ErrorCode::ConfigMismatch && tryToMake(store, restarted(1, 2)).good();
  });
  EXPECT_EQ(tryToMake(store, restarted(0, 2)).error.code, ErrorCode::ConfigMismatch);
  (void)store.get("pycomm/world/owner/1/2", Deadline::after(60000));
  EXPECT_TRUE(store.waitForLooks(20)); // for what the first attempt left, among others
  EXPECT_TRUE(tryToMake(store, restarted(0, 2)).good());
  EXPECT_TRUE(one.join());
}

TEST(MeetAfterARestart, RefusesARankThatIsAliveOnThisHost) {
  DirectoryStore store;
  Process first = rankOf(store, restarted(1, 2));
  (void)store.get("pycomm/world/owner/1/1", Deadline::after(60000));
  const Outcome second = tryToMake(store, restarted(1, 2));
  EXPECT_EQ(second.error.code, ErrorCode::DuplicateRank);
  EXPECT_THAT(second.error.summary, HasSubstr("came first"));
  EXPECT_TRUE(tryToMake(store, restarted(0, 2)).good());
  EXPECT_TRUE(first.join());
}

/// Claims ranks 0 and 1, as a process of an earlier run that did not give them back.
void holdRanks(Store& store, const HostIdentity& host, const ProcessIdentity& process) {
  for (const int rank : {0, 1}) {
    (void)store.add("pycomm/world/claim/" + std::to_string(rank), 1);
    store.set("pycomm/world/owner/" + std::to_string(rank) + "/1", "1 " + host.wireText() + " " + process.wireText());
  }
}

TEST(MeetAfterARestart, TakesARankFromAnotherHost) {
  DirectoryStore store;
  HostIdentity far = HostIdentity::ofThisProcess();
  far.hostname = "far";
  far.boot_id = "another";
  holdRanks(store, far, ProcessIdentity::ofThisProcess());
  expectRunOf(store, {1, 0}, 100);
}

// A container that was restarted: the same host and network, other pids.
TEST(MeetAfterARestart, TakesARankFromAnotherPidNamespaceOfThisHost) {
  DirectoryStore store;
  ProcessIdentity gone = ProcessIdentity::ofThisProcess();
  gone.pid_namespace += 1;
  holdRanks(store, HostIdentity::ofThisProcess(), gone);
  expectRunOf(store, {1, 0}, 100);
}

TEST(MeetAfterARestart, TakesARankFromAProcessThatNobodyHasReaped) {
  DirectoryStore store;
  const Process zombie([&] {
    holdRanks(store, HostIdentity::ofThisProcess(), ProcessIdentity::ofThisProcess());
    return true;
  });
  ASSERT_FALSE(zombie.runsOn(10000));
  expectRunOf(store, {1, 0}, 100);
}

TEST(MeetAfterARestart, SaysSoIfRankZeroDoesNotCome) {
  DirectoryStore store;
  expectRunOf(store, {0, 1});
  const Outcome outcome = tryToMake(store, restarted(1, 2, 300));
  EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
  EXPECT_THAT(outcome.error.summary, HasSubstr("rank 1 waited for rank 0"));
  expectRunOf(store, {1, 0}, 100);
}

// Its rank 0 was killed while the ranks met: its record looks like a new one's.
TEST(MeetAfterARestart, SaysThatTheRecordOfRankZeroMayBeOld) {
  DirectoryStore store;
  Process zero = rankOf(store, restarted(0, 2));
  (void)store.get("pycomm/world/1/member/0", Deadline::after(60000));
  killed(std::move(zero));
  const Outcome outcome = tryToMake(store, restarted(1, 2, 300));
  EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
  EXPECT_THAT(outcome.error.summary, HasSubstr("missing: 0 (it came, maybe in an earlier run, but does not go on)"));
  expectRunOf(store, {1, 0}, 100);
}

TEST(MeetAfterARestart, MayBeRepeatedByTheSameProcesses) {
  DirectoryStore store;
  std::vector<Process> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&store, rank] {
      int64_t last = 0;
      bool good = true;
      for (int group = 0; group < 4; ++group) { // with goodbyes and without
        const Outcome outcome = tryToMake(store, restarted(rank, 2));
        good = good && outcome.good() && outcome.met.claim.generation > last;
        last = outcome.met.claim.generation;
        if (group % 2 == 0) {
          leave(store, outcome.met.claim);
        }
      }
      return good;
    });
  }
  for (Process& rank : ranks) {
    EXPECT_TRUE(rank.join());
  }
}

} // namespace
} // namespace pycomm
