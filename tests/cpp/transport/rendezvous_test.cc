#include "transport/rendezvous/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <functional>
#include <future>
#include <set>
#include <thread>
#include <utility>

#include "transport/memory_store.h"
#include "transport/net/socket_link.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/rendezvous_try.h"

namespace pycomm {
namespace {

using testing::configOf;
using ::testing::HasSubstr;
using testing::kNoAbort;
using testing::MemoryStore;
using ::testing::Not;
using testing::Outcome;
using testing::tryToMake;
using testing::tryToMeet;

// All of `configs` at once, one thread each.
std::vector<Outcome> meetAll(Store& store, const std::vector<RendezvousConfig>& configs) {
  std::vector<Outcome> outcomes(configs.size());
  std::vector<std::thread> ranks;
  for (size_t i = 0; i < configs.size(); ++i) {
    ranks.emplace_back([&, i] { outcomes[i] = tryToMeet(store, configs[i]); });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return outcomes;
}

std::vector<RendezvousConfig> world(int size) {
  std::vector<RendezvousConfig> configs;
  for (int rank = 0; rank < size; ++rank) {
    configs.push_back(configOf(rank, size));
  }
  return configs;
}

TEST(Meet, BringsEightRanksTogether) {
  MemoryStore store;
  const std::vector<Outcome> outcomes = meetAll(store, world(8));
  std::set<uint16_t> ports;
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const Outcome& outcome = outcomes[rank];
    ASSERT_TRUE(outcome.good()) << outcome.error.text();
    const Rendezvous& met = outcome.met;
    ASSERT_EQ(met.members.size(), 8U);
    EXPECT_EQ(met.nonce, outcomes[0].met.nonce);
    EXPECT_EQ(met.run, outcomes[0].met.run);
    EXPECT_NE(met.run, met.nonce);
    int silent_s = 0; // strangers that only connect are the kernel's
    socklen_t length = sizeof silent_s;
    EXPECT_EQ(::getsockopt(met.listener.fd(), IPPROTO_TCP, TCP_DEFER_ACCEPT, &silent_s, &length), 0);
    EXPECT_GT(silent_s, 0);
    EXPECT_EQ(met.group_hash, outcomes[0].met.group_hash);
    EXPECT_EQ(met.claim.generation, 1);
    EXPECT_TRUE(met.local_address.isLoopback());
    EXPECT_EQ(met.interface_name, "lo");
    EXPECT_EQ(met.address_reason, "all ranks are on this host");
    EXPECT_EQ(met.listener.address(), met.local_address);
    EXPECT_EQ(met.members[rank].address, met.local_address);
    for (size_t other = 0; other < 8; ++other) {
      EXPECT_EQ(met.members[other].rank, static_cast<int>(other));
      EXPECT_EQ(met.members[other].address, outcomes[other].met.local_address);
      EXPECT_EQ(met.members[other].pid, ::getpid());
      EXPECT_EQ(met.members[other].host, localHostName());
    }
    ports.insert(met.local_address.port());
    // Everybody can be connected to.
    EXPECT_NO_THROW(
        (void)connectSocket(met.local_address, outcomes[0].met.local_address, Deadline::after(5000), kNoAbort));
  }
  EXPECT_EQ(ports.size(), 8U);
}

TEST(Meet, WorksAlone) {
  MemoryStore store;
  const Outcome outcome = tryToMeet(store, configOf(0, 1));
  ASSERT_TRUE(outcome.good()) << outcome.error.text();
  EXPECT_EQ(outcome.met.members.size(), 1U);
}

TEST(Meet, DrawsANewNonceEachTime) {
  MemoryStore one;
  MemoryStore two;
  const Outcome first = tryToMeet(one, configOf(0, 1));
  const Outcome second = tryToMeet(two, configOf(0, 1));
  EXPECT_NE(first.met.nonce, second.met.nonce);
  EXPECT_NE(first.met.run, second.met.run);
}

TEST(Meet, AsksTheStoreOncePerRankAndNotPerPair) {
  MemoryStore store;
  for (const Outcome& outcome : meetAll(store, world(24))) {
    ASSERT_TRUE(outcome.good()) << outcome.error.text();
  }
  // 24 * 24 pairs read twice, each with two calls, would be 2304 and more without any waiting.
  EXPECT_LT(store.calls(), 24 * 24 * 40);
}

TEST(Meet, KeepsGroupsOfOneStoreApart) {
  MemoryStore store;
  std::vector<RendezvousConfig> configs = world(2);
  for (RendezvousConfig config : world(2)) {
    config.group_name = "other";
    configs.push_back(config);
  }
  const std::vector<Outcome> outcomes = meetAll(store, configs);
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.good()) << outcome.error.text();
  }
  EXPECT_NE(outcomes[0].met.nonce, outcomes[2].met.nonce);
  EXPECT_NE(outcomes[0].met.group_hash, outcomes[2].met.group_hash);
}

TEST(Meet, StaysInItsPortRange) {
  MemoryStore store;
  std::vector<RendezvousConfig> configs = world(3);
  for (RendezvousConfig& config : configs) {
    config.ports = {29600, 30600};
  }
  for (const Outcome& outcome : meetAll(store, configs)) {
    ASSERT_TRUE(outcome.good()) << outcome.error.text();
    EXPECT_GE(outcome.met.local_address.port(), 29600);
    EXPECT_LE(outcome.met.local_address.port(), 30600);
  }
}

TEST(Meet, WorksOverIPv6) {
  MemoryStore store;
  try {
    (void)Listener::bind(SocketAddress::loopback(AddressFamily::IPv6), {});
  } catch (const Error&) {
    GTEST_SKIP() << "this host has no IPv6 loopback";
  }
  std::vector<RendezvousConfig> configs = world(2);
  for (RendezvousConfig& config : configs) {
    config.family = AddressFamily::IPv6;
  }
  for (const Outcome& outcome : meetAll(store, configs)) {
    ASSERT_TRUE(outcome.good()) << outcome.error.text();
    EXPECT_EQ(outcome.met.local_address.ip(), "::1");
  }
}

TEST(Meet, RefusesRanksThatDoNotExist) {
  MemoryStore store;
  for (const auto& [rank, size] : std::vector<std::pair<int, int>>{{2, 2}, {-1, 2}, {0, 0}, {0, -3}}) {
    EXPECT_EQ(tryToMeet(store, configOf(rank, size)).error.code, ErrorCode::InvalidArgument);
  }
  EXPECT_EQ(store.calls(), 0);
}

TEST(Meet, NamesWhoIsMissingAndWhoIsThere) {
  MemoryStore store;
  std::vector<Outcome> outcomes(2);
  std::thread two([&] { outcomes[1] = tryToMeet(store, configOf(2, 4)); });
  (void)store.get("pycomm/world/1/member/2", Deadline::after(20000));
  outcomes[0] = tryToMeet(store, configOf(0, 4, 1000));
  two.join();
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout) << outcome.error.text();
    EXPECT_EQ(outcome.error.rank, 0); // it ran out of time first, and that ended it for both
    EXPECT_EQ(outcome.error.peer, 1);
    EXPECT_STREQ(outcome.error.phase.text(), "rendezvous");
    EXPECT_EQ(outcome.error.group, "world");
    EXPECT_THAT(outcome.error.summary, HasSubstr("missing: 1, 3;"));
    EXPECT_THAT(outcome.error.summary, HasSubstr("present: rank 0 (host " + localHostName()));
    EXPECT_THAT(outcome.error.summary, HasSubstr("rank 2 (host " + localHostName()));
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 10000);
  }
  EXPECT_GE(outcomes[0].elapsed_ms, 990);
}

TEST(Meet, FailsAtOnceOnAWrongWorldSize) {
  // Rank 0 never comes: the difference is seen without it.
  MemoryStore store;
  const std::vector<Outcome> outcomes = meetAll(store, {configOf(1, 4), configOf(2, 3), configOf(3, 4)});
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::ConfigMismatch) << outcome.error.text();
    EXPECT_EQ(outcome.error.summary, outcomes[0].error.summary); // one verdict for all
    EXPECT_THAT(outcome.error.summary, HasSubstr("4"));
    EXPECT_THAT(outcome.error.summary, HasSubstr("3"));
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 10000);
  }
}

TEST(Meet, FailsAtOnceForARankBeyondTheOthersWorld) {
  MemoryStore store;
  for (const Outcome& outcome : meetAll(store, world(2))) {
    ASSERT_TRUE(outcome.good());
  }
  const Outcome late = tryToMeet(store, configOf(2, 3));
  EXPECT_EQ(late.error.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(late.error.summary, HasSubstr("world size 3"));
  EXPECT_WITHIN_MS(late.elapsed_ms, 10000);
}

TEST(Meet, FailsAtOnceOnDifferentOptions) {
  MemoryStore store;
  std::vector<RendezvousConfig> configs = world(4);
  configs.erase(configs.begin());
  configs[2].config_digest = 2;
  configs[2].config_text = "lanes=1 codec=fp16";
  for (const Outcome& outcome : meetAll(store, configs)) {
    EXPECT_EQ(outcome.error.code, ErrorCode::ConfigMismatch) << outcome.error.text();
    EXPECT_THAT(outcome.error.summary, HasSubstr("codec=none"));
    EXPECT_THAT(outcome.error.summary, HasSubstr("codec=fp16"));
    EXPECT_THAT(outcome.error.summary, Not(HasSubstr("lanes")));
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 10000);
  }
}

TEST(Meet, FailsAtOnceOnAnotherVersion) {
  MemoryStore store;
  store.set("pycomm/world/1/member/1", "pycomm 1\nhost=beta\nsomething=old\n");
  const std::vector<Outcome> outcomes = meetAll(store, {configOf(0, 4), configOf(2, 4)});
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::VersionMismatch) << outcome.error.text();
    EXPECT_THAT(outcome.error.summary, HasSubstr("rank 1 (host beta) version 1"));
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 10000);
  }
}

TEST(Meet, FailsOnRecordsThatNoPycommWrote) {
  for (const char* key : {"member/1", "member/all", "address/1", "address/all", "error"}) {
    MemoryStore store;
    store.set(std::string("pycomm/world/1/") + key, std::string("\0\xff garbage 999999999:", 22));
    // Rank 1 overwrites its own keys: where that would hide the garbage it does not come.
    const bool alone = std::string(key) == "member/1";
    std::vector<RendezvousConfig> configs = world(2);
    if (alone) {
      configs.pop_back();
    }
    int failed = 0;
    for (const Outcome& outcome : meetAll(store, configs)) {
      failed += outcome.good() ? 0 : 1;
      EXPECT_TRUE(outcome.good() || outcome.error.code == ErrorCode::ProtocolViolation) << outcome.error.text();
      EXPECT_WITHIN_MS(outcome.elapsed_ms, 10000) << key;
    }
    EXPECT_TRUE(failed > 0 || std::string(key) != "error") << key;
  }
}

// A process that reaches the store can write texts that every rank prints.
TEST(Meet, PrintsNoTerminalEscapesFromTheStore) {
  const std::string escape =
      "\x1b]0;owned\x07\n\xc2\x9b"
      "2J\xff";
  const auto clean = [](const std::string& text) {
    return text.find_first_of("\x1b\x07\n\xff") == std::string::npos && text.find("\xc2\x9b") == std::string::npos;
  };
  ErrorRecord report;
  report.code = ErrorCode::NoInterface;
  report.summary = "broken " + escape;
  report.host = "host" + escape;
  MemoryStore store;
  store.set("pycomm/world/1/error", report.serialize());
  const Outcome outcome = tryToMeet(store, configOf(0, 2));
  EXPECT_EQ(outcome.error.code, ErrorCode::NoInterface);
  EXPECT_THAT(outcome.error.text(), HasSubstr("broken"));
  EXPECT_TRUE(clean(outcome.error.text())) << outcome.error.text();

  MemoryStore votes;
  std::vector<Outcome> outcomes = meetAll(votes, world(2));
  ASSERT_TRUE(outcomes[0].good() && outcomes[1].good());
  votes.set("pycomm/world/1/vote/1", "no " + escape + std::string(5000, 'x'));
  const std::vector<std::string> texts =
      exchangeTexts(votes, outcomes[0].met.claim, 2, "vote", "yes", Deadline::after(5000), kNoAbort);
  EXPECT_EQ(texts[0], "yes");
  EXPECT_TRUE(clean(texts[1])) << texts[1];
  EXPECT_EQ(texts[1].size(), 512U);
}

// Counters and generations are numbers of the store's, and arithmetic is done on them.
TEST(Meet, RefusesNumbersThatNobodyCountsTo) {
  MemoryStore counted;
  static_cast<void>(counted.add("pycomm/world/claim/0", INT64_MIN));
  const Outcome below = tryToMeet(counted, configOf(0, 1));
  EXPECT_EQ(below.error.code, ErrorCode::ProtocolViolation) << below.error.text();
  EXPECT_THAT(below.error.summary, HasSubstr("claims of rank 0"));

  MemoryStore owned; // an owner of a generation whose next one is no number is nobody
  static_cast<void>(owned.add("pycomm/world/claim/0", 1));
  owned.set(
      "pycomm/world/owner/0/1",
      std::to_string(INT64_MAX) + " " + HostIdentity::ofThisProcess().wireText() + " " +
          ProcessIdentity::ofThisProcess().wireText());
  RendezvousConfig config = configOf(0, 1);
  config.deadline = Deadline::after(100);
  const Outcome above = tryToMeet(owned, config);
  EXPECT_EQ(above.error.code, ErrorCode::DuplicateRank) << above.error.text();
  EXPECT_THAT(above.error.summary, HasSubstr("did not say its name"));
}

TEST(Meet, EndsOnAllRanksWhenOneCannotGoOn) {
  MemoryStore store;
  std::vector<RendezvousConfig> configs = world(3);
  configs[2].spec = InterfaceSpec::parse("nosuchinterface");
  for (const Outcome& outcome : meetAll(store, configs)) {
    EXPECT_EQ(outcome.error.code, ErrorCode::NoInterface) << outcome.error.text();
    EXPECT_EQ(outcome.error.rank, 2);
    EXPECT_THAT(outcome.error.summary, HasSubstr("lo ("));
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 10000);
  }
}

TEST(Meet, EndsOnAllRanksWhenOneFindsNoPort) {
  MemoryStore store;
  const Listener taken = Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {});
  std::vector<RendezvousConfig> configs = world(3);
  configs[1].ports = {taken.address().port(), taken.address().port()};
  for (const Outcome& outcome : meetAll(store, configs)) {
    EXPECT_EQ(outcome.error.code, ErrorCode::PortsExhausted) << outcome.error.text();
    EXPECT_EQ(outcome.error.rank, 1);
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 10000);
  }
}

TEST(Meet, EndsWhenAborted) {
  MemoryStore store;
  AbortToken abort;
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  reason.summary = "interrupted";
  Outcome waiting;
  std::thread rank0([&] { waiting = tryToMeet(store, configOf(0, 3), abort); });
  std::thread rank1([&] {
    while (!store.has("pycomm/world/1/member/0")) {
      std::this_thread::yield();
    }
    abort.abort(reason);
  });
  rank1.join();
  rank0.join();
  EXPECT_EQ(waiting.error.code, ErrorCode::Aborted);
  EXPECT_WITHIN_MS(waiting.elapsed_ms, 10000);
  // A rank that comes later learns it at once.
  const Outcome late = tryToMeet(store, configOf(1, 3));
  EXPECT_EQ(late.error.code, ErrorCode::Aborted);
  EXPECT_EQ(late.error.rank, 0);
}

TEST(Meet, MayBeRepeatedByTheSameProcesses) {
  MemoryStore store;
  uint64_t last_nonce = 0;
  for (int64_t generation = 1; generation <= 3; ++generation) {
    const std::vector<Outcome> outcomes = meetAll(store, world(3));
    for (const Outcome& outcome : outcomes) {
      ASSERT_TRUE(outcome.good()) << outcome.error.text();
      EXPECT_EQ(outcome.met.claim.generation, generation);
      if (generation == 2) {
        leave(store, outcome.met.claim);
      }
    }
    EXPECT_NE(outcomes[0].met.nonce, last_nonce);
    last_nonce = outcomes[0].met.nonce;
  }
}

/// The store as one rank sees it: when it looks for the `nth` time whether `key` is there, and it is, `between` is done before it goes on.
class InterruptedStore final : public Store {
 public:
  InterruptedStore(Store& under, std::string key, int nth, std::function<void()> between)
      : under_(under), key_(std::move(key)), nth_(nth), between_(std::move(between)) {}
  void set(const std::string& key, const std::string& value) override {
    under_.set(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    return under_.get(key, deadline);
  }
  bool has(const std::string& key) override {
    const bool found = under_.has(key);
    if (found && key == key_ && --nth_ == 0) {
      between_();
    }
    return found;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return under_.add(key, amount);
  }
  bool remove(const std::string& key) override {
    return under_.remove(key);
  }

 private:
  Store& under_;
  const std::string key_;
  int nth_;
  const std::function<void()> between_;
};

// Rank 0's new claim deletes what it left of its last one, and rank 1 is about to read that.
TEST(Meet, ARankThatReadsAClaimWhichIsDeletedMeanwhileWaitsForTheNextOne) {
  const struct {
    const char* key;
    int nth;
    bool sealed;
  } cases[] = {
      {"pycomm/world/end/0/1", 1, false}, {"pycomm/world/end/0/1", 1, true}, {"pycomm/world/owner/0/1", 2, true}};
  const Secret secret = Secret::generate();
  for (const auto& each : cases) {
    MemoryStore memory;
    const auto make = [&](Store& store, int rank) {
      SealedStore sealed(store, secret);
      RendezvousConfig config = configOf(rank, 2);
      config.takeover = Takeover::FromEndedRun;
      Store& used = each.sealed ? static_cast<Store&>(sealed) : store;
      Outcome outcome = tryToMake(used, config);
      if (outcome.good()) {
        leave(used, outcome.met.claim);
      }
      return outcome;
    };
    auto first = std::async(std::launch::async, make, std::ref(static_cast<Store&>(memory)), 0);
    ASSERT_TRUE(make(memory, 1).good());
    ASSERT_TRUE(first.get().good());
    std::future<Outcome> again;
    InterruptedStore interrupted(memory, each.key, each.nth, [&] {
      again = std::async(std::launch::async, make, std::ref(static_cast<Store&>(memory)), 0);
      for (const Deadline most = Deadline::after(20000); memory.has(each.key) && !most.expired();) {
        std::this_thread::yield();
      }
    });
    const Outcome waited = make(interrupted, 1);
    EXPECT_TRUE(waited.good()) << each.key << each.sealed << waited.error.text();
    ASSERT_TRUE(again.valid()) << each.key << each.sealed;
    const Outcome came = again.get();
    EXPECT_TRUE(came.good()) << each.key << each.sealed << came.error.text();
  }
}

TEST(Meet, MayBeRepeatedAfterAFailure) {
  MemoryStore store;
  std::vector<RendezvousConfig> configs = world(2);
  configs[1].config_digest = 7;
  for (const Outcome& outcome : meetAll(store, configs)) {
    EXPECT_EQ(outcome.error.code, ErrorCode::ConfigMismatch);
  }
  for (const Outcome& outcome : meetAll(store, world(2))) {
    EXPECT_TRUE(outcome.good()) << outcome.error.text();
  }
}

/// Fails every call once told to.
class DyingStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    check();
    store_.set(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    check();
    return store_.get(key, deadline);
  }
  bool has(const std::string& key) override {
    check();
    return store_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    check();
    return store_.add(key, amount);
  }
  std::atomic<int> lives = 1 << 30;

 private:
  void check() {
    if (--lives < 0) {
      throw Error(ErrorCode::StoreLost, "the store at 127.0.0.1:29500 is gone");
    }
  }
  MemoryStore store_;
};

// The store ends with rank 0, as one does that torch's rank 0 serves.
TEST(Meet, ARankThatServesTheStoreStaysUntilTheOthersKnowWhy) {
  DyingStore store;
  RendezvousConfig zero = configOf(0, 3);
  zero.serves_store = true;
  zero.spec = InterfaceSpec::parse("nosuchinterface");
  std::vector<Outcome> outcomes(3);
  std::vector<std::thread> ranks;
  for (const int rank : {1, 2}) {
    ranks.emplace_back([&, rank] {
      while (!store.has("pycomm/world/1/error")) { // rank 0 has failed, and waits
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100 * rank));
      outcomes[static_cast<size_t>(rank)] = tryToMeet(store, configOf(rank, 3));
    });
  }
  outcomes[0] = tryToMeet(store, zero);
  store.lives = 0;
  for (std::thread& rank : ranks) {
    rank.join();
  }
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::NoInterface) << outcome.error.text();
    EXPECT_EQ(outcome.error.rank, 0);
  }
  EXPECT_WITHIN_MS(outcomes[0].elapsed_ms, 1500); // no longer than they need
}

TEST(Meet, ARankThatServesTheStoreDoesNotStayForRanksThatDidNotComeInTime) {
  MemoryStore store;
  RendezvousConfig zero = configOf(0, 3, 200);
  zero.serves_store = true;
  const std::vector<Outcome> outcomes = meetAll(store, {zero, configOf(1, 3)});
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 1500);
  }
  RendezvousConfig other = configOf(0, 2);
  other.serves_store = true;
  other.group_name = "other";
  other.spec = InterfaceSpec::parse("nosuchinterface");
  EXPECT_WITHIN_MS(tryToMeet(store, other).elapsed_ms, 4000); // nobody comes: 2 s
}

TEST(Meet, ReportsALostStoreWhereverItDies) {
  for (int lives = 0; lives < 14; ++lives) {
    DyingStore store;
    store.lives = lives;
    const Outcome outcome = tryToMeet(store, configOf(0, 2, 10000));
    EXPECT_EQ(outcome.error.code, ErrorCode::StoreLost) << outcome.error.text();
    EXPECT_EQ(outcome.error.rank, 0);
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 5000);
    leave(store, outcome.met.claim); // must not throw
  }
}

} // namespace
} // namespace pycomm
