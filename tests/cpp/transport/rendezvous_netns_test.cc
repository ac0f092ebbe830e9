// Hosts with several interfaces and a real wire between them, made of network namespaces. Needs root and `ip`; says so
// where it is skipped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "transport/directory_store.h"
#include "transport/error_matchers.h"
#include "transport/net/select_address.h"
#include "transport/net/socket_link.h"
#include "transport/process.h"
#include "transport/rendezvous/rendezvous.h"

namespace pycomm {
namespace {

using testing::DirectoryStore;
using testing::errorOf;
using ::testing::HasSubstr;
using testing::kNoAbort;
using testing::Process;
using testing::SharedFlag;

bool shell(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0; // NOLINT: fixed commands of this test
}

// A namespace of its own for the calling process; it disappears with the last process in it.
bool isolate() {
  return ::unshare(CLONE_NEWNET) == 0 && shell("ip link set lo up");
}

bool canMakeNamespaces() {
  return ::geteuid() == 0 && Process([] { return isolate() && shell("ip link add d0 type veth peer name d9"); }).join();
}

#define SKIP_WITHOUT_NAMESPACES()                                        \
  if (!canMakeNamespaces()) {                                            \
    GTEST_SKIP() << "network namespaces need root, `ip` and veth pairs"; \
  }

TEST(RendezvousNetns, ListsAndChoosesAmongSeveralInterfaces) {
  SKIP_WITHOUT_NAMESPACES();
  EXPECT_TRUE(Process([] {
                if (!isolate() ||
                    !shell(
                        "ip link add d0 type veth peer name d8 && ip link set d8 up && "
                        "ip addr add 10.50.0.1/24 dev d0 && ip addr add fd50::1/64 dev d0 nodad && "
                        "ip link set d0 up && ip link add d1 type veth peer name d9 && "
                        "ip addr add 10.51.0.1/24 dev d1")) {
                  return false;
                }
                const std::string listed = describeInterfaces(listInterfaces());
                EXPECT_THAT(listed, HasSubstr("d0 (10.50.0.1, fd50::1"));
                EXPECT_THAT(listed, HasSubstr("d1 (down, 10.51.0.1)"));
                const HostNetwork network = HostNetwork::ofThisHost();
                AddressPolicy policy;
                policy.store_host = "10.50.0.77";
                EXPECT_EQ(chooseRoute(policy, network).address.ip(), "10.50.0.1");
                policy.store_host = "127.0.1.1";
                EXPECT_TRUE(chooseRoute(policy, network).address.isLoopback());
                policy.store_host = ""; // and no default route: the first that is up
                EXPECT_EQ(chooseRoute(policy, network).interface_name, "d0");
                policy.spec = InterfaceSpec::parse("d1");
                EXPECT_EQ(errorOf([&] { (void)chooseRoute(policy, network); }).code, ErrorCode::NoInterface);
                return !::testing::Test::HasFailure();
              }).join());
}

// Two hosts on a wire. The store's host calls itself 127.0.1.1, as Debian does.
TEST(RendezvousNetns, TwoHostsMeetOverTheWireAndNotOverLoopback) {
  SKIP_WITHOUT_NAMESPACES();
  DirectoryStore store;
  SharedFlag wired;
  SharedFlag isolated;
  const auto rankOn = [&store](int rank, const std::string& store_host) {
    RendezvousConfig config;
    config.rank = rank;
    config.size = 3;
    config.group_name = "world";
    config.store_host = store_host;
    config.deadline = Deadline::after(15000);
    const Rendezvous met = meet(store, config, kNoAbort);
    const std::string expected = rank == 0 ? "10.60.0.1" : "10.60.0.2";
    EXPECT_EQ(met.local_address.ip(), expected);
    EXPECT_EQ(met.members[0].address.ip(), "10.60.0.1");
    EXPECT_EQ(met.members[2].address.ip(), "10.60.0.2");
    EXPECT_NE(met.members[0].identity, met.members[1].identity);
    EXPECT_EQ(met.members[1].identity, met.members[2].identity);
    // Everybody reaches everybody.
    for (const Member& member : met.members) {
      (void)connectSocket(met.local_address, member.address, Deadline::after(10000), kNoAbort);
    }
    // Stay until all have tried.
    store.set("done/" + std::to_string(rank), "1");
    for (int other = 0; other < 3; ++other) {
      (void)store.get("done/" + std::to_string(other), Deadline::after(15000));
    }
    return !::testing::Test::HasFailure();
  };
  Process alpha([&] {
    if (!isolate()) {
      return false;
    }
    isolated.raise();
    return wired.wait() && rankOn(0, "127.0.1.1");
  });
  ASSERT_TRUE(isolated.wait());
  Process beta([&] {
    const std::string to_alpha = "nsenter -t " + std::to_string(alpha.pid()) + " -n ";
    const bool up = isolate() && shell("ip link add w1 type veth peer name w0 netns " + std::to_string(alpha.pid())) &&
        shell(to_alpha + "ip addr add 10.60.0.1/24 dev w0") && shell(to_alpha + "ip link set w0 up") &&
        shell("ip addr add 10.60.0.2/24 dev w1") && shell("ip link set w1 up");
    if (!up) {
      std::fprintf(stderr, "the wire could not be made\n");
      return false;
    }
    Process third([&] { return wired.wait() && rankOn(2, "10.60.0.1"); });
    wired.raise();
    const bool good = rankOn(1, "10.60.0.1");
    return third.join() && good;
  });
  EXPECT_TRUE(beta.join(40000));
  EXPECT_TRUE(alpha.join(40000));
}

TEST(RendezvousNetns, NeverConnectsASocketToItself) {
  SKIP_WITHOUT_NAMESPACES();
  // The only local port there is equals the peer's, where nobody listens: TCP would connect the socket to itself.
  EXPECT_TRUE(Process([] {
                if (!isolate()) {
                  return false;
                }
                std::ofstream("/proc/sys/net/ipv4/ip_local_port_range") << "40001 40001";
                const SocketAddress loopback = SocketAddress::parse("127.0.0.1", 40001);
                const ErrorRecord record =
                    errorOf([&] { (void)connectSocket(loopback, loopback, Deadline::after(200), kNoAbort); });
                EXPECT_EQ(record.code, ErrorCode::ConnectFailed);
                return !::testing::Test::HasFailure();
              }).join());
}

TEST(RendezvousNetns, SaysWhenAHostHasOnlyLoopback) {
  SKIP_WITHOUT_NAMESPACES();
  DirectoryStore store;
  const auto rankAlone = [&store](int rank) {
    if (!isolate()) {
      return false;
    }
    RendezvousConfig config;
    config.rank = rank;
    config.size = 2;
    config.group_name = "world";
    config.deadline = Deadline::after(10000);
    const ErrorRecord record = errorOf([&] { (void)meet(store, config, kNoAbort); });
    EXPECT_EQ(record.code, ErrorCode::NoInterface) << record.text();
    EXPECT_THAT(record.summary, HasSubstr("lo (127.0.0.1"));
    return !::testing::Test::HasFailure();
  };
  Process one([&] { return rankAlone(0); });
  Process two([&] { return rankAlone(1); });
  EXPECT_TRUE(one.join());
  EXPECT_TRUE(two.join());
}

} // namespace
} // namespace pycomm
