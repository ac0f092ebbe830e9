#include "transport/rendezvous/sealed_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "transport/memory_store.h"
#include "transport/rendezvous/store_round.h"
#include "transport/rendezvous_try.h"

namespace pycomm {
namespace {

using testing::configOf;
using testing::elapsedMs;
using testing::errorOf;
using ::testing::HasSubstr;
using testing::kNoAbort;
using testing::MemoryStore;
using testing::Outcome;
using testing::tryToMeet;

constexpr int kTimeoutMs = 20000;
constexpr int kSoonMs = 10000; // half of it: an end that waited for the deadline is too late

const Secret& secretOfTheJob() {
  static const Secret secret = Secret::generate();
  return secret;
}

/// What somebody on the network can do to a store: read all that was written, and answer something else.
class OpenStore final : public Store {
 public:
  using Lie = std::function<std::string(const std::string& key, const std::string& value)>;

  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    written_[key] = value;
    store_.set(key, lie_ ? lie_(key, value) : value);
  }
  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override {
    return store_.get(key, deadline);
  }
  [[nodiscard]] bool has(const std::string& key) override {
    return store_.has(key);
  }
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override {
    const int64_t count = store_.add(key, amount);
    const std::lock_guard<std::mutex> lock(mutex_);
    counters_[key] = count;
    return count;
  }

  /// From now on this changes each value that is written.
  void lie(Lie lie) {
    lie_ = std::move(lie);
  }
  [[nodiscard]] std::map<std::string, std::string> written() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return written_;
  }
  /// Everything that another store has.
  void preload(const OpenStore& other, bool with_counters) {
    for (const auto& [key, value] : other.written()) {
      store_.set(key, value);
    }
    for (const auto& [key, count] : with_counters ? other.counters_ : decltype(counters_)()) {
      (void)store_.add(key, count);
    }
  }

 private:
  MemoryStore store_;
  mutable std::mutex mutex_; ///< guards written_ and counters_
  std::map<std::string, std::string> written_;
  std::map<std::string, int64_t> counters_;
  Lie lie_;
};

/// Each rank is a thread; null: without a secret.
std::vector<Outcome> meetAll(
    Store& store,
    const std::vector<const Secret*>& secrets,
    Takeover takeover = Takeover::Never,
    int timeout_ms = kTimeoutMs,
    int rank_zero_after_ms = 0) {
  std::vector<Outcome> outcomes(secrets.size());
  std::vector<std::thread> ranks;
  std::atomic<size_t> begun{0};
  for (size_t rank = 0; rank < secrets.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      for (++begun; rank == 0 && rank_zero_after_ms > 0 && begun < secrets.size();) {
        std::this_thread::yield();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(rank == 0 ? rank_zero_after_ms : 0));
      auto config = configOf(static_cast<int>(rank), static_cast<int>(secrets.size()), timeout_ms);
      config.takeover = takeover;
      if (secrets[rank] == nullptr) {
        outcomes[rank] = tryToMeet(store, config);
        return;
      }
      SealedStore sealed(store, *secrets[rank]);
      outcomes[rank] = tryToMeet(sealed, config);
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return outcomes;
}

std::vector<Outcome> meetAll(Store& store, size_t size = 3) {
  return meetAll(store, std::vector<const Secret*>(size, &secretOfTheJob()));
}

std::string summaries(const std::vector<Outcome>& outcomes) {
  std::string all;
  for (const Outcome& outcome : outcomes) {
    all += outcome.good() ? "good\n" : outcome.error.text() + "\n";
  }
  return all;
}

bool allGood(const std::vector<Outcome>& outcomes) {
  return std::all_of(outcomes.begin(), outcomes.end(), [](const Outcome& outcome) { return outcome.good(); });
}

std::vector<std::string>& warnings() {
  static std::vector<std::string> lines;
  return lines;
}

/// Collects what is logged as a warning while it exists.
struct Warnings {
  Warnings() {
    warnings().clear();
    setLogSink(
        [](LogLevel, const char* line) {
          static std::mutex mutex;
          const std::lock_guard<std::mutex> lock(mutex);
          warnings().emplace_back(line);
        },
        LogLevel::Warn);
  }
  ~Warnings() {
    setLogSink(nullptr, LogLevel::Off);
  }
};

TEST(SealedStore, GivesBackWhatAHolderOfTheSecretWrote) {
  MemoryStore store;
  SealedStore writer(store, secretOfTheJob());
  SealedStore reader(store, secretOfTheJob());
  for (const std::string& value :
       {std::string(), std::string("a value"), std::string("\0\n\xff", 3), std::string(70000, 'x')}) {
    writer.set("a/0", value);
    EXPECT_EQ(reader.get("a/0", Deadline::after(1000)), value);
    EXPECT_EQ(reader.find("a/0"), value);
  }
  EXPECT_TRUE(reader.has("a/0"));
  EXPECT_FALSE(reader.find("b/0"));
  EXPECT_EQ(writer.add("n", 2), 2);
  EXPECT_EQ(reader.add("n", 1), 3);
  EXPECT_THAT(store.get("a/0", Deadline::after(1000)), HasSubstr("pcs1 " + secretOfTheJob().keyId() + " "));
}

// The seal, as another program computes it (Python: hmac, hashlib).
TEST(SealedStore, TheSealIsAnHmacOfKeyAndValueWithTheirLengths) {
  MemoryStore store;
  const Secret secret = Secret::parse("pycomm-secret-1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh86oZq", "it");
  SealedStore(store, secret).set("pycomm/world/1/member/3", "hello");
  EXPECT_EQ(
      store.get("pycomm/world/1/member/3", Deadline::after(1000)),
      "pcs1 be7c1379 034f080a5c38dadd279acb0963ea4c6ea27622298dda6cbb418b9f5096dc4c3e\nhello");
}

TEST(SealedStore, TellsAMissingSealAnotherSecretAndAForgeryApart) {
  MemoryStore store;
  SealedStore mine(store, secretOfTheJob());
  const auto refusal = [&](const std::string& key) {
    return errorOf([&] { (void)mine.get(key, Deadline::after(1000)); });
  };
  store.set("g/member/3", "pycomm 2\nrank=3\n");
  ErrorRecord record = refusal("g/member/3");
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_EQ(record.peer, 3);
  EXPECT_THAT(
      record.summary,
      HasSubstr(
          "rank 3 has no secret, and this process has one (key id " + secretOfTheJob().keyId() +
          ") (entry g/member/3 "));

  const Secret other = Secret::generate();
  SealedStore(store, other).set("g/member/4", "pycomm 2\nrank=4\n");
  record = refusal("g/member/4");
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(
      record.summary,
      HasSubstr("rank 4 has a different secret (key id " + other.keyId() + ", here " + secretOfTheJob().keyId() + ")"));

  mine.set("g/member/all", "a list");
  const std::string good = store.get("g/member/all", Deadline::after(1000));
  for (const size_t at : {good.size() - 1, size_t{14}, size_t{77}}) { // the value, and both ends of the seal
    std::string changed = good;
    changed[at] = changed[at] == '0' ? '1' : '0';
    store.set("g/member/all", changed);
    record = refusal("g/member/all");
    EXPECT_EQ(record.code, ErrorCode::ProtocolViolation) << at;
    EXPECT_THAT(record.summary, HasSubstr("rank 0's record was changed by somebody who does not have the secret"));
  }
  store.set("g/member/all", good.substr(0, good.size() - 1));
  EXPECT_EQ(refusal("g/member/all").code, ErrorCode::ProtocolViolation);
}

TEST(SealedStore, AValueCountsUnderItsOwnKeyOnly) {
  MemoryStore store;
  SealedStore mine(store, secretOfTheJob());
  mine.set("pycomm/world/1/member/1", "value");
  const std::string sealed = store.get("pycomm/world/1/member/1", Deadline::after(1000));
  for (const std::string key :
       {"pycomm/world/1/member/2", "pycomm/world/2/member/1", "pycomm/other/1/member/1", "pycomm/world/1/member/11"}) {
    store.set(key, sealed);
    EXPECT_EQ(errorOf([&] { (void)mine.get(key, Deadline::after(1000)); }).code, ErrorCode::ProtocolViolation) << key;
  }
  // Nor can a byte move from the value into the key.
  store.set("pycomm/world/1/member/1v", sealed.substr(0, sealed.size() - 5) + "alue");
  EXPECT_EQ(
      errorOf([&] { (void)mine.get("pycomm/world/1/member/1v", Deadline::after(1000)); }).code,
      ErrorCode::ProtocolViolation);
}

TEST(SealedStore, PassesOverAForgedHintWithOneWarning) {
  const Warnings collected;
  MemoryStore store;
  SealedStore mine(store, secretOfTheJob());
  store.set("g/error", "\x1b[31mstop");
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(mine.find("g/error"));
  }
  ASSERT_EQ(warnings().size(), 1U);
  EXPECT_THAT(warnings().front(), HasSubstr("ignored the entry g/error of torch's store"));
  EXPECT_EQ(warnings().front().find('\x1b'), std::string::npos);
}

TEST(SealedRendezvous, MeetsAndEachJobHasItsOwnTranscript) {
  OpenStore first;
  OpenStore second;
  const auto jobs = {meetAll(first), meetAll(second)};
  for (const auto& outcomes : jobs) {
    ASSERT_TRUE(allGood(outcomes)) << summaries(outcomes);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.met.transcript, outcomes.front().met.transcript);
      EXPECT_EQ(outcome.met.transcript.size(), 64U);
      EXPECT_EQ(outcome.met.members.size(), 3U);
    }
  }
  EXPECT_NE(jobs.begin()->front().met.transcript, (jobs.begin() + 1)->front().met.transcript);
  size_t sealed = 0;
  for (const auto& [key, value] : first.written()) {
    EXPECT_EQ(value.rfind("pcs1 ", 0), 0U) << key;
    sealed += key.find(jobs.begin()->front().met.transcript) != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(sealed, 4U); // three addresses and their list
}

TEST(SealedRendezvous, WithoutASecretNothingHasASeal) {
  OpenStore store;
  const auto outcomes = meetAll(store, {nullptr, nullptr});
  ASSERT_TRUE(allGood(outcomes)) << summaries(outcomes);
  EXPECT_EQ(outcomes.front().met.transcript, "");
  const auto written = store.written();
  EXPECT_EQ(written.count("pycomm/world/1/address/all"), 1U);
  for (const auto& [key, value] : written) {
    EXPECT_EQ(value.find("pcs1"), std::string::npos) << key;
  }
}

TEST(SealedRendezvous, ARoundAfterTheFirstIsBoundToTheJob) {
  OpenStore store;
  const auto outcomes = meetAll(store, 2);
  ASSERT_TRUE(allGood(outcomes)) << summaries(outcomes);
  std::vector<std::vector<std::string>> texts(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      SealedStore sealed(store, secretOfTheJob());
      texts[static_cast<size_t>(rank)] = exchangeTexts(
          sealed,
          outcomes[static_cast<size_t>(rank)].met.claim,
          2,
          "vote",
          rank == 0 ? "yes" : "no",
          Deadline::after(kTimeoutMs),
          kNoAbort);
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  EXPECT_EQ(texts[0], (std::vector<std::string>{"yes", "no"}));
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(store.written().count("pycomm/world/1/" + outcomes[0].met.transcript + "/vote/all"), 1U);
}

// All that an earlier job with the same secret, group name and generation wrote, served again in place of the new values.
TEST(SealedRendezvous, AWholeOldJobCannotBeReplayed) {
  OpenStore old;
  ASSERT_TRUE(allGood(meetAll(old)));
  const auto before = old.written();
  for (const std::string replayed : {"/member/all", "/member/", "/address/"}) {
    OpenStore store;
    store.lie([&](const std::string& key, const std::string& value) {
      if (key.find(replayed) == std::string::npos) {
        return value;
      }
      // The old round after the first has another key: the old value is put under the new one.
      const std::string end = key.substr(key.rfind('/', key.rfind('/') - 1));
      for (const auto& [old_key, old_value] : before) {
        if (old_key.size() >= end.size() && old_key.compare(old_key.size() - end.size(), end.size(), end) == 0) {
          return old_value;
        }
      }
      return value;
    });
    const auto outcomes = meetAll(store);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.error.code, ErrorCode::ProtocolViolation) << replayed << "\n" << summaries(outcomes);
      EXPECT_WITHIN_MS(outcome.elapsed_ms, kSoonMs);
    }
    const bool address = std::string(replayed) == "/address/";
    EXPECT_THAT(
        summaries(outcomes),
        HasSubstr(
            address ? "was changed by somebody who does not have the secret"
                    : "does not have the record that this rank wrote"))
        << replayed;
  }
}

// The store as an old job with the same secret and group name left it, all at once, before the first rank of this one comes.
TEST(SealedRendezvous, TheStoreOfAWholeOldJobIsNeverTakenForThisOne) {
  for (const bool left : {true, false}) { // in order, or ended by a launcher
    OpenStore old;
    const auto before = meetAll(old);
    ASSERT_TRUE(allGood(before)) << summaries(before);
    for (const Outcome& outcome : before) {
      SealedStore sealed(old, secretOfTheJob());
      if (left) {
        leave(sealed, outcome.met.claim);
      }
    }
    for (const bool counters : {true, false}) {
      for (const Takeover takeover : {Takeover::Never, Takeover::FromEndedRun}) {
        // Ranks that follow rank 0 find a complete list only, and wait for a newer one. That denial ends at the deadline.
        const bool denied = !counters && takeover == Takeover::FromEndedRun;
        OpenStore store;
        store.preload(old, counters);
        const std::vector<const Secret*> secrets(3, &secretOfTheJob());
        // Rank 0 would write a list of this job over the old one, if it were faster than the others.
        const auto outcomes = meetAll(store, secrets, takeover, denied ? 3000 : kTimeoutMs, 200);
        for (const Outcome& outcome : outcomes) {
          EXPECT_WITHIN_MS(outcome.elapsed_ms, kSoonMs);
          EXPECT_NE(outcome.met.transcript, before.front().met.transcript);
          EXPECT_EQ(outcome.met.transcript, outcomes.front().met.transcript) << summaries(outcomes);
          if (counters) { // they say that the old job's generation is over
            EXPECT_TRUE(outcome.good()) << summaries(outcomes);
            EXPECT_EQ(outcome.met.claim.generation, 2);
          } else {
            EXPECT_EQ(outcome.error.code, denied ? ErrorCode::RendezvousTimeout : ErrorCode::ProtocolViolation)
                << summaries(outcomes);
          }
        }
      }
    }
  }
}

TEST(SealedRendezvous, SwappedRecordsEndItOnAllRanks) {
  OpenStore store;
  std::string kept;
  store.lie([&](const std::string& key, const std::string& value) {
    if (key.find("/member/1") != std::string::npos) {
      kept = value;
    }
    return key.find("/member/2") != std::string::npos && !kept.empty() ? kept : value;
  });
  SealedStore sealed(store, secretOfTheJob());
  std::vector<Outcome> outcomes(3);
  std::thread one([&] { outcomes[1] = tryToMeet(sealed, configOf(1, 3, kTimeoutMs)); });
  for (const Deadline deadline = Deadline::after(10000);
       !store.has("pycomm/world/1/member/1") && !deadline.expired();) {
    std::this_thread::yield();
  }
  std::thread two([&] { outcomes[2] = tryToMeet(sealed, configOf(2, 3, kTimeoutMs)); });
  outcomes[0] = tryToMeet(sealed, configOf(0, 3, kTimeoutMs));
  one.join();
  two.join();
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::ProtocolViolation);
    EXPECT_THAT(outcome.error.summary, HasSubstr("rank 2's record was changed by somebody"));
    EXPECT_WITHIN_MS(outcome.elapsed_ms, kSoonMs);
  }
}

// An older record of rank 1, written by the same process group a moment ago: its seal is good, and rank 1 notices.
TEST(SealedRendezvous, ARecordRolledBackIsNoticedByItsRank) {
  OpenStore old;
  ASSERT_TRUE(allGood(meetAll(old)));
  const std::string before = old.written().at("pycomm/world/1/member/1");
  OpenStore store;
  store.lie([&](const std::string& key, const std::string& value) {
    return key == "pycomm/world/1/member/1" ? before : value;
  });
  const auto outcomes = meetAll(store);
  EXPECT_EQ(outcomes[1].error.code, ErrorCode::ProtocolViolation) << summaries(outcomes);
  EXPECT_THAT(outcomes[1].error.summary, HasSubstr("does not have the record that this rank wrote"));
  for (const Outcome& outcome : outcomes) { // the others take the list, but need not wait for rank 1
    EXPECT_EQ(outcome.error.code, ErrorCode::ProtocolViolation);
    EXPECT_WITHIN_MS(outcome.elapsed_ms, kSoonMs);
  }
}

// The same secret has sealed it, for a job that has failed: no rank of this one takes it for its own once the ranks have met.
TEST(SealedRendezvous, TheErrorOfAnOldJobEndsNoRankThatHasMet) {
  OpenStore old;
  SealedStore sealed_old(old, secretOfTheJob());
  ErrorRecord record;
  record.code = ErrorCode::PortsExhausted;
  record.summary = "of an old job";
  sealed_old.set("pycomm/world/1/error", std::string(64, 'a') + "\n" + record.serialize());
  const std::string before = old.get("pycomm/world/1/error", Deadline::after(1000));
  OpenStore store;
  const auto outcomes = meetAll(store, 2);
  ASSERT_TRUE(allGood(outcomes)) << summaries(outcomes);
  store.set("pycomm/world/1/error", before);
  SealedStore sealed(store, secretOfTheJob());
  throwIfFailed(sealed, outcomes[0].met.claim);
  record.summary = "of this job";
  static_cast<void>(tellFailure(sealed, outcomes[1].met.claim, record));
  EXPECT_EQ(testing::errorOf([&] { throwIfFailed(sealed, outcomes[0].met.claim); }).summary, "of this job");
}

TEST(SealedRendezvous, PushedCountersDecideNothing) {
  OpenStore store;
  (void)store.add("pycomm/world/claim/0", 1);
  (void)store.add("pycomm/world/claim/1", 5);
  (void)store.add("pycomm/world/1/errors", 1);
  const auto good = meetAll(store, 2);
  EXPECT_TRUE(allGood(good)) << summaries(good); // no DuplicateRank
  for (const Outcome& outcome : good) {
    EXPECT_GE(outcome.elapsed_ms, kOneTryMs + kOneStepMs); // an owner that is so slow to say its name is found
    EXPECT_WITHIN_MS(outcome.elapsed_ms, 7000);
    EXPECT_EQ(outcome.met.claim.generation, 1);
  }
}

TEST(SealedRendezvous, APushedErrorCounterKeepsNoErrorBack) {
  OpenStore store;
  (void)store.add("pycomm/world/1/errors", 1);
  SealedStore sealed(store, secretOfTheJob());
  auto config = configOf(1, 2, kTimeoutMs);
  config.config_digest = 2;
  Outcome other;
  std::thread one([&] { other = tryToMeet(sealed, config); });
  const Outcome outcome = tryToMeet(sealed, configOf(0, 2, kTimeoutMs));
  one.join();
  EXPECT_EQ(outcome.error.code, ErrorCode::ConfigMismatch);
  EXPECT_EQ(other.error.code, ErrorCode::ConfigMismatch);
  EXPECT_WITHIN_MS(outcome.elapsed_ms, 5000); // not the 10 s that a rank waits for the elected one's record
  EXPECT_WITHIN_MS(other.elapsed_ms, 5000);
}

TEST(SealedRendezvous, ATrueDuplicateIsStillRefused) {
  OpenStore store;
  SealedStore sealed(store, secretOfTheJob());
  const Outcome first = tryToMeet(sealed, configOf(0, 1, kTimeoutMs));
  ASSERT_TRUE(first.good()) << first.error.text();
  // Another process, which is this one with another start time.
  std::string owner = sealed.get("pycomm/world/owner/0/1", Deadline::after(1000));
  owner.back() = owner.back() == '1' ? '2' : '1';
  sealed.set("pycomm/world/owner/0/1", owner);
  const Outcome second = tryToMeet(sealed, configOf(0, 1, kTimeoutMs));
  EXPECT_EQ(second.error.code, ErrorCode::DuplicateRank);
  leave(sealed, first.met.claim);
  EXPECT_EQ(tryToMeet(sealed, configOf(0, 1, kTimeoutMs)).met.claim.generation, 2);
}

TEST(SealedRendezvous, AForgedErrorStopsNobody) {
  const Warnings collected;
  OpenStore store;
  ErrorRecord forged;
  forged.summary = "stop";
  store.set("pycomm/world/1/error", forged.serialize());
  const auto outcomes = meetAll(store, 2);
  EXPECT_TRUE(allGood(outcomes)) << summaries(outcomes);
  EXPECT_EQ(warnings().size(), 2U); // one for each rank
}

TEST(SealedRendezvous, NamesTheRankThatHasNoSecret) {
  OpenStore store;
  const auto outcomes = meetAll(store, {&secretOfTheJob(), nullptr, &secretOfTheJob()});
  EXPECT_THAT(outcomes[0].error.summary, HasSubstr("rank 1 has no secret, and this process has one"))
      << summaries(outcomes);
  EXPECT_THAT(outcomes[2].error.summary, HasSubstr("rank 1 has no secret"));
  EXPECT_THAT(
      outcomes[1].error.summary,
      HasSubstr("has a secret (key id " + secretOfTheJob().keyId() + "), and this process has none"));
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::ConfigMismatch);
    EXPECT_THAT(outcome.error.hint, HasSubstr("give every rank the same secret file"));
    EXPECT_WITHIN_MS(outcome.elapsed_ms, kSoonMs);
  }
}

TEST(SealedRendezvous, NamesTheRankWithAnotherSecret) {
  OpenStore store;
  const Secret other = Secret::generate();
  const auto outcomes = meetAll(store, {&secretOfTheJob(), &secretOfTheJob(), &other});
  EXPECT_THAT(outcomes[0].error.summary, HasSubstr("rank 2 has a different secret (key id " + other.keyId()));
  EXPECT_THAT(outcomes[2].error.summary, HasSubstr("has a different secret (key id " + secretOfTheJob().keyId()));
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.error.code, ErrorCode::ConfigMismatch);
    EXPECT_WITHIN_MS(outcome.elapsed_ms, kSoonMs);
  }
}

// As torchrun starts them: ranks other than 0 look for the claim of rank 0, and pass over one that their secret has not sealed.
TEST(SealedRendezvous, NamesDifferingSecretsAlsoOnAStoreThatIsUsedAgain) {
  const Secret other = Secret::generate();
  const Secret* const job = &secretOfTheJob();
  const std::string key_ids = "a different secret (key id ";
  const struct {
    std::vector<const Secret*> secrets;
    std::vector<std::string> summaries; ///< a part of each rank's
  } cases[] = {
      {{job, &other}, {"rank 1 has " + key_ids + other.keyId(), "rank 0 has " + key_ids + job->keyId()}},
      {{job, nullptr}, {"rank 1 has no secret, and this process has one", "and this process has none"}},
      {{nullptr, job}, {" has a secret (key id ", "rank 0 has no secret, and this process has one"}},
      {{job, job, &other}, {"rank 2 has " + key_ids, "rank 2 has " + key_ids, "rank 0 has " + key_ids}},
  };
  for (const auto& each : cases) {
    OpenStore store;
    const auto outcomes = meetAll(store, each.secrets, Takeover::FromEndedRun);
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      EXPECT_EQ(outcomes[rank].error.code, ErrorCode::ConfigMismatch) << summaries(outcomes);
      EXPECT_THAT(outcomes[rank].error.summary, HasSubstr(each.summaries[rank]));
      EXPECT_WITHIN_MS(outcomes[rank].elapsed_ms, kSoonMs);
    }
  }
}

// The secret was changed between two runs. The other ranks wait for the new rank 0, however late it comes.
TEST(SealedRendezvous, AnOldRankZeroWithAnotherSecretEndsNobody) {
  const Secret other = Secret::generate();
  OpenStore store;
  SealedStore old(store, other);
  auto config = configOf(0, 2, 100);
  config.takeover = Takeover::FromEndedRun;
  ASSERT_EQ(tryToMeet(old, config).error.code, ErrorCode::RendezvousTimeout);
  OpenStore left; // as if it had been killed
  for (const auto& [key, value] : store.written()) {
    if (key.find("/error") == std::string::npos && key.find("/end/") == std::string::npos) {
      left.set(key, value);
    }
  }
  (void)left.add("pycomm/world/claim/0", 1);
  config.rank = 1;
  config.deadline = Deadline::after(300);
  SealedStore fresh(left, secretOfTheJob());
  const Outcome early = tryToMeet(fresh, config);
  EXPECT_EQ(early.error.code, ErrorCode::RendezvousTimeout) << early.error.text();
  const auto outcomes =
      meetAll(left, std::vector<const Secret*>(3, &secretOfTheJob()), Takeover::FromEndedRun, kTimeoutMs, 300);
  EXPECT_TRUE(allGood(outcomes)) << summaries(outcomes);
}

TEST(SealedRendezvous, AStrangersClaimOfRankZeroIsPassedOverOnAStoreThatIsUsedAgain) {
  OpenStore store;
  (void)store.add("pycomm/world/claim/0", 1);
  store.set("pycomm/world/owner/0/1", "1 a stranger's");
  const auto outcomes = meetAll(store, std::vector<const Secret*>(3, &secretOfTheJob()), Takeover::FromEndedRun);
  EXPECT_TRUE(allGood(outcomes)) << summaries(outcomes);
}

} // namespace
} // namespace pycomm
