#include "transport/rendezvous/member_handle.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/frame_header.h"

namespace pycomm {
namespace {

MemberHandle example(const std::string& host = "alpha") {
  MemberHandle handle;
  handle.version = FrameHeader::kVersion;
  handle.incarnation = newProcessId();
  handle.endpoint = newProcessId();
  handle.nonce = 0x0123456789abcdefU;
  handle.key_id = "9f2c11aa";
  handle.host.boot_id = "4f0c";
  handle.host.network_namespace = 4026531840;
  handle.host.hostname = host;
  handle.pid = 77;
  handle.job_rank = 65535;
  handle.unix_socket = "0011223344556677";
  handle.addresses = {SocketAddress::parse("10.0.0.1", 4711), SocketAddress::parse("127.0.0.1", 4712)};
  return handle;
}

ErrorCode codeOf(const std::string& text) {
  try {
    (void)MemberHandle::parse(text);
  } catch (const Error& error) {
    return error.record().code;
  }
  return ErrorCode::Ok;
}

TEST(MemberHandle, IsReadAsItWasWritten) {
  const MemberHandle handle = example();
  const std::string text = handle.text();
  const MemberHandle read = MemberHandle::parse(text);
  EXPECT_EQ(read.text(), text);
  EXPECT_EQ(read.incarnation, handle.incarnation);
  EXPECT_EQ(read.endpoint, handle.endpoint);
  EXPECT_EQ(read.nonce, handle.nonce);
  EXPECT_EQ(read.key_id, handle.key_id);
  EXPECT_EQ(read.host, handle.host);
  EXPECT_EQ(read.job_rank, 65535);
  EXPECT_EQ(read.unix_socket, handle.unix_socket);
  EXPECT_EQ(read.addresses, handle.addresses);
  EXPECT_EQ(read.who(), "host alpha, pid 77");
}

TEST(MemberHandle, IsShortWithAsManyAddressesAsAllowedAndTheLongestHostName) {
  MemberHandle handle = example(std::string(64, 'h'));
  handle.host.boot_id = std::string(36, 'b');
  handle.addresses.assign(
      MemberHandle::kMaxAddresses, SocketAddress::parse("2001:db8:1111:2222:3333:4444:5555:6666", 65535));
  EXPECT_LE(handle.text().size(), MemberHandle::kMaxNbytes);
  EXPECT_EQ(MemberHandle::parse(handle.text()).addresses.size(), MemberHandle::kMaxAddresses);
}

TEST(MemberHandle, PassesOverFieldsOfALaterVersion) {
  const std::string text = example().text();
  EXPECT_EQ(MemberHandle::parse(text + "z=new;yes;").text(), text);
}

TEST(MemberHandle, RefusesWhatNobodyWrote) {
  const std::string text = example().text();
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_EQ(codeOf(text.substr(0, length)), ErrorCode::InvalidArgument) << text.substr(0, length);
  }
  for (const std::string& wrong :
       {text + " ", text + "\n", text + "\xc3\xa4", "gloo:" + text, text + std::string(1024, 'x')}) {
    EXPECT_EQ(codeOf(wrong), ErrorCode::InvalidArgument) << wrong;
  }
  for (const char* rank : {"r=;", "r=-1;", "r=x;", "r=99999999999;"}) {
    EXPECT_EQ(codeOf(text + rank), ErrorCode::InvalidArgument) << rank;
  }
  std::string other = text;
  other.replace(other.find("v=") + 2, 1, "9");
  EXPECT_EQ(codeOf(other), ErrorCode::VersionMismatch);
}

TEST(MemberHandle, TakesAnyBytes) {
  std::mt19937 random(7);
  const std::string text = example().text();
  for (int turn = 0; turn < 20000; ++turn) {
    std::string changed = text;
    for (unsigned change = 0; change < 1 + random() % 3; ++change) {
      changed[8 + random() % (changed.size() - 8)] = static_cast<char>(random() % 256);
    }
    try {
      EXPECT_LE(MemberHandle::parse(changed).text().size(), MemberHandle::kMaxNbytes);
    } catch (const Error& error) {
      EXPECT_TRUE(
          error.record().code == ErrorCode::InvalidArgument || error.record().code == ErrorCode::VersionMismatch);
    }
  }
}

TEST(WaysTo, WithinAHostFirstItsUnixSocketThenLoopback) {
  const MemberHandle handle = example();
  const std::vector<SocketAddress> ways = waysTo(handle, handle.host, true);
  ASSERT_EQ(ways.size(), 3U);
  EXPECT_TRUE(ways[0].isUnix());
  EXPECT_EQ(ways[1].text(), "127.0.0.1:4712");
  EXPECT_EQ(ways[2].text(), "10.0.0.1:4711");
  EXPECT_EQ(waysTo(handle, handle.host, false).size(), 2U);
}

TEST(WaysTo, FromAnotherHostNeverLoopback) {
  const MemberHandle handle = example();
  const std::vector<SocketAddress> ways = waysTo(handle, example("beta").host, true);
  ASSERT_EQ(ways.size(), 1U);
  EXPECT_EQ(ways[0].text(), "10.0.0.1:4711");
}

TEST(RouteHint, IsAnAddressOfTheFirstMemberOnAnotherHost) {
  const std::vector<MemberHandle> members = {example(), example(), example("beta"), example("gamma")};
  EXPECT_EQ(routeHint(members, 0), "10.0.0.1");
  EXPECT_EQ(routeHint({members[0], members[1]}, 1), "");
}

TEST(InstanceOf, NamesTheUuidTheMembersAndTheirOrder) {
  const std::vector<MemberHandle> members = {example(), example("beta")};
  const std::string name = instanceOf(5, members);
  EXPECT_EQ(name.size(), 32U);
  EXPECT_EQ(name, instanceOf(5, members));
  EXPECT_NE(name, instanceOf(6, members));
  EXPECT_NE(name, instanceOf(5, {members[1], members[0]}));
  EXPECT_NE(name, instanceOf(5, {members[0]}));
  EXPECT_NE(name, instanceOf(5, {members[0], example("beta")}));
}

} // namespace
} // namespace pycomm
