// A list of interfaces, on two hosts with two wires between them.
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/ranks.h"
#include "engine/sums.h"
#include "transport/directory_store.h"
#include "transport/process.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/secure/tls_contexts.h"

namespace pycomm::testing {
namespace {

bool shell(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0; // NOLINT: fixed commands of this test
}

bool isolate() {
  return ::unshare(CLONE_NEWNET) == 0 && shell("ip link set lo up");
}

uint64_t bytesSentOn(const std::string& interface) {
  std::FILE* const file = std::fopen("/proc/self/net/dev", "r");
  uint64_t sent = 0;
  std::vector<char> line(512);
  while (file != nullptr && std::fgets(line.data(), static_cast<int>(line.size()), file) != nullptr) {
    const std::string text = line.data();
    const size_t name = text.find(interface + ":");
    unsigned long long nbytes = 0;
    if (name != std::string::npos &&
        std::sscanf( // NOLINT: the kernel's own file
            text.c_str() + name + interface.size() + 1,
            "%*u %*u %*u %*u %*u %*u %*u %*u %llu",
            &nbytes) == 1) {
      sent = nbytes;
    }
  }
  if (file != nullptr) {
    (void)std::fclose(file);
  }
  return sent;
}

/// Sums 1 MiB between two hosts, where this one lists `spec`. `expected`: the interface that carries it.
void sumOverTheFirstOf(
    DirectoryStore& store,
    int rank,
    const std::string& name,
    const std::string& spec,
    const std::string& expected,
    const std::shared_ptr<const Secret>& secret = nullptr) {
  constexpr size_t kNumel = (1 << 20) / sizeof(float);
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
  const std::string other = expected == "wire0" ? "wire1" : "wire0";
  const uint64_t before = bytesSentOn(expected);
  const uint64_t before_on_other = bytesSentOn(other);
  const auto group = Group::join(engine, sealed ? static_cast<Store&>(*sealed) : store, config);
  EXPECT_EQ(group->interfaceName(), expected) << name;
  std::vector<float> values = operandOf(rank, kNumel);
  const auto operation = group->start(allReduceCall(values, Deadline::after(60000)));
  EXPECT_TRUE(operation->wait(Deadline::after(60000)));
  EXPECT_FALSE(operation->error());
  EXPECT_EQ(values, sumOver(2, kNumel));
  EXPECT_GT(bytesSentOn(expected), before + kNumel * sizeof(float) / 2) << name;
  EXPECT_LT(bytesSentOn(other), before_on_other + 10000) << name; // the kernel's own packets
  group->close();
}

TEST(Interfaces, OfAListTheFirstThatIsUpCarriesEverything) {
  if (::geteuid() != 0 || !Process([] { return isolate() && shell("ip link add d0 type veth peer name d9"); }).join()) {
    GTEST_SKIP() << "network namespaces need root, `ip` and veth pairs";
  }
  (void)theSecret(); // the same for both hosts
  DirectoryStore store;
  SharedFlag wired;
  SharedFlag isolated;
  const auto rankOn = [&](int rank) {
    sumOverTheFirstOf(store, rank, "first", "wire0,wire1", "wire0");
    sumOverTheFirstOf(store, rank, "second", "wire1,wire0", "wire1");
    // Hosts may call theirs by different names, and one list then serves both.
    sumOverTheFirstOf(store, rank, "names", rank == 0 ? "eno1,wire1,wire0" : "wire1,eno1", "wire1");
    sumOverTheFirstOf(store, rank, "closed", "wire0,wire1", "wire0", theSecret());
    store.set("ready " + std::to_string(rank), "yes");
    static_cast<void>(store.get("ready " + std::to_string(1 - rank), Deadline::after(60000)));
    EXPECT_TRUE(shell("ip link set wire0 down"));
    sumOverTheFirstOf(store, rank, "down", "wire0,wire1", "wire1");
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
    for (const std::string number : {"0", "1"}) {
      const std::string wire = "wire" + number;
      if (!shell("ip link add " + wire + " type veth peer name " + wire + " netns " + std::to_string(alpha.pid())) ||
          !shell(to_alpha + "ip addr add 10.6" + number + ".0.1/24 dev " + wire) ||
          !shell(to_alpha + "ip link set " + wire + " up") ||
          !shell("ip addr add 10.6" + number + ".0.2/24 dev " + wire) || !shell("ip link set " + wire + " up")) {
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
