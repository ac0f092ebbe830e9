#include "engine/operation/roster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/rosters.h"

namespace pycomm::testing {
namespace {

using ::testing::ElementsAre;

TEST(Roster, HasWhatTheRendezvousFoundByRank) {
  const Roster roster = rosterOf(2, {"alpha", "beta", "alpha"});
  EXPECT_EQ(roster.identity.rank, 2);
  EXPECT_EQ(roster.identity.size, 3);
  EXPECT_EQ(roster.identity.name, "test");
  EXPECT_EQ(roster.identity.hash, 7U);
  EXPECT_EQ(roster.identity.nonce, 99U);
  EXPECT_EQ(roster.identity.interface_name, "eth0");
  EXPECT_THAT(roster.identity.hosts, ElementsAre("alpha", "beta", "alpha"));
  EXPECT_THAT(roster.watch_names, ElementsAre("watch0", "watch1", "watch2"));
  EXPECT_THAT(roster.remarks, ElementsAre("remark0", "remark1", "remark2"));
  EXPECT_EQ(roster.address_reason, "the test says so");
}

TEST(Roster, RanksOfOneHostAreLocalRanksAndItselfIsOne) {
  const std::vector<std::string> hosts = {"alpha", "beta", "alpha"};
  EXPECT_THAT(rosterOf(0, hosts).localRanks(), ElementsAre(0, 2));
  EXPECT_THAT(rosterOf(1, hosts).localRanks(), ElementsAre(1));
  EXPECT_THAT(rosterOf(2, hosts).localRanks(), ElementsAre(0, 2));
}

// Two machines may have the same name: their identity distinguishes hosts.
TEST(Roster, AHostsNameDoesNotMakeItTheSameHost) {
  Rendezvous met = metOn({"alpha", "alpha"});
  met.members[1].identity.boot_id = "another machine";
  RendezvousConfig config;
  config.rank = 0;
  config.size = 2;
  EXPECT_EQ(Roster(config, met).topology.hosts(), 2);
}

} // namespace
} // namespace pycomm::testing
