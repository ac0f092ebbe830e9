// Groups with a secret: their connections are in TLS, or they do not form.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_point.h"
#include "base/log.h"
#include "engine/links/connector.h"
#include "engine/ranks.h"
#include "engine/sums.h"
#include "transport/error_matchers.h"
#include "transport/secure/tls_contexts.h"
#include "within.h"

namespace pycomm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void withSecret(Group::Config& config, Transport transport = Transport::Tcp) {
  config.transport = transport;
  config.security.secret = theSecret();
  config.security.secret_origin = "the test";
}

TEST(GroupSecret, SumsOfEverySize) {
  runRanks(3, sumEverySize, [](Group::Config& config) { withSecret(config); });
}

// The bytes go through memory, and the bells of the links through Unix sockets.
TEST(GroupSecret, RanksOfOneHostShareMemory) {
  runRanks(
      3,
      [](Rank& self) {
        EXPECT_TRUE(self.group.sharesMemory());
        sumEverySize(self);
      },
      [](Group::Config& config) { withSecret(config, Transport::Auto); });
}

/// What happens on each of two ranks that want to meet.
std::vector<ErrorRecord> meeting(const std::function<void(Group::Config&, int rank)>& adjust) {
  SharedStore store;
  std::vector<ErrorRecord> records(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Engine engine;
      Group::Config config = groupConfig(rank, 2);
      config.transport = Transport::Tcp;
      adjust(config, rank);
      std::optional<SealedStore> sealed;
      if (config.security.secret != nullptr) {
        sealed.emplace(store, *config.security.secret);
      }
      records[static_cast<size_t>(rank)].code = ErrorCode::Ok;
      try {
        Group::join(engine, sealed ? static_cast<Store&>(*sealed) : store, config)->close();
      } catch (const Error& error) {
        records[static_cast<size_t>(rank)] = error.record();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return records;
}

TEST(GroupSecret, ARankWithoutASecretIsNamedInTheFirstRound) {
  for (const int without : {0, 1}) {
    const auto records = meeting([&](Group::Config& config, int rank) {
      if (rank != without) {
        withSecret(config);
      }
    });
    for (const ErrorRecord& record : records) {
      EXPECT_EQ(record.code, ErrorCode::ConfigMismatch) << record.text();
      EXPECT_STREQ(record.phase.text(), "rendezvous");
      EXPECT_THAT(record.summary, HasSubstr(theSecret()->keyId()));
      EXPECT_THAT(record.hint, HasSubstr("secret file"));
      EXPECT_WITHIN_MS(record.elapsed_ms, 5000);
    }
  }
}

TEST(GroupSecret, AnotherSecretIsNamedInTheFirstRound) {
  const auto other = std::make_shared<const Secret>(Secret::generate());
  const auto records = meeting([&](Group::Config& config, int rank) {
    withSecret(config);
    config.security.secret = rank == 0 ? theSecret() : other;
  });
  for (const ErrorRecord& record : records) {
    EXPECT_EQ(record.code, ErrorCode::ConfigMismatch) << record.text();
    EXPECT_THAT(record.summary, AllOf(HasSubstr(theSecret()->keyId()), HasSubstr(other->keyId())));
  }
}

TEST(GroupSecret, OffWithASecretIsAnError) {
  const auto records = meeting([](Group::Config& config, int) {
    withSecret(config);
    config.security.policy = SecurityPolicy::Off;
  });
  for (const ErrorRecord& record : records) {
    EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
    EXPECT_THAT(record.summary, HasSubstr("there is a secret (the test) and PYCOMM_SECURITY=off"));
  }
}

TEST(GroupSecret, NeedsAStoreWithSeals) {
  Engine engine;
  SharedStore store;
  Group::Config config = groupConfig(0, 1);
  withSecret(config);
  EXPECT_EQ(errorOf([&] { (void)Group::join(engine, store, config); }).code, ErrorCode::Internal);
}

/// A roster of ranks on so many hosts.
Roster rosterOn(int hosts) {
  RendezvousConfig config;
  config.rank = 0;
  config.size = hosts;
  config.group_name = "g";
  Rendezvous met;
  for (int rank = 0; rank < hosts; ++rank) {
    Member member;
    member.rank = rank;
    member.identity.boot_id = "boot" + std::to_string(rank);
    met.members.push_back(member);
  }
  return Roster(config, met);
}

// A process that reads the store knows the nonce and the transcript.
TEST(GroupSecret, TheKeyOfSharedMemoryNeedsTheSecret) {
  const auto keyFor = [](const std::shared_ptr<const Secret>& secret, const std::string& transcript) {
    Roster roster = rosterOn(1);
    roster.identity.nonce = 77;
    Security security;
    security.secret = secret;
    security.finish(roster, transcript, newContext(secret));
    EXPECT_NE(roster.identity.unix_nonce, roster.identity.memory_key.high);
    EXPECT_NE(roster.identity.unix_nonce, roster.identity.memory_key.low);
    return roster.identity.memory_key;
  };
  const MemoryKey key = keyFor(theSecret(), "transcript");
  EXPECT_TRUE(key == keyFor(theSecret(), "transcript"));
  const auto other = std::make_shared<const Secret>(Secret::generate());
  for (const MemoryKey& another : {keyFor(other, "transcript"), keyFor(theSecret(), "another"), MemoryKey{0, 77}}) {
    EXPECT_NE(another.high, key.high);
    EXPECT_NE(another.low, key.low);
  }
}

TEST(GroupSecret, RequireWithoutASecretIsAnErrorIfHostsDiffer) {
  Security security;
  for (const SecurityPolicy policy : {SecurityPolicy::Off, SecurityPolicy::Auto, SecurityPolicy::Require}) {
    security.policy = policy;
    EXPECT_EQ(security.open(SharedStore()), nullptr);
    security.checkHosts(rosterOn(1));
  }
  const ErrorRecord record = errorOf([&] { security.checkHosts(rosterOn(2)); });
  EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
  EXPECT_THAT(record.summary, HasSubstr("PYCOMM_SECURITY=require, but the ranks of group g are on 2 hosts"));
  EXPECT_THAT(record.hint, HasSubstr("python -m pycomm secret --generate"));
  security.secret = theSecret();
  security.checkHosts(rosterOn(2));
}

TEST(GroupSecret, ASecretInTheEnvironmentIsOneWarningIfHostsDiffer) {
  static std::atomic<int> warnings{0};
  setLogSink(
      [](LogLevel, const char* line) {
        warnings += std::strstr(line, "the secret is in the environment") != nullptr ? 1 : 0;
      },
      LogLevel::Warn);
  Security security;
  security.secret = theSecret();
  security.secret_origin = "/home/me/.config/pycomm/secret";
  security.checkHosts(rosterOn(2));
  security.secret_origin = "PYCOMM_SECRET";
  security.checkHosts(rosterOn(1));
  EXPECT_EQ(warnings, 0);
  security.checkHosts(rosterOn(2));
  security.checkHosts(rosterOn(2));
  EXPECT_EQ(warnings, 1) << "once in a process";
  setLogSink(nullptr, LogLevel::Warn);
}

// ---- Unix sockets within a host

/// The TCP ports on which this process listens.
size_t listeningPorts() {
  std::set<std::string> inodes;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone; // the directory's own descriptor, at the end
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.rfind("socket:[", 0) == 0) {
      inodes.insert(target.substr(8, target.size() - 9));
    }
  }
  size_t count = 0;
  for (const char* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream table(path);
    for (std::string line; std::getline(table, line);) {
      std::istringstream fields(line);
      const std::vector<std::string> words{std::istream_iterator<std::string>(fields), {}};
      count += words.size() > 9 && words[3] == "0A" && inodes.count(words[9]) != 0 ? 1 : 0; // 0A: LISTEN
    }
  }
  return count;
}

TEST(GroupUnixSockets, AGroupOfOneHostListensOnNoPort) {
  for (const bool secret : {false, true}) {
    std::atomic<size_t> ports{0};
    const auto adjust = [&](Transport transport) {
      return [=](Group::Config& config) {
        if (secret) {
          withSecret(config);
        }
        config.transport = transport;
      };
    };
    const auto look = [&](Rank& self) {
      sumEverySize(self);
      ports = std::max(ports.load(), listeningPorts());
    };
    runRanks(3, look, adjust(Transport::Auto));
    EXPECT_EQ(ports, 0U);
    runRanks(3, look, adjust(Transport::Tcp));
    EXPECT_GT(ports, 0U) << "it does not see them";
  }
}

// Ranks send messages over them where there is no shared memory.
TEST(GroupUnixSockets, SumsOfEverySizeGoOverThem) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  armFaultPoints("arena.create:1+:errno=EMFILE");
  runRanks(
      3,
      [](Rank& self) {
        EXPECT_FALSE(self.group.sharesMemory());
        EXPECT_FALSE(self.group.identity().hasPorts());
        sumEverySize(self);
      },
      [](Group::Config& config) { withSecret(config, Transport::Auto); });
  armFaultPoints("");
}

// One rank does not reach another: that pair has a TCP connection in one direction at least, and all have ports.
TEST(GroupUnixSockets, AGroupMayHaveSomeOfThemAndTcp) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  for (const bool shared : {true, false}) {
    armFaultPoints(std::string("unix.reach:2:errno=EACCES") + (shared ? "" : ",arena.create:1+:errno=EMFILE"));
    std::atomic<int> reached{0};
    runRanks(
        3,
        [&](Rank& self) {
          EXPECT_TRUE(self.group.identity().hasPorts());
          for (const SocketAddress& address : self.group.identity().unix_sockets) {
            reached += address.empty() ? 0 : 1;
          }
          sumEverySize(self);
        },
        [&](Group::Config& config) { withSecret(config, Transport::Auto); });
    armFaultPoints("");
    EXPECT_EQ(reached, 5);
  }
}

// Memory is shared although no Unix socket can be had for links: the bells are in TLS then.
TEST(GroupUnixSockets, BellsRingOverTcpWithoutThem) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  armFaultPoints("listener.bind_unix:1+:errno=EACCES");
  runRanks(
      3,
      [](Rank& self) {
        EXPECT_TRUE(self.group.sharesMemory());
        for (const SocketAddress& address : self.group.identity().unix_sockets) {
          EXPECT_TRUE(address.empty());
        }
        std::vector<float> values(100000, 1.0F);
        Group::Call call = allReduceCall(values);
        call.schedule.algorithm = Algorithm::Ring; // over links
        const auto operation = self.group.start(std::move(call));
        ASSERT_TRUE(self.group.wait(*operation, Deadline::after(20000)));
        ASSERT_FALSE(operation->error()) << operation->error()->text();
        EXPECT_EQ(values[7], 3.0F);
        EXPECT_GT(self.group.usage().shared_links, 0U);
        sumEverySize(self);
      },
      [](Group::Config& config) { withSecret(config, Transport::Auto); });
  armFaultPoints("");
}

// A process that reads the store knows the nonce of the job, and as the same user it reaches the socket. Without the secret it is refused.
TEST(GroupUnixSockets, WithASecretTheirNonceIsNotInTheStore) {
  runRanks(
      2,
      [](Rank& self) {
        const GroupIdentity& identity = self.group.identity();
        EXPECT_NE(identity.unix_nonce, identity.nonce);
        EXPECT_NE(identity.nonce, identity.memory_key.low);
        EXPECT_NE(0U, identity.memory_key.high);
        if (self.rank == 0) {
          GroupIdentity stranger = identity;
          stranger.unix_nonce = identity.nonce;
          const auto link = Connector(stranger).startBulk(1);
          const ErrorRecord record = errorOf([&] { (void)waitConnected(*link, Deadline::after(5000), kNoAbort); });
          EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
          EXPECT_THAT(record.summary, HasSubstr("another pycomm job or group"));
        }
        sumEverySize(self); // and rank 1 is there until then
      },
      [](Group::Config& config) { withSecret(config, Transport::Auto); });
}

// One rank that is not reached must end all: none may be left with an open port, waiting.
TEST(GroupUnixSockets, RequireWithoutASecretEndsOnAllRanksIfOneIsNotReached) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  armFaultPoints("unix.reach:1:errno=EACCES");
  const auto records = meeting([](Group::Config& config, int) {
    config.transport = Transport::Auto;
    config.security.policy = SecurityPolicy::Require;
  });
  armFaultPoints("");
  for (const ErrorRecord& record : records) {
    EXPECT_EQ(record.code, ErrorCode::InvalidArgument) << record.text();
    EXPECT_WITHIN_MS(record.elapsed_ms, 5000);
  }
}

TEST(GroupUnixSockets, RequireWithoutASecretBelievesThemAlone) {
  const auto records = [](Transport transport) {
    return meeting([=](Group::Config& config, int) {
      config.transport = transport;
      config.security.policy = SecurityPolicy::Require;
    });
  };
  for (const ErrorRecord& record : records(Transport::Auto)) {
    EXPECT_EQ(record.code, ErrorCode::Ok) << record.text();
  }
  for (const ErrorRecord& record : records(Transport::Tcp)) {
    EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
    EXPECT_THAT(record.summary, HasSubstr("do not all reach each other by Unix sockets"));
  }
}

} // namespace
} // namespace pycomm::testing
