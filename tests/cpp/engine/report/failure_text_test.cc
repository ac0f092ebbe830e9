#include "engine/report/failure_text.h"

#include <gtest/gtest.h>

namespace pycomm {
namespace {

TEST(FailureText, AnUnreachablePeerIsNamedWithAHint) {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 2;
  identity.hosts = {"alpha", "beta"};
  ErrorRecord what;
  what.code = ErrorCode::ConnectFailed;
  what.summary = "no connection to 192.0.2.1:29600";
  what.cause = "ENETUNREACH";
  const ErrorRecord told = peerGone(1, what, identity);
  EXPECT_EQ(told.code, ErrorCode::ConnectFailed);
  EXPECT_EQ(told.peer, 1);
  EXPECT_EQ(told.summary, "Rank 1 on beta cannot be reached: no connection to 192.0.2.1:29600.");
  EXPECT_EQ(told.cause, "ENETUNREACH");
  EXPECT_NE(told.hint.find("python -m pycomm doctor"), std::string::npos) << told.hint;
}

TEST(FailureText, AConnectionThatDoesNotComeUpIsLoggedWithBothEndsAndWhatToTry) {
  GroupIdentity identity;
  identity.rank = 1;
  identity.size = 3;
  identity.name = "g";
  identity.hosts = {"alpha", "beta", "gamma"};
  identity.addresses = {
      SocketAddress::parse("10.0.0.1", 29600),
      SocketAddress::parse("10.0.0.2", 29601),
      SocketAddress::parse("10.0.0.3", 29602)};
  identity.unix_sockets.resize(3);
  EXPECT_EQ(
      stillConnecting(2, identity.addresses[2], 12, "ETIMEDOUT", identity),
      "group g: rank 1 on beta has waited 12 s for its connection to rank 2 on gamma at 10.0.0.3:29602 (ETIMEDOUT): a "
      "firewall may block that port. Try on each host: python -m pycomm doctor");
  EXPECT_EQ(
      stillUnconnected({0}, 70, identity),
      "group g: rank 1 on beta has waited 70 s for rank 0 on alpha to connect to 10.0.0.2:29601: a firewall may block "
      "that port. Try on each host: python -m pycomm doctor");
  EXPECT_NE(stillUnconnected({0, 2}, 70, identity).find("rank 0 on alpha and 1 more to connect"), std::string::npos);
  EXPECT_NE(neverConnected(0, identity).hint.find("python -m pycomm doctor"), std::string::npos);
  identity.unix_sockets[0] = SocketAddress::unixSocket("mate");
  EXPECT_EQ(stillUnconnected({0}, 70, identity).find("doctor"), std::string::npos) << "no firewall is in between";
}

// A cause may come from the store, where another program can write: a rank that does not exist is printed and nothing else.
TEST(FailureText, ARankThatDoesNotExistIsNoIndex) {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 2;
  identity.hosts = {"alpha", "beta"};
  Operation::Request request;
  request.id = {3, 3};
  const Operation operation(std::move(request));
  for (const int peer : {1000000, 2, -7}) {
    ErrorRecord cause;
    cause.code = ErrorCode::PeerDead;
    cause.rank = 1;
    cause.peer = peer;
    const ErrorRecord record = errorOf(operation, cause, identity);
    EXPECT_EQ(record.peer, peer);
    EXPECT_EQ(record.peer_host, "");
    EXPECT_EQ(record.host, "alpha");
  }
}

TEST(FailureText, ARefusalNamesTheRankThatRefused) {
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 2;
  identity.hosts = {"alpha", "beta"};
  ErrorRecord what;
  what.code = ErrorCode::VersionMismatch;
  what.summary = "10.0.0.2:29600 refused a connection: wire version 1 meets version 2";
  const ErrorRecord refused = refusedBy(1, what, identity);
  EXPECT_EQ(refused.peer, 1);
  EXPECT_EQ(refused.peer_host, "beta");
  EXPECT_EQ(
      refused.summary,
      "Rank 1 on beta cannot be reached: 10.0.0.2:29600 refused a connection: wire version 1 meets version 2");
  what.code = ErrorCode::TooManyFiles;
  EXPECT_EQ(refusedBy(1, what, identity).peer, -1) << "that rank has nothing to do with it";
}

} // namespace
} // namespace pycomm
