#include "engine/operation/roster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/rosters.h"

namespace pycomm::testing {
namespace {

using ::testing::ElementsAre;

TEST(Roster, HasWhatTheRendezvousFoundByRank) {
  const Roster roster = rosterOf(2, {"alpha", "beta", "alpha"}, 4);
  EXPECT_EQ(roster.identity.rank, 2);
  EXPECT_EQ(roster.identity.size, 3);
  EXPECT_EQ(roster.identity.name, "test");
  EXPECT_EQ(roster.identity.hash, 7U);
  EXPECT_EQ(roster.identity.nonce, 99U);
  EXPECT_EQ(roster.identity.interface_name, "eth0");
  EXPECT_EQ(roster.identity.streams, 4);
  EXPECT_THAT(roster.identity.hosts, ElementsAre("alpha", "beta", "alpha"));
  EXPECT_THAT(roster.watch_names, ElementsAre("watch0", "watch1", "watch2"));
  EXPECT_THAT(roster.remarks, ElementsAre("remark0", "remark1", "remark2"));
  EXPECT_EQ(roster.address_reason, "the test says so");
}

TEST(Roster, RanksOfOneHostAreMatesAndItselfIsOne) {
  const std::vector<std::string> hosts = {"alpha", "beta", "alpha"};
  EXPECT_THAT(rosterOf(0, hosts).hostMates(), ElementsAre(0, 2));
  EXPECT_THAT(rosterOf(1, hosts).hostMates(), ElementsAre(1));
  EXPECT_THAT(rosterOf(2, hosts).hostMates(), ElementsAre(0, 2));
}

// Two machines may have the same name: their identity distinguishes hosts.
TEST(Roster, AHostsNameDoesNotMakeItTheSameHost) {
  Rendezvous met = metOn({"alpha", "alpha"});
  met.members[1].identity.boot_id = "another machine";
  RendezvousConfig config;
  config.rank = 0;
  config.size = 2;
  EXPECT_EQ(Roster(config, 1, met).topology.hosts(), 2);
}

TEST(Roster, FurtherInterfacesMultiplyTheStreams) {
  Rendezvous met = metOn({"alpha", "beta"});
  for (Member& member : met.members) {
    member.further.emplace_back();
  }
  Rendezvous::Further further{"eth1", Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), PortRange())};
  const SocketAddress second = further.listener.address();
  met.further.push_back(std::move(further));
  RendezvousConfig config;
  config.rank = 1;
  config.size = 2;
  const Roster roster(config, 3, met);
  EXPECT_EQ(roster.identity.streams, 6);
  ASSERT_EQ(roster.identity.further.size(), 1U);
  EXPECT_EQ(roster.identity.further[0].interface_name, "eth1");
  EXPECT_EQ(roster.identity.further[0].local_address.text(), second.text());
  EXPECT_EQ(roster.identity.further[0].addresses.size(), 2U);
  EXPECT_EQ(roster.identity.interfaceOf(1), "eth1");
}

} // namespace
} // namespace pycomm::testing
