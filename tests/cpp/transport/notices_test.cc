// A rank that cannot come says why, and the others neither believe it more than they may nor wait without a word.
#include "transport/rendezvous/notices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "transport/memory_store.h"
#include "transport/rendezvous/sealed_store.h"
#include "transport/rendezvous_try.h"

namespace pycomm {
namespace {

using testing::configOf;
using ::testing::HasSubstr;
using testing::MemoryStore;
using ::testing::Not;
using testing::Outcome;
using testing::tryToMeet;

constexpr const char* kReason = "the secret file /home/u/secret has mode 0644: other users may read it";
constexpr int kShortMs = 1500; // of a wait that ends with the timeout

const Secret& jobsSecret() {
  static const Secret secret = Secret::generate();
  return secret;
}

/// The lines that are logged while it exists.
class LoggedLines {
 public:
  LoggedLines() {
    lines().clear();
    setLogSink(
        [](LogLevel, const char* line) {
          const std::lock_guard<std::mutex> lock(mutex());
          lines().emplace_back(line);
        },
        LogLevel::Warn);
  }
  ~LoggedLines() {
    setLogSink(nullptr, LogLevel::Off);
  }
  [[nodiscard]] static std::vector<std::string> all() {
    const std::lock_guard<std::mutex> lock(mutex());
    return lines();
  }

 private:
  static std::vector<std::string>& lines() {
    static std::vector<std::string> lines;
    return lines;
  }
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
};

/// Ranks 0 and 1 of a larger world meet, with the secret if there is one, until their timeout.
std::vector<Outcome> waitForOthers(
    Store& store,
    const Secret* secret,
    Takeover takeover = Takeover::Never,
    int size = 3) {
  std::vector<Outcome> outcomes(2);
  std::vector<std::thread> ranks;
  const TimePoint begin = Clock::now();
  std::atomic<int> here{0};
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      for (++here; here < 2;) { // each has its whole timeout to look
        std::this_thread::yield();
      }
      RendezvousConfig config = configOf(rank, size, kShortMs);
      config.takeover = takeover;
      SealedStore sealed(store, secret == nullptr ? jobsSecret() : *secret);
      Outcome& outcome = outcomes[static_cast<size_t>(rank)];
      outcome = tryToMeet(secret == nullptr ? store : static_cast<Store&>(sealed), config);
      // From one moment for both: the timeout of the first one ends the other, which may have started later.
      outcome.elapsed_ms = testing::elapsedMs(begin);
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return outcomes;
}

TEST(Notices, AreLoggedAndNamedAtTheTimeoutAndEndNoWaitBefore) {
  for (const Secret* secret : {static_cast<const Secret*>(nullptr), &jobsSecret()}) {
    for (const Takeover takeover : {Takeover::Never, Takeover::FromEndedRun}) {
      const LoggedLines collected;
      MemoryStore store; // the rank that posts has no secret
      postNotice(store, "world", "", {2, "b", kReason});
      for (const Outcome& outcome : waitForOthers(store, secret, takeover)) {
        EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
        EXPECT_EQ(outcome.error.peer, 2);
        EXPECT_THAT(
            outcome.error.summary,
            HasSubstr(std::string("rank 2 on b has written into the store that it cannot join: ").append(kReason)));
        EXPECT_GE(outcome.elapsed_ms, kShortMs) << "an unsealed notice ended the wait";
      }
      const std::vector<std::string> lines = LoggedLines::all();
      ASSERT_EQ(lines.size(), 2U) << "one for each rank";
      for (const std::string& line : lines) {
        EXPECT_THAT(
            line,
            HasSubstr(std::string("rank 2 on b has written into the store that it cannot join: ").append(kReason)));
      }
    }
  }
}

// A stranger has written one for each rank of a large world, while two ranks of it wait for the others.
TEST(Notices, AThousandEndNoWaitAndFillNoLog) {
  constexpr int kSize = 1000;
  const LoggedLines collected;
  MemoryStore store;
  for (int rank = 0; rank < kSize; ++rank) {
    postNotice(store, "world", "", {rank, "b", std::string("\x1b[2J") + kReason});
  }
  for (const Outcome& outcome : waitForOthers(store, &jobsSecret(), Takeover::Never, kSize)) {
    EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
    EXPECT_GE(outcome.elapsed_ms, kShortMs) << "an unsealed notice ended the wait";
    EXPECT_THAT(outcome.error.summary, HasSubstr("rank 2 on b has written"));
    EXPECT_THAT(outcome.error.summary, HasSubstr("rank 3 on b has written"));
    EXPECT_THAT(outcome.error.summary, Not(HasSubstr("rank 4 on b"))) << "two are quoted";
    EXPECT_EQ(outcome.error.summary.find('\x1b'), std::string::npos);
  }
  const std::vector<std::string> lines = LoggedLines::all();
  EXPECT_EQ(lines.size(), 32U) << "16 for each of the ranks that wait";
  for (const std::string& line : lines) {
    EXPECT_THAT(line, HasSubstr("on b has written into the store that it cannot join: "));
    EXPECT_EQ(line.find_first_of("\x1b\n"), std::string::npos) << line;
  }
}

TEST(Notices, OfRankZeroAreNamedByRanksThatFollowIt) {
  MemoryStore store;
  postNotice(store, "world", "", {0, "a", kReason});
  RendezvousConfig config = configOf(1, 2, kShortMs);
  config.takeover = Takeover::FromEndedRun;
  SealedStore sealed(store, jobsSecret());
  const Outcome outcome = tryToMeet(sealed, config);
  EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
  EXPECT_THAT(
      outcome.error.summary,
      HasSubstr(std::string("rank 0 on a has written into the store that it cannot join: ") + kReason));
}

// It came in the end, or the notice was of an earlier run, or somebody else's.
TEST(Notices, OfARankThatIsThereAreNotNamed) {
  MemoryStore store;
  postNotice(store, "world", "", {1, "b", kReason});
  for (const Outcome& outcome : waitForOthers(store, nullptr)) {
    EXPECT_EQ(outcome.error.peer, 2);
    EXPECT_THAT(outcome.error.summary, Not(HasSubstr("has written")));
  }
}

TEST(Notices, OfStrangersFillNeitherLogNorTerminal) {
  const LoggedLines collected;
  MemoryStore store;
  const std::string prefix = "pycomm/world/notice/";
  store.set(prefix + "0", "");
  store.set(prefix + "1", "no line");
  store.set(prefix + "2", "\x1b[31mb\n\x1b[2Jgone\nand " + std::string(100000, 'x'));
  for (int rank = 3; rank < 1000; ++rank) {
    store.set(prefix + std::to_string(rank), "b\nagain");
  }
  Notices notices(store, "pycomm/world/", "", 1000);
  const TimePoint begin = Clock::now();
  for (int turn = 1; turn < 100; ++turn) {
    notices.poll([](int rank) { return rank != 3; }, begin + std::chrono::seconds(turn));
  }
  const std::vector<std::string> lines = LoggedLines::all();
  EXPECT_EQ(lines.size(), 16U);
  for (const std::string& line : lines) {
    EXPECT_EQ(line.find_first_of("\x1b\n"), std::string::npos) << line;
    EXPECT_LT(line.size(), 2000U);
    EXPECT_THAT(line, Not(HasSubstr("rank 3 "))) << "it has come";
  }
  EXPECT_THAT(lines.front(), HasSubstr("rank 2 "));
}

// A store that outlives a run keeps its notices, and each of the ranks that are missing now has a key of its own.
TEST(Notices, OfEarlierRunsHideNone) {
  const LoggedLines collected;
  MemoryStore store;
  for (int rank = 0; rank < 100; ++rank) {
    postNotice(store, "world", "", {rank, "b", "of an earlier run"});
  }
  postNotice(store, "world", "", {99, "b", kReason});
  Notices notices(store, "pycomm/world/", "", 100);
  const TimePoint begin = Clock::now();
  for (int turn = 1; turn < 5; ++turn) {
    notices.poll([](int rank) { return rank == 99; }, begin + std::chrono::seconds(turn));
  }
  ASSERT_EQ(LoggedLines::all().size(), 1U);
  EXPECT_THAT(LoggedLines::all().front(), HasSubstr(kReason));
}

// A launcher has started the job again on the same store, and one rank takes long to come.
TEST(Notices, OfAnEarlierStartOfTheJobAreNeitherLoggedNorNamed) {
  const LoggedLines collected;
  MemoryStore store;
  postNotice(store, "world", "run.0", {1, "b", kReason});
  RendezvousConfig config = configOf(0, 2, 600);
  config.takeover = Takeover::FromEndedRun;
  config.life = "run.1";
  const Outcome outcome = tryToMeet(store, config);
  EXPECT_EQ(outcome.error.code, ErrorCode::RendezvousTimeout);
  EXPECT_THAT(outcome.error.summary, Not(HasSubstr("has written")));
  EXPECT_TRUE(LoggedLines::all().empty());
  config.life = "run.0";
  config.deadline = Deadline::after(600);
  EXPECT_THAT(tryToMeet(store, config).error.summary, HasSubstr("rank 1 on b has written"));
}

// Nobody says which start this is: at least one that has come since leaves none for the next.
TEST(Notices, GoWhenTheirRankComes) {
  MemoryStore store;
  postNotice(store, "world", "", {1, "b", kReason});
  EXPECT_EQ(tryToMeet(store, configOf(1, 2, 100)).error.code, ErrorCode::RendezvousTimeout);
  Notices notices(store, "pycomm/world/", "", 2);
  EXPECT_FALSE(notices.of(1));
}

TEST(Notices, AreNotLookedForWhereNobodyIsLate) {
  MemoryStore store;
  Notices notices(store, "pycomm/world/", "", 3);
  const int64_t calls = store.calls();
  const TimePoint begin = Clock::now();
  for (int turn = 0; turn < 50; ++turn) {
    notices.poll([](int /*rank*/) { return true; }, begin);
  }
  EXPECT_EQ(store.calls(), calls);
}

} // namespace
} // namespace pycomm
