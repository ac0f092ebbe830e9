#include "transport/rendezvous/store_round.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "transport/memory_store.h"
#include "transport/rendezvous_try.h"

namespace pycomm {
namespace {

using testing::configOf;
using testing::errorOf;
using testing::kNoAbort;
using testing::MemoryStore;
using testing::tryToMeet;

std::string recordOf(int rank) {
  return std::to_string(rank) + std::string(1000, '.');
}

/// A store in which all ranks but those have written.
void fill(MemoryStore& store, int size, const std::set<int>& without) {
  for (int rank = 0; rank < size; ++rank) {
    if (without.count(rank) == 0) {
      store.set("g/member/" + std::to_string(rank), recordOf(rank));
    }
  }
}

std::vector<std::string> gatherAs(MemoryStore& store, int rank, int size, int timeout_ms) {
  const StoreRound round{store, kNoAbort, "g/", rank, size, Deadline::after(timeout_ms), Clock::now()};
  return round.gather(
      "member",
      recordOf(rank),
      [](int other, const std::string& text) { EXPECT_EQ(text, recordOf(other)); },
      [](int other, const std::string&) { return "rank " + std::to_string(other); });
}

TEST(StoreRound, TakesAsManyRanksAsAllowed) {
  MemoryStore store;
  fill(store, kMaxRanks, {0, 5});
  std::thread five([&] { EXPECT_EQ(gatherAs(store, 5, kMaxRanks, 100000).size(), static_cast<size_t>(kMaxRanks)); });
  const std::vector<std::string> texts = gatherAs(store, 0, kMaxRanks, 100000);
  five.join();
  ASSERT_EQ(texts.size(), static_cast<size_t>(kMaxRanks));
  EXPECT_EQ(texts.back(), recordOf(kMaxRanks - 1));
  size_t parts = 0;
  for (const auto& [key, value] : store.values()) {
    EXPECT_LE(value.size(), size_t{1} << 20) << key;
    parts += key.rfind("g/member/all", 0) == 0 ? 1 : 0;
  }
  EXPECT_GE(parts, 64U);
  removeList(store, "g/", "member");
  EXPECT_FALSE(store.has("g/member/all"));
  EXPECT_FALSE(store.has("g/member/all/" + std::to_string(parts - 1)));
}

// Of a thousand ranks one is late: each of the others reads what 33 have written, and not a thousand.
TEST(StoreRound, WaitingRanksReadAFewRecordsEach) {
  MemoryStore store;
  fill(store, 1000, {0, 7});
  const int64_t before = store.calls();
  const ErrorRecord error = errorOf([&] { (void)gatherAs(store, 7, 1000, 300); });
  EXPECT_EQ(error.code, ErrorCode::RendezvousTimeout);
  EXPECT_EQ(error.peer, 0);
  // The timeout's text asks once for each rank.
  EXPECT_LT(store.calls() - before, 1000 + 400);
}

// The three keys of a claim stay although all have left in good order: no call deletes them at once, so a rank of the next life that came in
// between would count from 1 again and find a former life's records and error under that number; and the counter alone, without owner and end,
// does not say that the rank is free.
TEST(StoreRound, WhatAGroupLeavesInTheStoreIsOneClaimPerRankTheFirstRecordAndThatItWasMade) {
  MemoryStore store;
  for (int life = 1; life <= 3; ++life) {
    std::vector<RankClaim> claims(3);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        const auto outcome = tryToMeet(store, configOf(rank, 3));
        EXPECT_TRUE(outcome.good()) << outcome.error.text();
        claims[static_cast<size_t>(rank)] = outcome.met.claim;
      });
    }
    for (std::thread& rank : ranks) {
      rank.join();
    }
    for (const RankClaim& claim : claims) {
      EXPECT_EQ(claim.generation, life);
      EXPECT_TRUE(store.has("pycomm/world/" + std::to_string(life) + "/member/all")); // until the last has read it
      forgetMeeting(store, claim, 3);
    }
    for (const RankClaim& claim : claims) {
      leave(store, claim);
    }
    std::set<std::string> expected;
    for (int rank = 0; rank < 3; ++rank) {
      const std::string of = std::to_string(rank) + "/" + std::to_string(life);
      expected.insert({"pycomm/world/owner/" + of, "pycomm/world/end/" + of});
    }
    for (int before = 1; before <= life; ++before) {
      const std::string generation = "pycomm/world/" + std::to_string(before);
      expected.insert({generation + "/member/0", generation + "/made"});
    }
    std::set<std::string> left;
    for (const auto& [key, value] : store.values()) {
      left.insert(key);
    }
    EXPECT_EQ(left, expected);
  }
}

// However often others try while it has an owner, and are refused.
TEST(StoreRound, ClaimsOfOneRankLeaveTheLast) {
  MemoryStore store;
  const auto claimed = [&] {
    return claimRank(store, "pycomm/world/", 0, {}, Takeover::Never, Deadline::after(100000), kNoAbort);
  };
  for (int life = 1; life <= 20; ++life) {
    const RankClaim claim = claimed();
    EXPECT_EQ(claim.generation, life);
    const std::string owner = "pycomm/world/owner/0/" + std::to_string(claim.number);
    const std::string own = store.get(owner, Deadline::never());
    std::string another = own;
    another.back() = own.back() == '1' ? '2' : '1'; // another process, by its start time
    store.set(owner, another);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(errorOf([&] { (void)claimed(); }).code, ErrorCode::DuplicateRank);
    }
    store.set(owner, own);
    leave(store, claim);
    EXPECT_EQ(store.values().size(), 2U + 3U); // its own two, and how three others ended
  }
}

} // namespace
} // namespace pycomm
