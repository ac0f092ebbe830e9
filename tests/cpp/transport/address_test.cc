#include "transport/net/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <cstring>
#include <string>

#include "transport/error_matchers.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;

TEST(SocketAddress, ReadsAndWritesBothFamilies) {
  const SocketAddress v4 = SocketAddress::parse("10.0.0.1", 29600);
  EXPECT_EQ(v4.family(), AddressFamily::IPv4);
  EXPECT_EQ(v4.text(), "10.0.0.1:29600");
  const SocketAddress v6 = SocketAddress::parse("[FD00:0::2]", 1);
  EXPECT_EQ(v6.family(), AddressFamily::IPv6);
  EXPECT_EQ(v6.ip(), "fd00::2");
  EXPECT_EQ(v6.text(), "[fd00::2]:1");
  EXPECT_EQ(v6.withPort(65535).port(), 65535);
  EXPECT_EQ(SocketAddress().text(), "(none)");
}

TEST(SocketAddress, KeepsTheScopeForItselfAndNotOnTheWire) {
  const uint32_t lo = ::if_nametoindex("lo");
  if (lo == 0) {
    GTEST_SKIP() << "no interface named lo";
  }
  const SocketAddress address = SocketAddress::parse("fe80::1%lo", 29600);
  EXPECT_EQ(address.scopeId(), lo);
  EXPECT_EQ(address.text(), "[fe80::1%lo]:29600");
  EXPECT_EQ(address.wireText(), "[fe80::1]:29600");
  EXPECT_EQ(SocketAddress::parse("fe80::1%" + std::to_string(lo), 29600), address);
  EXPECT_FALSE(SocketAddress::tryParse("fe80::1%nosuchinterface", 1));
  EXPECT_TRUE(address.sameIp(*SocketAddress::fromWireText(address.wireText())));
}

TEST(SocketAddress, Classifies) {
  EXPECT_TRUE(SocketAddress::parse("127.0.1.1", 0).isLoopback());
  EXPECT_TRUE(SocketAddress::parse("::1", 0).isLoopback());
  EXPECT_FALSE(SocketAddress::parse("128.0.0.1", 0).isLoopback());
  EXPECT_TRUE(SocketAddress::parse("169.254.3.4", 0).isLinkLocal());
  EXPECT_TRUE(SocketAddress::parse("fe80::5", 0).isLinkLocal());
  EXPECT_FALSE(SocketAddress::parse("fd00::5", 0).isLinkLocal());
  EXPECT_TRUE(SocketAddress::parse("0.0.0.0", 0).isUnspecified());
  EXPECT_TRUE(SocketAddress::parse("::", 0).isUnspecified());
}

TEST(SocketAddress, TakesMappedAddressesAsIPv4) {
  EXPECT_EQ(SocketAddress::parse("::ffff:10.0.0.1", 7), SocketAddress::parse("10.0.0.1", 7));
  EXPECT_TRUE(SocketAddress::parse("::ffff:127.0.0.1", 7).isLoopback());
}

TEST(SocketAddress, RefusesWhatIsNoLiteral) {
  for (const char* text : {"", "localhost", "10.0.0", "10.0.0.256", "10.0.0.1 ", "fd00:::1", "[10.0.0.1", "fe80::1%"}) {
    EXPECT_FALSE(SocketAddress::tryParse(text, 1)) << text;
  }
  const ErrorRecord record = errorOf([] { (void)SocketAddress::parse("alpha", 1); });
  EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
  EXPECT_THAT(record.summary, HasSubstr("\"alpha\""));
}

TEST(SocketAddress, ReadsOnlyItsOwnWireText) {
  for (const char* text : {"10.0.0.1:29600", "[fd00::2]:1", "[::1]:65535", "127.0.0.1:0"}) {
    const auto address = SocketAddress::fromWireText(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(address->wireText(), text);
  }
  const std::string zero("10.0.0.1\0:1", 11);
  for (const std::string& text : std::vector<std::string>{
           "",
           ":",
           "10.0.0.1",
           "10.0.0.1:",
           "10.0.0.1:65536",
           "10.0.0.1:-1",
           "10.0.0.1:+1",
           "10.0.0.1: 1",
           "fd00::2:1",
           "[fd00::2]",
           "[10.0.0.1]:1",
           "[fe80::1%lo]:1",
           "host:1",
           std::string(1000, '1') + ":1",
           zero,
           "10.0.0.1:99999999999999999999"}) {
    EXPECT_FALSE(SocketAddress::fromWireText(text)) << text;
  }
}

TEST(SocketAddress, IsEmptyForOtherFamilies) {
  sockaddr other{};
  other.sa_family = AF_NETLINK;
  EXPECT_TRUE(SocketAddress::fromSockaddr(&other, sizeof other).empty());
  EXPECT_TRUE(SocketAddress::fromSockaddr(nullptr, 0).empty());
  other.sa_family = AF_INET6;
  EXPECT_TRUE(SocketAddress::fromSockaddr(&other, 4).empty());
}

TEST(Resolve, FindsLiteralsAndLocalhost) {
  EXPECT_EQ(resolve("10.0.0.1", 5).at(0).text(), "10.0.0.1:5");
  const auto found = resolve("localhost", 7, AddressFamily::IPv4);
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0].text(), "127.0.0.1:7");
}

TEST(Resolve, NamesTheHostItCannotFind) {
  const ErrorRecord record = errorOf([] { (void)resolve("no-such-host.invalid", 1); });
  EXPECT_EQ(record.code, ErrorCode::ConnectFailed);
  EXPECT_THAT(record.summary, HasSubstr("no-such-host.invalid"));
  EXPECT_FALSE(record.cause.empty());
  EXPECT_THAT(
      errorOf([] { (void)resolve("10.0.0.1", 1, AddressFamily::IPv6); }).summary, HasSubstr("has no IPv6 address"));
}

TEST(SocketAddress, HasNamesOfUnixSocketsToo) {
  const SocketAddress one = SocketAddress::unixSocket("4f0c");
  EXPECT_TRUE(one.isUnix());
  EXPECT_FALSE(one.empty());
  EXPECT_EQ(one.text(), "unix:pycomm/4f0c");
  EXPECT_EQ(one.port(), 0);
  EXPECT_EQ(one.withPort(7), one);
  EXPECT_FALSE(one.isLoopback() || one.isLinkLocal() || one.isUnspecified());
  EXPECT_EQ(SocketAddress::fromSockaddr(one.raw(), one.rawLength()), one);
  EXPECT_NE(SocketAddress::unixSocket("4f0d"), one);
  EXPECT_NE(SocketAddress::parse("10.0.0.1", 1), one);
  EXPECT_EQ(SocketAddress::unixSocket(std::string(kMaxUnixName, 'x')).text(), "unix:pycomm/" + std::string(64, 'x'));
  // A socket that is bound to no name, or to a file.
  sockaddr_un other{};
  other.sun_family = AF_UNIX;
  EXPECT_EQ(
      SocketAddress::fromSockaddr(reinterpret_cast<const sockaddr*>(&other), sizeof other.sun_family).text(), "unix");
  std::strcpy(other.sun_path, "/tmp/file");
  EXPECT_EQ(SocketAddress::fromSockaddr(reinterpret_cast<const sockaddr*>(&other), sizeof other).text(), "unix");
  for (const std::string& bad : {std::string(), std::string(kMaxUnixName + 1, 'x'), std::string("a\0b", 3)}) {
    EXPECT_EQ(errorOf([&] { (void)SocketAddress::unixSocket(bad); }).code, ErrorCode::InvalidArgument);
  }
  // It is no text for other hosts.
  EXPECT_FALSE(SocketAddress::fromWireText(one.text()));
  EXPECT_NE(randomUnixName(), randomUnixName());
}

} // namespace
} // namespace pycomm
