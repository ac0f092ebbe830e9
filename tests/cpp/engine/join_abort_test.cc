#include "engine/join_abort.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/ranks.h"
#include "transport/error_matchers.h"
#include "transport/secure/tls_contexts.h"
#include "within.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

/// Calls back when a key is looked for the nth time.
class CountedStore final : public Store {
 public:
  CountedStore(Store& store, int nth, std::function<void()> then) : store_(store), left_(nth), then_(std::move(then)) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    return store_.get(key, deadline);
  }
  bool has(const std::string& key) override {
    if (left_.fetch_sub(1) == 1) {
      then_();
    }
    return store_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(key, amount);
  }

 private:
  Store& store_;
  std::atomic<int> left_;
  const std::function<void()> then_;
};

ErrorRecord reasonOf(int rank) {
  ErrorRecord record;
  record.code = ErrorCode::Aborted;
  record.rank = record.peer = rank;
  record.host = record.peer_host = localHostName();
  record.summary = "Rank " + std::to_string(rank) + " was stopped in a test.";
  return record;
}

/// Three ranks join. One is aborted when it looks into the store for the nth time.
struct Aborted {
  std::atomic<bool> happened{false};
  std::promise<void> aborted; ///< by another thread than the one that joins
  std::vector<ErrorRecord> records; ///< by rank; Ok without an error
  std::vector<std::atomic<bool>> complete; ///< by rank: its join returned
};

void abortAt(
    Aborted& found,
    int victim,
    int nth,
    const std::shared_ptr<const Secret>& secret,
    const std::function<void(JoinAbort&)>& begin = {}) {
  constexpr int kSize = 3;
  SharedStore store;
  std::atomic<int> joined{0};
  found.records.resize(kSize);
  found.complete = std::vector<std::atomic<bool>>(kSize);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      ErrorRecord& record = found.records[static_cast<size_t>(rank)];
      record.code = ErrorCode::Ok;
      Engine engine;
      JoinAbort abort;
      if (rank == victim && begin) {
        begin(abort);
      }
      CountedStore counted(store, rank == victim ? nth : 0, [&] {
        found.happened = true;
        abort.abort(reasonOf(victim));
      });
      std::optional<SealedStore> sealed;
      Group::Config config = groupConfig(rank, kSize);
      config.rendezvous.deadline = Deadline::after(30000);
      config.security.secret = secret;
      if (secret != nullptr) {
        sealed.emplace(counted, *secret);
      }
      try {
        const auto group = Group::join(engine, sealed ? static_cast<Store&>(*sealed) : counted, config, abort);
        found.complete[static_cast<size_t>(rank)] = true;
        ++joined;
        // One that is complete when the abort comes fails within milliseconds. If none comes, all have joined.
        for (const Deadline end = Deadline::after(10000); !group->failure() && !end.expired();) {
          if (joined == kSize && !found.happened && !begin) {
            break;
          }
          const auto barrier = group->start(barrierCall(end));
          EXPECT_TRUE(barrier->wait(Deadline::after(20000)));
          if (barrier->error()) {
            record = *barrier->error();
            break;
          }
        }
        record = group->failure().value_or(record);
        group->close();
      } catch (const Error& error) {
        record = error.record();
      }
      if (rank == victim && begin) {
        found.aborted.get_future().wait();
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
}

// For a rank that is complete, the victim's end may be all that it sees: of a connection that was not complete on the other side.
void expectNamed(int victim, const Aborted& found, const std::string& when) {
  for (size_t rank = 0; rank < found.records.size(); ++rank) {
    const ErrorRecord& record = found.records[rank];
    const std::string where = when + ", rank " + std::to_string(rank) + ": " + record.text();
    EXPECT_EQ(record.rank, static_cast<int>(rank)) << where;
    if (found.complete[rank] && record.code == ErrorCode::PeerDead && record.peer == victim) {
      continue;
    }
    EXPECT_EQ(record.code, ErrorCode::Aborted) << where;
    EXPECT_EQ(record.peer, victim) << where;
    EXPECT_THAT(record.summary, HasSubstr("Rank " + std::to_string(victim) + " was stopped in a test")) << where;
  }
}

void expectNamedOnAllRanks(int victim, const std::shared_ptr<const Secret>& secret) {
  constexpr int kMost = 400;
  int nth = 1;
  for (int step = 1; nth < kMost; nth += step, step = nth > 20 ? 7 : 1) {
    Aborted found;
    abortAt(found, victim, nth, secret);
    if (!found.happened) {
      break; // it looks less often
    }
    expectNamed(victim, found, "look " + std::to_string(nth));
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
  EXPECT_GT(nth, 5);
}

TEST(JoinAbort, EndsTheJoinOnAllRanksAtAnyLookIntoTheStore) {
  for (const int victim : {0, 1}) {
    expectNamedOnAllRanks(victim, nullptr);
  }
}

TEST(JoinAbort, EndsTheJoinOnAllRanksAtAnyLookIntoASealedStore) {
  for (const int victim : {0, 2}) {
    expectNamedOnAllRanks(victim, theSecret());
  }
}

TEST(JoinAbort, EndsTheJoinOnAllRanksAtAnyTime) {
  for (int delay_us = 0; delay_us < 30000; delay_us += 500) {
    Aborted found;
    std::thread aborting;
    abortAt(found, 1, 0, delay_us % 1000 == 0 ? nullptr : theSecret(), [&](JoinAbort& abort) {
      aborting = std::thread([&, delay_us] {
        std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        found.happened = true;
        abort.abort(reasonOf(1));
        found.aborted.set_value();
      });
    });
    aborting.join();
    expectNamed(1, found, std::to_string(delay_us) + " us");
    if (HasFailure()) {
      return;
    }
  }
}

// The claims of attempts that ended early hold up no later one.
TEST(JoinAbort, AnAbortedRankMayJoinTheNextGroup) {
  SharedStore store;
  Engine engine;
  for (int attempt = 0; attempt < 3; ++attempt) {
    JoinAbort abort;
    abort.abort(reasonOf(1));
    abort.abort(reasonOf(0)); // too late
    const ErrorRecord record = errorOf([&] { (void)Group::join(engine, store, groupConfig(1, 2), abort); });
    EXPECT_EQ(record.code, ErrorCode::Aborted) << record.text();
    EXPECT_THAT(record.summary, HasSubstr("Rank 1 was stopped"));
  }
  Engine other;
  const ErrorRecord record = errorOf([&] { (void)Group::join(other, store, groupConfig(0, 2)); });
  EXPECT_EQ(record.code, ErrorCode::Aborted) << record.text(); // of the group that the first attempt began
  EXPECT_EQ(record.peer, 1);
  const TimePoint begin = Clock::now();
  std::thread first([&] { EXPECT_NO_THROW(Group::join(other, store, groupConfig(0, 2))->close()); });
  std::shared_ptr<Group> group; // outlives the other's close
  EXPECT_NO_THROW(group = Group::join(engine, store, groupConfig(1, 2)));
  first.join();
  EXPECT_WITHIN_MS(elapsedMs(begin), 3000); // an unknown owner is waited for for 5 s
}

} // namespace
} // namespace pycomm::testing
