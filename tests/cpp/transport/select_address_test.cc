#include "transport/net/select_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "transport/error_matchers.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;

SocketAddress at(const std::string& ip) {
  return SocketAddress::parse(ip, 0);
}

Interface interface(const std::string& name, const std::vector<std::string>& addresses, bool up = true) {
  Interface result;
  result.name = name;
  result.up = up;
  result.loopback = name == "lo";
  for (const std::string& address : addresses) {
    result.addresses.push_back(at(address));
  }
  return result;
}

// A host as a test describes it: its interfaces, what its names mean, and by prefix of the destination's text which
// source address the kernel would take ("" is the default route).
HostNetwork host(
    const std::vector<Interface>& interfaces,
    const std::map<std::string, std::string>& routes,
    const std::map<std::string, std::vector<std::string>>& names = {}) {
  HostNetwork network;
  network.interfaces = interfaces;
  network.sourceTo = [routes](const SocketAddress& destination) -> std::optional<SocketAddress> {
    if (destination.isLoopback()) {
      return destination.family() == AddressFamily::IPv4 ? at("127.0.0.1") : at("::1");
    }
    std::optional<SocketAddress> best;
    size_t length = 0;
    for (const auto& [prefix, source] : routes) {
      if (destination.ip().rfind(prefix, 0) == 0 && (!best || prefix.size() > length) &&
          at(source).family() == destination.family()) {
        best = at(source);
        length = prefix.size();
      }
    }
    return best;
  };
  network.lookUp = [names](const std::string& name) {
    std::vector<SocketAddress> found;
    const auto literal = SocketAddress::tryParse(name, 0);
    if (literal) {
      found.push_back(*literal);
    } else if (names.count(name) != 0) {
      for (const std::string& address : names.at(name)) {
        found.push_back(at(address));
      }
    }
    return found;
  };
  return network;
}

AddressPolicy policy(const std::string& store_host, const std::string& spec = "", AddressFamily family = {}) {
  AddressPolicy result;
  result.store_host = store_host;
  result.spec = InterfaceSpec::parse(spec);
  result.family = family;
  return result;
}

RankRoute on(const std::string& hostname, const std::string& route) {
  RankRoute result;
  result.identity.boot_id = hostname;
  result.identity.hostname = hostname;
  result.route = at(route);
  return result;
}

// alpha runs the store; Debian maps its own name to 127.0.1.1. docker0 comes first in the kernel's list.
const std::vector<Interface> kAlphaInterfaces = {
    interface("lo", {"127.0.0.1", "::1"}),
    interface("docker0", {"172.17.0.1"}),
    interface("eth0", {"192.168.1.1", "fe80::1"}),
    interface("eth1", {"10.0.0.1", "fd00::1", "fe80::2"}),
    interface("eth2", {"10.9.0.1"}, false),
    interface("v6only", {"fe80::3", "fd01::1"}),
    interface("linklocal", {"fe80::4"}),
};
const std::map<std::string, std::string> kAlphaRoutes = {
    {"", "192.168.1.1"},
    {"10.0.", "10.0.0.1"},
    {"fd00", "fd00::1"},
    {"172.17.", "172.17.0.1"}};
const HostNetwork kAlpha =
    host(kAlphaInterfaces, kAlphaRoutes, {{"alpha", {"127.0.1.1"}}, {"alpha-data", {"10.0.0.1"}}});
const std::vector<RankRoute> kTwoHosts = {on("alpha", "127.0.0.1"), on("beta", "10.0.0.2"), on("beta", "10.0.0.2")};

TEST(ChooseRoute, TakesTheWayToTheStore) {
  const AddressChoice choice = chooseRoute(policy("10.0.0.7"), kAlpha);
  EXPECT_EQ(choice.address.ip(), "10.0.0.1");
  EXPECT_EQ(choice.interface_name, "eth1");
  EXPECT_EQ(choice.why, "route to the store's host 10.0.0.7");
  EXPECT_EQ(chooseRoute(policy("8.8.8.8"), kAlpha).interface_name, "eth0");
}

TEST(ChooseRoute, IsLoopbackOnTheStoresHostUnlessItsNameTellsMore) {
  EXPECT_TRUE(chooseRoute(policy("alpha"), kAlpha).address.isLoopback());
  EXPECT_EQ(chooseRoute(policy("alpha"), kAlpha).why, "the store is on this host");
  EXPECT_TRUE(chooseRoute(policy("127.0.0.1"), kAlpha).address.isLoopback());
  EXPECT_EQ(chooseRoute(policy("10.0.0.1"), kAlpha).address.ip(), "10.0.0.1");
  EXPECT_EQ(chooseRoute(policy("alpha-data"), kAlpha).address.ip(), "10.0.0.1");
}

TEST(ChooseRoute, TakesARoutableAddressOnLoopbacksInterface) {
  const HostNetwork routed = host({interface("lo", {"127.0.0.1", "10.7.0.1"})}, {{"", "10.7.0.1"}});
  EXPECT_EQ(chooseRoute(policy("10.7.0.9"), routed).address.ip(), "10.7.0.1");
}

TEST(ChooseRoute, TakesTheDefaultRouteForAFileStore) {
  const AddressChoice choice = chooseRoute(policy(""), kAlpha);
  EXPECT_EQ(choice.address.ip(), "192.168.1.1");
  EXPECT_EQ(choice.why, "default route");
  EXPECT_EQ(chooseRoute(policy("unknown-name"), kAlpha).address.ip(), "192.168.1.1");
}

TEST(ChooseRoute, PassesOverBridgesWhereThereIsNoRoute) {
  const HostNetwork island = host(kAlphaInterfaces, {});
  EXPECT_EQ(chooseRoute(policy(""), island).interface_name, "eth0");
  const HostNetwork only_docker = host({interface("lo", {"127.0.0.1"}), interface("docker0", {"172.17.0.1"})}, {});
  EXPECT_EQ(chooseRoute(policy(""), only_docker).interface_name, "docker0");
}

TEST(ChooseRoute, ObeysTheSpec) {
  EXPECT_EQ(chooseRoute(policy("10.0.0.7", "eth0"), kAlpha).address.ip(), "192.168.1.1");
  EXPECT_EQ(chooseRoute(policy("10.0.0.7", "eth"), kAlpha).address.ip(), "192.168.1.1");
  EXPECT_EQ(chooseRoute(policy("10.0.0.7", "eth1", AddressFamily::IPv6), kAlpha).address.ip(), "fd00::1");
  EXPECT_EQ(chooseRoute(policy("10.0.0.7", "v6only"), kAlpha).address.ip(), "fd01::1");
  EXPECT_EQ(chooseRoute(policy("10.0.0.7", "linklocal"), kAlpha).address.ip(), "fe80::4");
  EXPECT_EQ(chooseRoute(policy("10.0.0.7", "linklocal,v6only"), kAlpha).address.ip(), "fd01::1");
  EXPECT_EQ(chooseRoute(policy("10.0.0.7", "^eth1"), kAlpha).address.ip(), "192.168.1.1");
  EXPECT_EQ(chooseRoute(policy("127.0.0.1", "lo"), kAlpha).address.ip(), "127.0.0.1");
}

TEST(ChooseRoute, OfAListTakesTheFirstThatIsUpAndHasTheFamily) {
  const auto chosen = [](const std::string& spec, AddressFamily family = AddressFamily::Any) {
    return chooseRoute(policy("10.0.0.7", spec, family), kAlpha);
  };
  EXPECT_EQ(chosen("eth1,eth0").interface_name, "eth1");
  EXPECT_EQ(chosen("eth0,eth1").interface_name, "eth0");
  EXPECT_EQ(chosen("eno1,eth1,eth0").interface_name, "eth1"); // this host has no eno1
  EXPECT_EQ(chosen("eth2,eth1").interface_name, "eth1"); // eth2 is down
  EXPECT_EQ(chosen("docker0,eth1", AddressFamily::IPv6).interface_name, "eth1"); // docker0 has no such address
  EXPECT_EQ(chosen("=eth2,eth0").why, "the first of \"=eth2,eth0\" that is up");
  EXPECT_EQ(chosen("eth1").why, "chosen by \"eth1\"");
  const ErrorRecord none = errorOf([&] { (void)chosen("eth2,eno1"); });
  EXPECT_EQ(none.code, ErrorCode::NoInterface);
  EXPECT_THAT(none.summary, HasSubstr("no interface matching \"eth2,eno1\" is up"));
}

TEST(ChooseRoute, SaysWhyASpecCannotBeObeyed) {
  const ErrorRecord unknown = errorOf([] { (void)chooseRoute(policy("10.0.0.7", "eno1"), kAlpha); });
  EXPECT_EQ(unknown.code, ErrorCode::NoInterface);
  EXPECT_THAT(unknown.summary, HasSubstr("eth1 (10.0.0.1, fd00::1, fe80::2)"));
  const ErrorRecord down = errorOf([] { (void)chooseRoute(policy("10.0.0.7", "eth2"), kAlpha); });
  EXPECT_EQ(down.code, ErrorCode::NoInterface);
  EXPECT_THAT(down.summary, HasSubstr("eth2 (down, 10.9.0.1)"));
  const ErrorRecord family =
      errorOf([] { (void)chooseRoute(policy("10.0.0.7", "docker0", AddressFamily::IPv6), kAlpha); });
  EXPECT_EQ(family.code, ErrorCode::NoInterface);
  EXPECT_THAT(family.summary, HasSubstr("with an IPv6 address"));
  EXPECT_THAT(family.hint, HasSubstr("PYCOMM_SOCKET_IFNAME"));
}

TEST(ChooseRoute, SaysThatTheWholeNetworkIsDown) {
  const HostNetwork down = host({interface("lo", {}, false)}, {});
  const ErrorRecord record = errorOf([&] { (void)chooseRoute(policy(""), down); });
  EXPECT_EQ(record.code, ErrorCode::NoInterface);
  EXPECT_THAT(record.summary, HasSubstr("lo (down)"));
  EXPECT_THAT(record.hint, HasSubstr("ip link set lo up"));
}

TEST(ChooseAddress, OnOneHostIsLoopback) {
  const std::vector<RankRoute> alone = {on("alpha", "127.0.0.1"), on("alpha", "127.0.0.1")};
  EXPECT_EQ(chooseAddress(policy("alpha"), kAlpha, alone, 0).address.ip(), "127.0.0.1");
  EXPECT_EQ(chooseAddress(policy("alpha", "", AddressFamily::IPv6), kAlpha, alone, 0).address.ip(), "::1");
  const std::vector<RankRoute> by_address = {on("alpha", "10.0.0.1"), on("alpha", "10.0.0.1")};
  EXPECT_EQ(chooseAddress(policy("10.0.0.1"), kAlpha, by_address, 1).interface_name, "lo");
  EXPECT_EQ(chooseAddress(policy("10.0.0.1", "eth1"), kAlpha, by_address, 1).interface_name, "eth1");
  EXPECT_EQ(chooseAddress(policy("10.0.0.1", "^lo"), kAlpha, by_address, 1).interface_name, "eth1");
}

TEST(ChooseAddress, OnTheStoresHostFollowsTheOtherHosts) {
  const AddressChoice choice = chooseAddress(policy("alpha"), kAlpha, kTwoHosts, 0);
  EXPECT_EQ(choice.address.ip(), "10.0.0.1");
  EXPECT_EQ(choice.why, "route to rank 1 at 10.0.0.2");
  std::vector<RankRoute> of_a_job = kTwoHosts;
  of_a_job[1].job_rank = 7;
  EXPECT_EQ(chooseAddress(policy("alpha"), kAlpha, of_a_job, 0).why, "route to rank 7 at 10.0.0.2");
}

TEST(ChooseAddress, NeverIsLoopbackBetweenHosts) {
  const std::vector<RankRoute> nobody_knows = {on("alpha", "127.0.0.1"), on("beta", "127.0.0.1")};
  EXPECT_EQ(chooseAddress(policy("alpha"), kAlpha, nobody_knows, 0).address.ip(), "192.168.1.1");
  EXPECT_EQ(
      errorOf([&] { (void)chooseAddress(policy("alpha", "lo"), kAlpha, kTwoHosts, 0); }).code, ErrorCode::NoInterface);
  const HostNetwork only_lo = host({interface("lo", {"127.0.0.1"})}, {}, {{"alpha", {"127.0.1.1"}}});
  const ErrorRecord record = errorOf([&] { (void)chooseAddress(policy("alpha"), only_lo, kTwoHosts, 0); });
  EXPECT_EQ(record.code, ErrorCode::NoInterface);
  EXPECT_THAT(record.summary, HasSubstr("lo (127.0.0.1)"));
}

TEST(ChooseAddress, TakesClonedMachinesForTwo) {
  // Same boot id, namespace and name, but not the same address on the way to the store.
  EXPECT_FALSE(onOneHost({on("clone", "10.0.0.1"), on("clone", "10.0.0.2")}));
  EXPECT_TRUE(onOneHost({on("clone", "10.0.0.1"), on("clone", "10.0.0.1")}));
}

TEST(ChooseAddress, SpeaksTheFamilyOfTheFirstRoutableRank) {
  const std::vector<RankRoute> v6_peers = {on("beta", "fd00::2"), on("alpha", "10.0.0.1")};
  EXPECT_EQ(chooseAddress(policy("10.0.0.7", "eth1"), kAlpha, v6_peers, 1).address.ip(), "fd00::1");
  const std::vector<RankRoute> unreachable = {on("beta", "fd00::2"), on("alpha", "192.168.1.1")};
  EXPECT_EQ(chooseAddress(policy("10.0.0.7", "eth0"), kAlpha, unreachable, 1).address.ip(), "192.168.1.1");
}

TEST(HostNetwork, AsksTheKernelForRoutes) {
  const HostNetwork network = HostNetwork::ofThisHost();
  const auto source = network.sourceTo(at("127.0.0.1"));
  ASSERT_TRUE(source);
  EXPECT_EQ(source->ip(), "127.0.0.1");
  EXPECT_TRUE(network.lookUp("no-such-host.invalid").empty());
  EXPECT_FALSE(chooseRoute(policy("localhost"), network).interface_name.empty());
}

} // namespace
} // namespace pycomm
