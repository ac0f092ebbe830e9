// Groups with a secret: their connections are in TLS, or they do not form.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/ranks.h"
#include "engine/sums.h"
#include "transport/error_matchers.h"

namespace pycomm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::shared_ptr<const Secret>& theSecret() {
  static const auto secret = std::make_shared<const Secret>(Secret::generate());
  return secret;
}

void withSecret(Group::Config& config, int streams = 1, Transport transport = Transport::Tcp) {
  config.transport = transport;
  config.streams = streams;
  config.security.secret = theSecret();
  config.security.secret_origin = "the test";
}

TEST(GroupSecret, SumsOfEverySizeOverOneConnectionAndSeveral) {
  for (const int streams : {1, 3}) {
    runRanks(3, sumEverySize, [&](Group::Config& config) { withSecret(config, streams); });
  }
}

TEST(GroupSecret, KeysChangeUnderWay) {
  runRanks(3, sumEverySize, [](Group::Config& config) {
    withSecret(config);
    config.security.tls.records_per_key = 8;
  });
}

// The bytes go through memory, and the bells of the links through TLS.
TEST(GroupSecret, RanksOfOneHostShareMemory) {
  runRanks(
      3,
      [](Rank& self) {
        EXPECT_TRUE(self.group.sharesMemory());
        sumEverySize(self);
      },
      [](Group::Config& config) { withSecret(config, 1, Transport::Auto); });
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
      EXPECT_EQ(record.phase, "rendezvous");
      EXPECT_THAT(record.summary, HasSubstr(theSecret()->keyId()));
      EXPECT_THAT(record.hint, HasSubstr("secret file"));
      EXPECT_LT(record.elapsed_ms, 5000);
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
  return Roster(config, 1, met);
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

} // namespace
} // namespace pycomm::testing
