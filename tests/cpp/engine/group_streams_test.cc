// Links of several connections, on one interface and on two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <numeric>
#include <optional>
#include <string>

#include "engine/ranks.h"
#include "engine/sums.h"
#include "transport/directory_store.h"
#include "transport/error_matchers.h"
#include "transport/process.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/secure/tls_contexts.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

void overTcp(Group::Config& config, int streams) {
  config.transport = Transport::Tcp;
  config.streams = streams;
}

TEST(Streams, SumsOfEverySizeManyAtOnce) {
  for (const int streams : {2, 5}) {
    runRanks(3, sumEverySize, [&](Group::Config& config) { overTcp(config, streams); });
  }
}

TEST(Streams, RefusesANumberWithoutMeaning) {
  Engine engine;
  SharedStore store;
  Group::Config config = groupConfig(0, 1);
  config.streams = 17;
  const ErrorRecord record = errorOf([&] { static_cast<void>(Group::join(engine, store, config)); });
  EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
  EXPECT_THAT(record.summary, HasSubstr("17 connections"));
}

// A rank that goes in the middle of a large operation, whose connections end one after the other.
TEST(Streams, ADeathIsAFailureOfThePeer) {
  DirectoryStore store;
  const auto join = [&](Engine& engine, int rank) {
    Group::Config config = groupConfig(rank, 2);
    config.rendezvous.deadline = Deadline::after(30000);
    overTcp(config, 3);
    return Group::join(engine, store, config);
  };
  Process victim([&] {
    Engine engine;
    const auto group = join(engine, 1);
    std::vector<float> values = operandOf(1, 64);
    const auto first = group->start(allReduceCall(values, Deadline::after(60000)));
    EXPECT_TRUE(first->wait(Deadline::after(60000)));
    (void)::pause();
    return false;
  });
  Process survivor([&] {
    Engine engine;
    const auto group = join(engine, 0);
    std::vector<float> values = operandOf(0, 64);
    const auto first = group->start(allReduceCall(values, Deadline::after(60000)));
    EXPECT_TRUE(first->wait(Deadline::after(60000)));
    std::vector<float> large = operandOf(0, 4000000);
    const auto second = group->start(allReduceCall(large, Deadline::after(60000)));
    victim.kill();
    EXPECT_TRUE(second->wait(Deadline::after(30000)));
    const auto error = second->error();
    EXPECT_TRUE(error.has_value());
    if (error) {
      EXPECT_EQ(error->code, ErrorCode::PeerDead) << error->text();
      EXPECT_EQ(error->peer, 1);
    }
    group->close();
    return !::testing::Test::HasFailure();
  });
  EXPECT_TRUE(survivor.join(90000));
}

bool shell(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0; // NOLINT: fixed commands of this test
}

/// Seconds of one all_reduce of 3 MiB between two hosts, over the interfaces that `spec` lists.
double secondsOver(
    DirectoryStore& store,
    int rank,
    const std::string& name,
    const std::string& spec,
    const std::string& expected,
    const std::shared_ptr<const Secret>& secret = nullptr) {
  Engine engine;
  Group::Config config;
  config.security.secret = secret;
  config.rendezvous.rank = rank;
  config.rendezvous.size = 2;
  config.rendezvous.group_name = name;
  config.rendezvous.spec = InterfaceSpec::parse(spec);
  config.rendezvous.deadline = Deadline::after(30000);
  std::optional<SealedStore> sealed;
  if (secret != nullptr) {
    sealed.emplace(store, *secret);
  }
  const auto group = Group::join(engine, sealed ? static_cast<Store&>(*sealed) : store, config);
  std::string interfaces = group->identity().interface_name;
  for (const GroupIdentity::Path& path : group->identity().further) {
    interfaces += "," + path.interface_name;
  }
  EXPECT_EQ(interfaces, expected);
  const size_t numel = (3 << 20) / sizeof(float);
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    std::vector<float> values = operandOf(rank, numel);
    const TimePoint began = Clock::now();
    const auto operation = group->start(allReduceCall(values, Deadline::after(60000)));
    EXPECT_TRUE(operation->wait(Deadline::after(60000)));
    best = std::min(best, std::chrono::duration<double>(Clock::now() - began).count());
    EXPECT_FALSE(operation->error());
    EXPECT_EQ(values, sumOver(2, numel));
  }
  group->close();
  return best;
}

/// One of two wires goes silent between two operations. The ranks reach each other by the other one, and name the silent one at the
/// deadline.
void expectTheSilentInterfaceIsNamed(DirectoryStore& store, int rank) {
  Engine engine;
  Group::Config config;
  config.rendezvous.rank = rank;
  config.rendezvous.size = 2;
  config.rendezvous.group_name = "silent";
  config.rendezvous.spec = InterfaceSpec::parse("wire0,wire1");
  config.rendezvous.deadline = Deadline::after(30000);
  const auto group = Group::join(engine, store, config);
  std::vector<float> values((1 << 20) / sizeof(float), 1.0F);
  const auto warm = group->start(allReduceCall(values, Deadline::after(60000)));
  EXPECT_TRUE(warm->wait(Deadline::after(60000)));
  EXPECT_FALSE(warm->error());
  store.set("warm on " + std::to_string(rank), "yes");
  if (rank == 1) {
    static_cast<void>(store.get("warm on 0", Deadline::after(60000))); // which may need wire1 until then
    EXPECT_TRUE(shell("ip link set wire1 down"));
    store.set("silent", "now");
  }
  static_cast<void>(store.get("silent", Deadline::after(60000)));
  const auto operation = group->start(allReduceCall(values, Deadline::after(2000)));
  EXPECT_TRUE(operation->wait(Deadline::after(60000)));
  const auto error = operation->error();
  EXPECT_TRUE(error);
  if (error) {
    EXPECT_EQ(error->code, ErrorCode::Timeout) << error->text();
    EXPECT_NE(error->summary.find("on interface wire1"), std::string::npos) << error->text();
  }
  group->close();
}

// Two hosts with two wires of 100 Mbit each between them: both together carry nearly twice what one does.
TEST(Streams, TwoInterfacesCarryTwiceTheBytes) {
  const auto isolate = [] { return ::unshare(CLONE_NEWNET) == 0 && shell("ip link set lo up"); };
  const auto allowed = [&] {
    return isolate() && shell("ip link add d0 type veth peer name d9") &&
        shell("tc qdisc add dev d0 root tbf rate 100mbit burst 128kb latency 50ms");
  };
  if (::geteuid() != 0 || !Process(allowed).join()) {
    GTEST_SKIP() << "network namespaces need root, `ip`, `tc` and veth pairs";
  }
  (void)theSecret(); // the same for both hosts
  DirectoryStore store;
  SharedFlag wired;
  SharedFlag isolated;
  const auto rankOn = [&](int rank) {
    double one = 1e9;
    double two = 1e9;
    // The best of a few tries, as either rank has seen it: other work on the machine may slow down any single one.
    bool twice = false;
    for (int attempt = 0; attempt < 6 && !twice; ++attempt) {
      const std::string number = std::to_string(attempt);
      one = std::min(one, secondsOver(store, rank, "one" + number, "wire0", "wire0"));
      two = std::min(two, secondsOver(store, rank, "two" + number, "wire0,wire1", "wire0,wire1"));
      store.set("ratio " + number + " of " + std::to_string(rank), one / two > 1.5 ? "good" : "bad");
      for (const char* each : {"0", "1"}) {
        twice = twice || store.get("ratio " + number + " of " + each, Deadline::after(60000)) == "good";
      }
    }
    // One rank lists an interface that it does not have: all use what every rank has.
    static_cast<void>(secondsOver(store, rank, "uneven", rank == 0 ? "wire0,nothing" : "wire0,wire1", "wire0"));
    static_cast<void>(secondsOver(store, rank, "closed", "wire0,wire1", "wire0,wire1", theSecret()));
    expectTheSilentInterfaceIsNamed(store, rank);
    EXPECT_TRUE(twice) << one << " s over one wire, " << two << " s over two";
    return !::testing::Test::HasFailure();
  };
  Process alpha([&] {
    if (!isolate()) {
      return false;
    }
    isolated.raise();
    return wired.wait() && rankOn(0);
  });
  ASSERT_TRUE(isolated.wait());
  Process beta([&] {
    if (!isolate()) {
      return false;
    }
    const std::string to_alpha = "nsenter -t " + std::to_string(alpha.pid()) + " -n ";
    const std::string bucket = " root tbf rate 100mbit burst 128kb latency 50ms";
    for (const std::string number : {"0", "1"}) {
      const std::string wire = "wire" + number;
      if (!shell("ip link add " + wire + " type veth peer name " + wire + " netns " + std::to_string(alpha.pid())) ||
          !shell(to_alpha + "ip addr add 10.6" + number + ".0.1/24 dev " + wire) ||
          !shell(to_alpha + "ip link set " + wire + " up") ||
          !shell("ip addr add 10.6" + number + ".0.2/24 dev " + wire) || !shell("ip link set " + wire + " up") ||
          !shell(to_alpha + "tc qdisc add dev " + wire + bucket) || !shell("tc qdisc add dev " + wire + bucket)) {
        std::fprintf(stderr, "the wires could not be made\n");
        return false;
      }
    }
    wired.raise();
    return rankOn(1);
  });
  EXPECT_TRUE(beta.join(100000));
  EXPECT_TRUE(alpha.join(100000));
}

} // namespace
} // namespace pycomm::testing
