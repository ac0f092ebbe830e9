#include "transport/net/interfaces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "transport/error_matchers.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;

std::vector<Interface> named(const std::vector<std::string>& names) {
  std::vector<Interface> interfaces;
  for (const std::string& name : names) {
    Interface interface;
    interface.name = name;
    interface.up = true;
    interfaces.push_back(interface);
  }
  return interfaces;
}

std::vector<std::string> selected(const std::string& spec, const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (const Interface& interface : InterfaceSpec::parse(spec).select(named(names))) {
    out.push_back(interface.name);
  }
  return out;
}

using Names = std::vector<std::string>;

TEST(ListInterfaces, FindsLoopback) {
  const auto interfaces = listInterfaces();
  const auto lo = std::find_if(interfaces.begin(), interfaces.end(), [](const Interface& i) { return i.name == "lo"; });
  ASSERT_NE(lo, interfaces.end());
  EXPECT_TRUE(lo->loopback);
  const bool listed = std::any_of(lo->addresses.begin(), lo->addresses.end(), [](const SocketAddress& address) {
    return address.ip() == "127.0.0.1" && address.port() == 0;
  });
  EXPECT_TRUE(listed || !lo->up);
  EXPECT_THAT(describeInterfaces(interfaces), HasSubstr("lo ("));
}

TEST(InterfaceSpec, FollowsNcclSyntax) {
  const Names all = {"lo", "docker0", "eth10", "eth1", "eth0", "ib0"};
  EXPECT_EQ(selected("eth", all), (Names{"eth10", "eth1", "eth0"}));
  EXPECT_EQ(selected("eth1", all), (Names{"eth1", "eth10"}));
  EXPECT_EQ(selected("=eth1", all), Names{"eth1"});
  EXPECT_EQ(selected(" ib0 , eth0 ", all), (Names{"ib0", "eth0"}));
  EXPECT_EQ(selected("^docker,lo", all), (Names{"eth10", "eth1", "eth0", "ib0"}));
  EXPECT_EQ(selected("^=eth1", all), (Names{"lo", "docker0", "eth10", "eth0", "ib0"}));
  EXPECT_EQ(selected("^ =eth1,eth0", all), (Names{"lo", "docker0", "eth10", "ib0"}));
  EXPECT_EQ(selected("", all), all);
}

TEST(InterfaceSpec, MatchesByName) {
  EXPECT_TRUE(InterfaceSpec::parse("").matches("anything"));
  EXPECT_TRUE(InterfaceSpec::parse("eth").matches("eth7"));
  EXPECT_FALSE(InterfaceSpec::parse("=eth").matches("eth7"));
  EXPECT_FALSE(InterfaceSpec::parse("^eth").matches("eth7"));
  EXPECT_TRUE(InterfaceSpec::parse("^=eth").matches("eth7"));
  EXPECT_EQ(InterfaceSpec::parse(" ^= a, b ").text(), "^=a,b");
}

TEST(InterfaceSpec, RefusesMarksWithoutNames) {
  for (const char* text : {"^", "=", "^=", "eth0,,eth1", ",", "eth0,", "eth0 eth1", "eth0,^lo", "=^lo"}) {
    EXPECT_EQ(errorOf([&] { (void)InterfaceSpec::parse(text); }).code, ErrorCode::InvalidArgument) << text;
  }
}

TEST(InterfaceSpec, ListsWhatExistsWhenNothingMatches) {
  const ErrorRecord record = errorOf([] { (void)selected("eht0", {"lo", "eth0"}); });
  EXPECT_EQ(record.code, ErrorCode::NoInterface);
  EXPECT_THAT(record.summary, HasSubstr("\"eht0\""));
  EXPECT_THAT(record.summary, HasSubstr("lo (no address), eth0 (no address)"));
  EXPECT_EQ(errorOf([] { (void)selected("^l,e", {"lo", "eth0"}); }).code, ErrorCode::NoInterface);
}

} // namespace
} // namespace pycomm
