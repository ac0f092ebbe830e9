// Ranks that cannot connect while a group is being made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>

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

} // namespace
} // namespace pycomm::testing
