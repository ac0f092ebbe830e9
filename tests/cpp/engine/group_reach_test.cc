// Ranks that cannot connect while a group is being made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "ranks.h"
#include "transport/rendezvous/rendezvous.h"
#include "within.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

// Rank 1 is killed between the connection and its reply to the Hello. It has no word that the kernel marks, as on another host.
TEST(Reach, ARankThatDiesBeforeItRepliesIsDead) {
  SharedStore store;
  const auto configOf = [](int rank) {
    RendezvousConfig config;
    config.rank = rank;
    config.size = 2;
    config.group_name = "test";
    config.deadline = Deadline::after(20000);
    return config;
  };
  TimePoint died{};
  std::thread dies([&] {
    AbortToken none;
    Rendezvous met = meet(store, configOf(1), none);
    std::optional<Listener::Incoming> connection;
    for (const Deadline most = Deadline::after(20000); !connection && !most.expired();) {
      connection = met.listener.accept();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    EXPECT_TRUE(connection);
    died = Clock::now();
    met.listener = Listener(); // before the connection, as if at once
  });
  ErrorRecord record;
  {
    Engine engine;
    Group::Config config;
    config.rendezvous = configOf(0);
    try {
      (void)Group::join(engine, store, config);
    } catch (const Error& error) {
      record = error.record();
    }
  }
  const auto took = Clock::now();
  dies.join();
  EXPECT_EQ(record.code, ErrorCode::PeerDead) << record.text();
  EXPECT_EQ(record.peer, 1) << record.text();
  EXPECT_STREQ(record.phase.text(), "connect");
  EXPECT_THAT(record.summary, HasSubstr("Rank 1 on "));
  EXPECT_THAT(record.summary, HasSubstr("its connection ended without a goodbye"));
  EXPECT_THAT(record.cause, HasSubstr("ECONNREFUSED"));
  EXPECT_WITHIN_MS(std::chrono::duration_cast<std::chrono::milliseconds>(took - died).count(), 2000);
}

/// What each rank's join() throws; Ok where it returns.
std::vector<ErrorRecord> joinAll(
    Store& store,
    int size,
    const std::function<void(Group::Config&)>& adjust,
    int without = -1) {
  std::vector<ErrorRecord> records(static_cast<size_t>(size));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    records[static_cast<size_t>(rank)].code = ErrorCode::Ok;
    if (rank == without) {
      continue;
    }
    ranks.emplace_back([&, rank] {
      Engine engine;
      Group::Config config = groupConfig(rank, size);
      config.transport = Transport::Tcp;
      adjust(config);
      try {
        Group::join(engine, store, config)->close();
      } catch (const Error& error) {
        records[static_cast<size_t>(rank)] = error.record();
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  return records;
}

/// Rank 0's: once it has written the list of addresses, it goes on when rank 1 has ended.
class StoreUntilGone final : public Store {
 public:
  StoreUntilGone(Store& under, const std::atomic<bool>& gone) : under_(under), gone_(gone) {}
  void set(const std::string& key, const std::string& value) override {
    under_.set(key, value);
    for (const Deadline most = Deadline::after(10000);
         key.find("/address/all") != std::string::npos && !gone_ && !most.expired();) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::string get(const std::string& key, Deadline deadline) override {
    return under_.get(key, deadline);
  }
  bool has(const std::string& key) override {
    return under_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return under_.add(key, amount);
  }

 private:
  Store& under_;
  const std::atomic<bool>& gone_;
};

// Rank 1 ends before anybody connects, as on another host. Rank 0 is the only one that tries to connect to it; rank 2 waits for it.
TEST(Reach, ARankThatNobodyReachesEndsAllJoins) {
  SharedStore store;
  std::atomic<bool> gone{false};
  StoreUntilGone held(store, gone);
  std::thread ends([&] {
    AbortToken none;
    (void)meet(store, groupConfig(1, 3).rendezvous, none); // its listener ends with it
    gone = true;
  });
  const TimePoint begin = Clock::now();
  const auto records = joinAll(held, 3, [](Group::Config&) {}, 1);
  const int64_t took_ms = elapsedMs(begin);
  ends.join();
  EXPECT_TRUE(gone);
  for (const size_t rank : {0U, 2U}) {
    EXPECT_EQ(records[rank].code, ErrorCode::ConnectFailed) << records[rank].text();
    EXPECT_EQ(records[rank].peer, 1) << records[rank].text();
    EXPECT_THAT(records[rank].cause, HasSubstr("ECONNREFUSED")) << records[rank].text();
  }
  EXPECT_WITHIN_MS(took_ms, 12000); // 3 s of refused connections; the deadline of the joins is 20 s
}

// Between the meeting and the first connections.
TEST(Reach, ARankThatMayNotGoOnTellsTheOthersAndGivesItsRankBack) {
  SharedStore store;
  const TimePoint begin = Clock::now();
  const auto records = joinAll(store, 2, [](Group::Config& config) {
    config.security.policy = config.rendezvous.rank == 0 ? SecurityPolicy::Require : SecurityPolicy::Auto;
  });
  EXPECT_WITHIN_MS(elapsedMs(begin), 12000);
  EXPECT_THAT(records[0].summary, HasSubstr("PYCOMM_SECURITY=require, but there is no secret"));
  EXPECT_THAT(records[1].summary, HasSubstr("cannot join: PYCOMM_SECURITY=require, but there is no secret"));
  EXPECT_EQ(records[1].peer, 0);
  for (const ErrorRecord& record : joinAll(store, 2, [](Group::Config&) {})) {
    EXPECT_EQ(record.code, ErrorCode::Ok) << record.text();
  }
}

} // namespace
} // namespace pycomm::testing
