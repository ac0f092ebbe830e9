#include "engine/join_abort.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/ranks.h"
#include "transport/secure/tls_contexts.h"

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
  std::vector<ErrorRecord> records; ///< by rank; Ok without an error
};

void abortAt(Aborted& found, int victim, int nth, const std::shared_ptr<const Secret>& secret) {
  constexpr int kSize = 3;
  SharedStore store;
  std::atomic<int> joined{0};
  found.records.resize(kSize);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      ErrorRecord& record = found.records[static_cast<size_t>(rank)];
      record.code = ErrorCode::Ok;
      Engine engine;
      JoinAbort abort;
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
        ++joined;
        // One that is complete when the abort comes fails within milliseconds.
        for (const Deadline end = Deadline::after(10000); !group->failure() && !end.expired() && joined < kSize + 1;) {
          joined += joined == kSize && !found.happened ? 1 : 0;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        record = group->failure().value_or(record);
        group->close();
      } catch (const Error& error) {
        record = error.record();
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
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
    for (size_t rank = 0; rank < found.records.size(); ++rank) {
      const ErrorRecord& record = found.records[rank];
      const std::string where = "look " + std::to_string(nth) + ", rank " + std::to_string(rank) + ": " + record.text();
      EXPECT_EQ(record.code, ErrorCode::Aborted) << where;
      EXPECT_EQ(record.rank, static_cast<int>(rank)) << where;
      EXPECT_EQ(record.peer, victim) << where;
      EXPECT_THAT(record.summary, HasSubstr("Rank " + std::to_string(victim) + " was stopped in a test")) << where;
    }
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
  EXPECT_GT(nth, 5);
}

TEST(JoinAbort, EndsTheJoinOnAllRanksWhereverItComes) {
  for (const int victim : {0, 1}) {
    expectNamedOnAllRanks(victim, nullptr);
  }
}

TEST(JoinAbort, EndsTheJoinOnAllRanksInASealedStore) {
  for (const int victim : {0, 2}) {
    expectNamedOnAllRanks(victim, theSecret());
  }
}

TEST(JoinAbort, BeforeTheJoinNothingIsClaimed) {
  SharedStore store;
  for (int attempt = 0; attempt < 3; ++attempt) {
    Engine engine;
    JoinAbort abort;
    abort.abort(reasonOf(1));
    abort.abort(reasonOf(0)); // too late
    try {
      (void)Group::join(engine, store, groupConfig(1, 2), abort);
      FAIL() << "it joined";
    } catch (const Error& error) {
      EXPECT_EQ(error.record().code, ErrorCode::Aborted);
      EXPECT_THAT(error.record().summary, HasSubstr("Rank 1 was stopped"));
    }
  }
}

} // namespace
} // namespace pycomm::testing
