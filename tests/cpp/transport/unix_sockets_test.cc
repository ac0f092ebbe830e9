// How ranks of one host come to connect by Unix sockets, or do not.
#include "transport/rendezvous/unix_sockets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/socket.h>

#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_point.h"
#include "transport/memory_store.h"
#include "transport/net/socket_link.h"
#include "transport/rendezvous_try.h"

namespace pycomm::testing {
namespace {

std::vector<Outcome> meetOnThisHost(Store& store, int size, const std::vector<bool>& wanted = {}) {
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      RendezvousConfig config = configOf(rank, size);
      config.unix_sockets = wanted.empty() || wanted[static_cast<size_t>(rank)];
      outcomes[static_cast<size_t>(rank)] = tryToMeet(store, config);
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return outcomes;
}

bool isReached(const Rendezvous& met, size_t rank) {
  const SocketAddress& address = met.members[rank].unix_socket;
  return !address.empty() && connectSocket({}, address, Deadline::after(5000), kNoAbort) != nullptr;
}

TEST(UnixSockets, OnOneHostNobodyBindsAPort) {
  MemoryStore store;
  const auto outcomes = meetOnThisHost(store, 4);
  for (size_t rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(outcomes[rank].good()) << outcomes[rank].error.text();
    const Rendezvous& met = outcomes[rank].met;
    EXPECT_FALSE(met.listener);
    EXPECT_TRUE(met.unix_listener);
    EXPECT_EQ(met.local_address.port(), 0);
    EXPECT_TRUE(met.local_address.isLoopback()) << "what it would have been";
    for (size_t other = 0; other < 4; ++other) {
      EXPECT_TRUE(met.members[other].address.empty());
      EXPECT_EQ(isReached(met, other), other != rank);
    }
  }
}

TEST(UnixSockets, AloneListensNowhere) {
  MemoryStore store;
  const auto outcomes = meetOnThisHost(store, 1);
  ASSERT_TRUE(outcomes[0].good());
  EXPECT_FALSE(outcomes[0].met.unix_listener);
  EXPECT_FALSE(outcomes[0].met.listener);
}

// All ranks have ports then, and who reaches a rank by its Unix socket uses that.
TEST(UnixSockets, AllBindPortsIfARankHasNone) {
  for (size_t without = 0; without < 3; ++without) {
    MemoryStore store;
    std::vector<bool> wanted(3, true);
    wanted[without] = false;
    const auto outcomes = meetOnThisHost(store, 3, wanted);
    for (size_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(outcomes[rank].good()) << outcomes[rank].error.text();
      const Rendezvous& met = outcomes[rank].met;
      ASSERT_TRUE(met.listener);
      for (size_t other = 0; other < 3; ++other) {
        EXPECT_EQ(met.members[other].address, outcomes[other].met.listener.address());
        EXPECT_EQ(isReached(met, other), other != rank && other != without && rank != without) << rank << " " << other;
      }
    }
  }
}

// A security module or a user may stand in one direction only: the others learn of it in the store.
TEST(UnixSockets, AllBindPortsIfOneRankDoesNotReachAnother) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  for (const char* spec : {"unix.reach:1:errno=EACCES", "unix.reach:6:errno=ECONNREFUSED"}) {
    MemoryStore store;
    armFaultPoints(spec);
    const auto outcomes = meetOnThisHost(store, 3);
    armFaultPoints("");
    int reached = 0;
    for (size_t rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(outcomes[rank].good()) << outcomes[rank].error.text();
      const Rendezvous& met = outcomes[rank].met;
      EXPECT_TRUE(met.listener) << spec;
      for (size_t other = 0; other < 3; ++other) {
        EXPECT_EQ(met.members[other].address, outcomes[other].met.listener.address());
        reached += isReached(met, other) ? 1 : 0;
      }
    }
    EXPECT_EQ(reached, 5) << spec;
  }
}

TEST(UnixSockets, WhereAProcessMayHaveNoneAllConnectOverTcp) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  MemoryStore store;
  armFaultPoints("listener.bind_unix:1+:errno=EACCES");
  const auto outcomes = meetOnThisHost(store, 2);
  armFaultPoints("");
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.good()) << outcome.error.text();
    EXPECT_TRUE(outcome.met.listener);
    EXPECT_FALSE(outcome.met.unix_listener);
    EXPECT_TRUE(outcome.met.members[0].unix_socket.empty());
  }
}

// The queue of a socket that nobody looks at yet: the ranks themselves fill it if they are many, and any other user can.
TEST(UnixSockets, AFullQueueIsReached) {
  UnixSockets mine(true);
  UnixSockets local_peer(true);
  const SocketAddress endpoint = SocketAddress::unixSocket(local_peer.name());
  int tries = 0;
  for (int error_number = 0; error_number != EAGAIN && tries < 10000; ++tries) {
    const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    error_number = ::connect(socket.get(), endpoint.raw(), endpoint.rawLength()) == 0 ? 0 : errno;
  }
  ASSERT_LT(tries, 10000) << "the queue is never full";
  std::vector<RankRecord> records(2);
  records[0].rank = 0;
  records[1].rank = 1;
  records[1].unix_socket = local_peer.name();
  mine.reach(records, 0);
  EXPECT_TRUE(mine.reachesAll());
}

// Two hosts that the records say are different: nobody even tries.
TEST(UnixSockets, OtherHostsAreNotTried) {
  std::vector<RankRecord> records(3);
  UnixSockets mine(true);
  UnixSockets local_peer(true);
  for (int rank = 0; rank < 3; ++rank) {
    records[static_cast<size_t>(rank)].rank = rank;
    records[static_cast<size_t>(rank)].unix_socket = local_peer.name();
  }
  records[2].identity.boot_id = "another";
  mine.reach(records, 0);
  EXPECT_FALSE(mine.reachesAll());
  EXPECT_TRUE(mine.reached()[0].empty());
  EXPECT_EQ(mine.reached()[1], SocketAddress::unixSocket(local_peer.name()));
  EXPECT_TRUE(mine.reached()[2].empty());
  // What another program wrote into the store is no name of a socket, or of nobody's.
  records[1].unix_socket = std::string(32, 'x');
  mine.reach(records, 0);
  EXPECT_TRUE(mine.reached()[1].empty());
}

} // namespace
} // namespace pycomm::testing
