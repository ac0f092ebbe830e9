// How ranks get to each other: past a crowd of strangers, and after connections that were dropped before they were accepted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_point.h"
#include "engine/ranks.h"
#include "transport/error_matchers.h"
#include "transport/net/socket_link.h"
#include "transport/process.h"
#include "transport/secure/tls_contexts.h"
#include "within.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

bool endsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// A store in which the list of addresses does not appear before it is let through.
class GatedStore final : public Store {
 public:
  explicit GatedStore(SharedStore& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override {
    if (endsWith(key, "/address/1")) {
      address_.set_value(value);
    }
    if (endsWith(key, "/address/all")) {
      reached_ = true;
      while (!open_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    store_.set(key, value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    return store_.get(key, deadline);
  }
  bool has(const std::string& key) override {
    return store_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(key, amount);
  }
  void open() {
    open_ = true;
  }
  [[nodiscard]] bool reached() const {
    return reached_;
  }
  /// Where rank 1 listens, as it writes that.
  [[nodiscard]] SocketAddress address() {
    const std::string text = address_.get_future().get();
    return SocketAddress::fromWireText(text.substr(text.find('\n') + 1)).value(); // a seal ends its line
  }

 private:
  SharedStore& store_;
  std::promise<std::string> address_;
  std::atomic<bool> open_{false};
  std::atomic<bool> reached_{false};
};

Group::Config tcpConfig(int rank, int size) {
  Group::Config config = groupConfig(rank, size);
  config.transport = Transport::Tcp;
  return config;
}

/// The connections that the kernel has for a port, whether a process has accepted them or not. Each counts once: the table changes
/// while it is read, by other processes too, and may then show a line twice. A client elsewhere may have this port as its own.
size_t connectionsTo(uint16_t port) {
  std::set<std::string> ends;
  for (const char* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream table(path);
    std::string number;
    std::string local;
    std::string remote;
    std::string state;
    for (std::string line; std::getline(table, line);) {
      std::istringstream(line) >> number >> local >> remote >> state;
      const size_t colon = local.rfind(':');
      const bool is_port = colon != std::string::npos && std::stoul("0" + local.substr(colon + 1), nullptr, 16) == port;
      if (is_port && state == "01") { // ESTABLISHED
        ends.insert(local + ' ' + remote);
      }
    }
  }
  return ends.size();
}

// How long a group of two takes to form, and to add something up, from the moment when all know where rank 1 listens; with `strangers`
// connections waiting there already, each of which has said one byte: the first of a rank's.
int64_t formed(int strangers, const std::shared_ptr<const Secret>& secret = nullptr) {
  SharedStore shared;
  GatedStore gated(shared);
  TimePoint begin{};
  std::vector<std::thread> ranks;
  std::atomic<int> good{0};
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        Engine engine;
        Group::Config config = tcpConfig(rank, 2);
        config.security.secret = secret;
        std::optional<SealedStore> sealed;
        if (secret != nullptr) {
          sealed.emplace(gated, *secret);
        }
        const auto group = Group::join(engine, sealed ? static_cast<Store&>(*sealed) : gated, config);
        std::vector<float> values(1000, 1.0F);
        const auto operation = group->start(allReduceCall(values));
        good += group->wait(*operation, Deadline::after(20000)) && !operation->error() && values[7] == 2.0F ? 1 : 0;
        group->close();
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  const SocketAddress address = gated.address();
  std::vector<std::unique_ptr<SocketLink>> crowd;
  for (int i = 0; i < strangers; ++i) {
    crowd.push_back(connectSocket({}, address, Deadline::after(20000), kNoAbort));
    const std::byte byte{secret == nullptr ? std::byte{'c'} : std::byte{0x16}};
    writeAll(*crowd.back(), {&byte, 1}, Deadline::after(20000), kNoAbort);
  }
  for (const Deadline deadline = Deadline::after(20000); !gated.reached() && !deadline.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto all = static_cast<size_t>(strangers);
  size_t there = connectionsTo(address.port());
  for (const Deadline deadline = Deadline::after(20000);
       there < all && !deadline.expired();) { // a look may miss some: see there
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    there = connectionsTo(address.port());
  }
  EXPECT_GE(there, all) << "the whole crowd is there";
  begin = Clock::now();
  gated.open();
  for (std::thread& rank : ranks) {
    rank.join();
  }
  EXPECT_EQ(good, 2);
  return elapsedMs(begin);
}

TEST(Admission, AThousandSlowConnectionsDelayAGroupByLessThanASecond) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < 2000) {
    const rlimit wide{std::min<rlim_t>(limit.rlim_max, 4096), limit.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &wide) != 0 || wide.rlim_cur < 2000) {
      GTEST_SKIP() << "1,000 connections need 1,200 files";
    }
  }
  for (const std::shared_ptr<const Secret>& secret : {std::shared_ptr<const Secret>(), theSecret()}) {
    const int64_t alone = formed(0, secret);
    const int64_t crowded = formed(1000, secret);
    EXPECT_WITHIN_MS(crowded, alone + 1000);
  }
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

struct Way {
  const char* name;
  Transport transport;
};

class WithFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!faultPointsBuiltIn()) {
      GTEST_SKIP() << "needs a build with fault points";
    }
  }
  void TearDown() override {
    if (faultPointsBuiltIn()) {
      armFaultPoints("");
    }
  }
};

class Dropped : public WithFaults, public ::testing::WithParamInterface<Way> {};

// The first connections of each kind, control and bulk, are dropped when their Hello has come: nobody has died, and all values are right.
TEST_P(Dropped, BeforeItIsAcceptedAConnectionIsTriedAgain) {
  std::string spec;
  for (const int nth : {1, 2, 3, 5, 6, 8, 9, 12, 15, 16, 17, 20}) {
    spec += (spec.empty() ? "" : ",") + std::string("hello.accept:") + std::to_string(nth) + ":errno=ECONNRESET";
  }
  armFaultPoints(spec);
  const TimePoint begin = Clock::now();
  runRanks(
      4,
      [](Rank& self) {
        for (const size_t numel : {size_t{3}, size_t{100000}}) {
          std::vector<float> values(numel, static_cast<float>(self.rank + 1));
          Group::Call call = allReduceCall(values);
          call.schedule.algorithm = Algorithm::Ring; // over links, whatever memory there is
          const auto operation = self.group.start(std::move(call));
          ASSERT_TRUE(self.group.wait(*operation, Deadline::after(20000)));
          ASSERT_FALSE(operation->error()) << operation->error()->text();
          EXPECT_EQ(std::count(values.begin(), values.end(), 10.0F), static_cast<std::ptrdiff_t>(numel));
        }
      },
      [](Group::Config& config) { config.transport = GetParam().transport; });
  for (const FaultPointTally& tally : faultPointTallies()) {
    EXPECT_EQ(tally.strikes, 1) << tally.point << " of " << tally.visits;
  }
  EXPECT_WITHIN_MS(elapsedMs(begin), 10000);
}

INSTANTIATE_TEST_SUITE_P(
    Ways,
    Dropped,
    ::testing::Values(Way{"Tcp", Transport::Tcp}, Way{"Shared", Transport::Auto}),
    [](const auto& way) { return way.param.name; });

// A peer that drops every connection is not dead and not reached: the deadline says so, and what was tried.
TEST_F(WithFaults, DroppingForEverEndsAtTheDeadlineAndIsNoDeath) {
  armFaultPoints("hello.accept:1+:errno=ECONNRESET");
  SharedStore store;
  const TimePoint begin = Clock::now();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      Engine engine;
      Group::Config config = tcpConfig(rank, 2);
      config.rendezvous.deadline = Deadline::after(4000);
      const ErrorRecord record = errorOf([&] { (void)Group::join(engine, store, config); });
      EXPECT_EQ(record.code, ErrorCode::ConnectFailed) << record.text();
      EXPECT_EQ(record.peer, 1 - rank);
      if (rank == 0) {
        EXPECT_THAT(record.summary, HasSubstr("cannot be reached: it has not replied on 127.0.0.1:"));
        EXPECT_THAT(record.summary, HasSubstr(" connections"));
      }
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  EXPECT_GE(faultPointTallies().front().strikes, 2) << "a dropped connection was not tried again";
  EXPECT_GE(elapsedMs(begin), 3900);
  EXPECT_WITHIN_MS(elapsedMs(begin), 8500);
}

} // namespace
} // namespace pycomm::testing
