#include "transport/net/name_lookup.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "transport/error_matchers.h"
#include "transport/rendezvous_try.h"
#include "within.h"

namespace pycomm {
namespace {

using testing::elapsedMs;
using testing::errorOf;
using testing::kNoAbort;

/// A resolver that does not answer before it is let go, and counts who asks.
struct SlowResolver {
  NameLookups::Resolver resolver() {
    return [answer = answer.get_future().share(), asked = asked](const std::string&) {
      ++*asked;
      answer.wait();
      return std::vector<SocketAddress>{SocketAddress::parse("10.0.0.7", 0)};
    };
  }
  std::promise<void> answer;
  std::shared_ptr<std::atomic<int>> asked = std::make_shared<std::atomic<int>>(0);
};

TEST(NameLookups, AsksOncePerName) {
  std::atomic<int> asked{0};
  NameLookups lookups([&](const std::string&) {
    ++asked;
    return std::vector<SocketAddress>{SocketAddress::parse("10.0.0.7", 0)};
  });
  for (int i = 0; i < 3; ++i) {
    const auto found = lookups.find("node-a", Deadline::after(20000), kNoAbort);
    ASSERT_EQ(found.size(), 1U);
    EXPECT_EQ(found[0].ip(), "10.0.0.7");
  }
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(lookups.find("192.168.1.1", Deadline::after(20000), kNoAbort).at(0).ip(), "192.168.1.1");
  EXPECT_EQ(asked, 1);
}

TEST(NameLookups, ANameWithoutAnAddressIsAskedForAgain) {
  std::atomic<int> asked{0};
  NameLookups lookups([&](const std::string&) -> std::vector<SocketAddress> {
    ++asked;
    throw Error(ErrorCode::ConnectFailed, "no such name");
  });
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(lookups.find("node-a", Deadline::after(20000), kNoAbort).empty());
  }
  EXPECT_EQ(asked, 2);
}

// The first group waits for half of its time. The next ones are not held up, and have the answer once it is there.
TEST(NameLookups, AResolverThatHangsHoldsNobodyUpBeyondItsDeadline) {
  SlowResolver slow;
  NameLookups lookups(slow.resolver());
  const TimePoint began = Clock::now();
  EXPECT_TRUE(lookups.find("node-a", Deadline::after(400), kNoAbort).empty());
  EXPECT_GE(elapsedMs(began), 190);
  const TimePoint second = Clock::now();
  EXPECT_TRUE(lookups.find("node-a", Deadline::after(60000), kNoAbort).empty());
  EXPECT_WITHIN_MS(elapsedMs(second), 5000);
  slow.answer.set_value();
  std::vector<SocketAddress> found;
  for (const Deadline end = Deadline::after(20000); found.empty() && !end.expired(); std::this_thread::yield()) {
    found = lookups.find("node-a", Deadline::after(20000), kNoAbort);
  }
  EXPECT_EQ(found.size(), 1U);
  EXPECT_EQ(*slow.asked, 1);
}

TEST(NameLookups, AnAbortEndsTheWait) {
  SlowResolver slow;
  NameLookups lookups(slow.resolver());
  AbortToken abort;
  std::thread aborter([&] {
    while (*slow.asked == 0) {
      std::this_thread::yield();
    }
    ErrorRecord reason;
    reason.code = ErrorCode::Aborted;
    abort.abort(reason);
  });
  const TimePoint began = Clock::now();
  const auto error = errorOf([&] { (void)lookups.find("node-a", Deadline::after(60000), abort); });
  aborter.join();
  slow.answer.set_value();
  EXPECT_EQ(error.code, ErrorCode::Aborted);
  EXPECT_WITHIN_MS(elapsedMs(began), 5000);
}

} // namespace
} // namespace pycomm
