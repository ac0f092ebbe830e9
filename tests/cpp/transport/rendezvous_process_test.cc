// Ranks as processes: what counts here is which process holds a rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
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
  (void)store.get("pycomm/world/1/member/1", Deadline::after(10000));
  const pid_t first_pid = first.pid();
  // Twice: a refused attempt must not open the door for the next.
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
  (void)store.get("pycomm/world/1/member/0", Deadline::after(10000));
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
  (void)store.get("pycomm/world/1/member/1", Deadline::after(10000));
  dead.kill();
  (void)dead.join();
  const Outcome outcome = tryToMeet(store, configOf(0, 3, 300));
  EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
  EXPECT_THAT(outcome.error.summary, HasSubstr("missing: 2;"));
}

} // namespace
} // namespace pycomm
