#include "engine/report/failure_text.h"

#include <gtest/gtest.h>

#include <new>
#include <utility>
#include <vector>

#include "engine/report/mismatch.h"

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
  identity.unix_sockets[0] = SocketAddress::unixSocket("local peer");
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

// Ranks 2 and 3 of a job as group ranks 0 and 1: no record and no sentence knows those two numbers.
GroupIdentity pairOfFour(int rank) {
  GroupIdentity identity;
  identity.rank = rank;
  identity.size = 2;
  identity.name = "7";
  identity.job = JobRanks({2, 3});
  identity.hosts = {"alpha", "beta"};
  identity.addresses.resize(2);
  identity.unix_sockets.resize(2);
  return identity;
}

Operation messageTo(int peer, bool receives) {
  Operation::Request request;
  request.id = {3, -1};
  request.descriptor.kind = Collective::Send;
  request.receives = receives;
  request.peer = peer;
  return Operation(std::move(request));
}

void expectNumbersOfTheJob(const std::string& text) {
  for (const char* number : {"ank 0", "ank 1", "ank=0", "ank=1", "eer=0", "eer=1", "root 0", "root 1"}) {
    EXPECT_EQ(text.find(number), std::string::npos) << text;
  }
}

TEST(FailureText, RanksHaveTheirNumbersInTheJob) {
  const GroupIdentity here = pairOfFour(0);
  const Operation send = messageTo(1, false);
  ErrorRecord broken;
  broken.code = ErrorCode::ConnectFailed;
  ErrorRecord refusal;
  refusal.code = ErrorCode::VersionMismatch;
  ErrorRecord changed;
  changed.code = ErrorCode::DataCorrupt;
  Descriptor mine;
  mine.kind = Collective::Send;
  mine.root = 1;
  mine.numel = 4;
  Descriptor theirs = mine;
  theirs.numel = 5;
  ErrorRecord no_memory;
  no_memory.code = ErrorCode::OutOfMemory;
  const auto bad_alloc = std::make_exception_ptr(std::bad_alloc());
  const std::vector<std::pair<ErrorRecord, int>> told = {
      {neverConnected(1, here), 3},
      {peerGone(1, ErrorRecord(), here), 3},
      {peerGone(1, broken, here), 3},
      {linkLost(1, ErrorRecord(), here), 3},
      {refusedBy(1, refusal, here), 3},
      {changedOnTheWay(1, changed, here), 3},
      {peerLeftUs(1, send, here), 3},
      {leftInTheMiddle(send, here), 2},
      {inputLate(send, 8, here), 2},
      {recordOfThrown(bad_alloc, here), 2},
      {timedOut(send, 0, 8, 1, std::nullopt, here), 3},
      {timedOut(send, 0, 8, -1, NotEntered{1, "nothing"}, here), 3},
      {unmatched(messageTo(1, true), here), 3},
      {disagreement(here, mine, 1, theirs, {3, -1}), 3},
      {cannotAccept(no_memory, here), 2},
  };
  for (const auto& [record, peer] : told) {
    const std::string text = record.text();
    EXPECT_EQ(record.peer, peer) << text;
    EXPECT_TRUE(record.rank == 2 || record.rank == -1) << text;
    expectNumbersOfTheJob(text);
    // As the other rank reads it: after it has travelled, and in an operation of its own. Nothing is converted twice.
    const GroupIdentity there = pairOfFour(1);
    const auto read = ErrorRecord::deserialize(record.serialize(), there.size, there.job);
    ASSERT_TRUE(read) << text;
    const ErrorRecord adopted = errorOf(messageTo(0, true), *read, there);
    EXPECT_EQ(adopted.peer, peer) << text;
    EXPECT_EQ(adopted.rank, 3) << text;
    if (record.code != ErrorCode::OutOfMemory) { // that has the name of this host
      EXPECT_EQ(adopted.peer_host, peer == 3 ? "beta" : "alpha") << text;
    }
    EXPECT_EQ(adopted.group_ranks, "2, 3");
    expectNumbersOfTheJob(adopted.text());
  }
  for (const std::string& line :
       {stillConnecting(1, here.addresses[1], 12, "", here), stillUnconnected({1}, 70, here)}) {
    EXPECT_NE(line.find("rank 2 on alpha has waited"), std::string::npos) << line;
    EXPECT_NE(line.find("rank 3 on beta"), std::string::npos) << line;
    expectNumbersOfTheJob(line);
  }
  EXPECT_FALSE(ErrorRecord::deserialize(peerGone(0, ErrorRecord(), GroupIdentity()).serialize(), 2, here.job))
      << "rank 0 is not of this group";
}

TEST(FailureText, AMessageIsCalledByItsEnd) {
  const GroupIdentity here = pairOfFour(0);
  Descriptor mine; // that of the sender, which is the other rank
  mine.kind = Collective::Send;
  mine.root = 1;
  mine.numel = 4;
  Descriptor theirs = mine;
  theirs.numel = 5;
  const ErrorRecord record = disagreement(here, mine, 1, theirs, {3, -1});
  EXPECT_EQ(
      record.summary,
      "The ranks disagree about a message: rank 2 (alpha) has recv(uint8 x 4, from rank 3, tag 0), rank 3 (beta) has "
      "send(uint8 x 5, to rank 2, tag 0).");
  EXPECT_EQ(record.op, "recv");
  EXPECT_EQ(errorOf(messageTo(0, false), record, pairOfFour(1)).op, "send") << "the other end";
}

TEST(FailureText, WhoLeavesSinceAnotherGroupHasFailedSaysSo) {
  const GroupIdentity here = pairOfFour(0);
  GroupIdentity left = pairOfFour(1);
  left.name = "8";
  left.job = JobRanks({3, 5});
  const ErrorRecord failure = errorOf(peerGone(0, ErrorRecord(), left), left);
  const ErrorRecord told = leftBecause(peerLeftUs(1, messageTo(1, false), here), failedBeside(failure, pairOfFour(1)));
  EXPECT_EQ(told.peer, 3);
  EXPECT_EQ(
      told.summary.substr(0, told.summary.find(" is gone")),
      "Rank 3 on beta closed its process group while send to rank 3 (tag 0) still needs it, after group '8' of ranks "
      "3, 5 had failed: Rank 3 on alpha");
}

TEST(JobRanks, ListsRunsAndShortensLongLists) {
  EXPECT_EQ(JobRanks().list(), "");
  EXPECT_EQ(JobRanks({1, 2}).list(), "1, 2");
  EXPECT_EQ(JobRanks({0, 1, 2, 3, 8, 10, 11}).list(), "0-3, 8, 10, 11");
  EXPECT_EQ(JobRanks({0, 2, 4, 6, 8, 10, 12, 14, 16, 18}).list(), "0, 2, 4, 6, 8, 10, 12, 14 and 2 more");
}

} // namespace
} // namespace pycomm
