// Groups with a secret while their links change keys, and while somebody on the network changes records.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "engine/expect_done.h"
#include "engine/ranks.h"
#include "engine/sums.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/secure/record_pump.h"
#include "transport/secure/tls_contexts.h"
#include "transport/socket_pairs.h"
#include "within.h"

namespace pycomm::testing::secret_links { // others compiled with this have the same names
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr size_t kNumel = 60001; // of a rank's part: some fifteen records

void withSecret(Group::Config& config) {
  config.transport = Transport::Tcp;
  config.security.secret = theSecret();
  config.security.secret_origin = "the test";
}

/// Element `i` of what rank `from` has for rank `to`.
float valueOf(int from, int to, size_t i) {
  return static_cast<float>(from * 1000 + to * 100 + static_cast<int>(i % 97));
}

std::vector<float> partFor(int from, int to) {
  std::vector<float> part(kNumel);
  for (size_t i = 0; i < kNumel; ++i) {
    part[i] = valueOf(from, to, i);
  }
  return part;
}

std::vector<float> joined(const std::vector<std::vector<float>>& parts) {
  std::vector<float> all;
  for (const std::vector<float>& part : parts) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// Calls it, and compares the result.
void callAndCheck(Rank& self, Collective kind) {
  const int rank = self.rank;
  const int next = (rank + 1) % self.size;
  const int before = (rank + self.size - 1) % self.size;
  std::vector<std::vector<float>> to_each;
  std::vector<std::vector<float>> from_each;
  std::vector<std::vector<float>> own_of_each;
  for (int other = 0; other < self.size; ++other) {
    to_each.push_back(partFor(rank, other));
    from_each.push_back(partFor(other, rank));
    own_of_each.push_back(partFor(other, 0));
  }
  std::vector<float> sum(kNumel);
  for (const std::vector<float>& part : from_each) {
    for (size_t i = 0; i < kNumel; ++i) {
      sum[i] += part[i];
    }
  }
  std::vector<float> input = partFor(rank, 0);
  std::vector<float> expected;
  Group::Call call;
  call.schedule.root = 1;
  switch (kind) {
    case Collective::Broadcast:
      expected = partFor(1, 0);
      break;
    case Collective::AllGather:
      expected = joined(own_of_each);
      break;
    case Collective::ReduceScatter:
      input = joined(to_each);
      expected = sum;
      call.schedule.reduce_op = ReduceOp::Sum;
      break;
    case Collective::AllToAll:
      input = joined(to_each);
      expected = joined(from_each);
      break;
    case Collective::Recv:
      call.peer = before;
      expected = partFor(before, rank);
      break;
    default:
      FAIL() << "not tried here";
  }
  std::vector<float> output(expected.size());
  if (kind == Collective::Broadcast) {
    output = input;
    call.input = viewOf(output);
  } else {
    call.input = viewOf(input);
  }
  call.output = viewOf(output);
  call.schedule.kind = kind;
  call.schedule.dtype = DType::Float32;
  call.schedule.numel = static_cast<int64_t>(kNumel);
  call.deadline = Deadline::after(60000);
  std::shared_ptr<Operation> sending;
  std::vector<float> message = partFor(rank, next);
  if (kind == Collective::Recv) {
    Group::Call send = call;
    send.schedule.kind = Collective::Send;
    send.input = viewOf(message);
    send.output = {};
    send.peer = next;
    call.input = {};
    sending = self.group.start(std::move(send));
  }
  expectDone(self.group.start(std::move(call)), 60000);
  if (sending) {
    expectDone(sending, 60000);
  }
  EXPECT_EQ(output, expected) << collectiveName(kind);
}

// A new key for every eight records: there are some for every operation, or the test has not tested it.
TEST(GroupSecret, KeysChangeInEveryCollective) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "counts them by a fault point";
  }
  const auto changes = [](const std::function<void(Rank&)>& body, uint64_t records_per_key) {
    armFaultPoints("tls.key_update:99999999:nomem"); // never; it counts
    runRanks(kRanks, body, [&](Group::Config& config) {
      withSecret(config);
      config.security.tls.records_per_key = records_per_key;
    });
    const int64_t visits = faultPointTallies().front().visits;
    armFaultPoints("");
    return visits;
  };
  EXPECT_EQ(changes(sumEverySize, TlsOptions().records_per_key), 0);
  EXPECT_GT(changes(sumEverySize, 8), 100) << "all_reduce";
  for (const Collective kind :
       {Collective::Broadcast,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllToAll,
        Collective::Recv}) {
    const int64_t some = changes([kind](Rank& self) { callAndCheck(self, kind); }, 8);
    // Two parts travel at least, and end to end each is 15 records: a key for the first eight, and one more.
    EXPECT_GE(some, 2) << collectiveName(kind);
    EXPECT_GT(changes([kind](Rank& self) { callAndCheck(self, kind); }, 1), 8 * some / 2) << collectiveName(kind);
  }
}

/// Somebody on the network between two ranks: he has the first connect to him, and passes all on to the second.
class Between {
 public:
  enum class Flip { Nothing, DataThere, HeartbeatThere, HeartbeatBack };

  ~Between() {
    stop_ = true;
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  /// Instead of the second rank's address, from the text that holds it.
  std::string insteadOf(const std::string& address) {
    if (!thread_.joinable()) {
      target_ = SocketAddress::fromWireText(address).value();
      thread_ = std::thread([this] { run(); });
    }
    return listener_.address().wireText();
  }
  /// The next such record is changed: of those that the first rank sends (There), or of the second's (Back).
  void flipNext(Flip what) {
    armed_ = what;
  }
  [[nodiscard]] bool flipped() const {
    return flipped_;
  }
  /// Valid once it has flipped().
  [[nodiscard]] TimePoint when() const {
    return when_;
  }
  [[nodiscard]] size_t connections() const {
    return connections_;
  }

 private:
  struct Passed {
    std::unique_ptr<SocketLink> near;
    std::unique_ptr<SocketLink> far;
    std::unique_ptr<RecordPump> there;
    std::unique_ptr<RecordPump> back;
  };

  void change(PassedRecord& record, Flip heartbeat, bool there) {
    constexpr size_t kData = 1000; // heartbeats are smaller
    const bool is_data = record.bytes.size() > kData;
    Flip wanted = is_data ? Flip::DataThere : heartbeat;
    if ((there || !is_data) && armed_.compare_exchange_strong(wanted, Flip::Nothing)) {
      record.bytes.back() ^= 1;
      when_ = Clock::now();
      flipped_ = true;
    }
  }

  void run() {
    std::vector<Passed> all;
    while (!stop_) {
      if (auto incoming = listener_.accept()) {
        Passed passed;
        passed.near = std::make_unique<SocketLink>(std::move(incoming->fd));
        passed.far = connectSocket({}, target_, Deadline::after(5000), kNoAbort);
        passed.there = std::make_unique<RecordPump>(
            *passed.near, *passed.far, [this](PassedRecord& record) { change(record, Flip::HeartbeatThere, true); });
        passed.back = std::make_unique<RecordPump>(
            *passed.far, *passed.near, [this](PassedRecord& record) { change(record, Flip::HeartbeatBack, false); });
        all.push_back(std::move(passed));
        ++connections_;
      }
      for (Passed& passed : all) {
        passed.there->run();
        passed.back->run();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  Listener listener_ = Listener::bind(kLoopback, {});
  SocketAddress target_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
  std::atomic<Flip> armed_{Flip::Nothing};
  std::atomic<bool> flipped_{false};
  std::atomic<size_t> connections_{0};
  TimePoint when_{};
};

/// The store as one rank reads it: `to` has another address. It is above the seal, so that it can; on a network a route would.
class Rerouted final : public Store {
 public:
  Rerouted(Store& store, Between& between, size_t to) : store_(store), between_(between), to_(to) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(key, isAbout(key, "/address/all") ? withAddress(value, true_address_) : value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    const std::string value = store_.get(key, deadline);
    if (isAbout(key, "/address/" + std::to_string(to_))) { // rank 0 reads each, and makes the list that the others read
      true_address_ = value;
      return between_.insteadOf(value);
    }
    return isAbout(key, "/address/all") ? withAddress(value, between_.insteadOf(splitTexts(value).value()[to_]))
                                        : value;
  }
  bool has(const std::string& key) override {
    return store_.has(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(key, amount);
  }
  [[nodiscard]] bool sealed() const noexcept override {
    return store_.sealed();
  }
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override {
    return store_.find(key);
  }

 private:
  static bool isAbout(const std::string& key, const std::string& end) {
    return key.size() > end.size() && key.compare(key.size() - end.size(), end.size(), end) == 0;
  }
  [[nodiscard]] std::string withAddress(const std::string& list, const std::string& address) const {
    std::vector<std::string> addresses = splitTexts(list).value();
    addresses[to_] = address;
    return joinTexts(addresses);
  }

  Store& store_;
  Between& between_;
  const size_t to_;
  std::string true_address_;
};

/// Ranks of which one, `from`, reaches another, `to`, through somebody who changes a record: all of them name `sender`.
void expectTheSenderIsNamed(int size, int from, int to, Between::Flip what, int sender) {
  SharedStore shared;
  Between between;
  std::vector<std::thread> threads;
  std::atomic<int> past_barrier{0};
  std::atomic<int> ended{0};
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Engine engine;
        Group::Config config = groupConfig(rank, size);
        withSecret(config);
        config.dead_after_ms = 3000; // a heartbeat each 500 ms
        SealedStore sealed(shared, *theSecret());
        Rerouted rerouted(sealed, between, static_cast<size_t>(to));
        const auto group = Group::join(engine, rank == from ? static_cast<Store&>(rerouted) : sealed, config);
        Rank self{rank, size, engine, *group};
        sumEverySize(self); // what nobody changes arrives
        expectDone(group->start(barrierCall()));
        waitForAll(past_barrier, size);
        if (rank == from) {
          between.flipNext(what);
        }
        const Deadline patience = Deadline::after(20000);
        while (what != Between::Flip::DataThere && !between.flipped() && !patience.expired()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        std::vector<float> values = operandOf(rank, 3000000);
        const auto operation = group->start(allReduceCall(values));
        EXPECT_TRUE(group->wait(*operation, Deadline::after(20000)));
        const TimePoint end = Clock::now();
        const auto error = operation->error();
        ASSERT_TRUE(error) << "rank " << rank;
        EXPECT_EQ(error->code, ErrorCode::DataCorrupt) << error->text();
        EXPECT_EQ(error->peer, sender) << error->text();
        EXPECT_THAT(error->summary, HasSubstr("Bytes from rank " + std::to_string(sender) + " on"));
        EXPECT_THAT(error->cause, HasSubstr("bad record mac"));
        EXPECT_TRUE(between.flipped());
        const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(end - between.when()).count();
        EXPECT_WITHIN_MS(took, 1000);
        ++ended;
        group->close();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(ended, size);
  EXPECT_GE(between.connections(), 1U) << "rank " << from << " has gone another way";
}

// Rank 0 sees the broken record, and the others what becomes of their connections, or its report.
TEST(GroupSecret, AChangedByteEndsTheOperationOnAllRanks) {
  for (const int size : {2, 3}) { // in a ring
    expectTheSenderIsNamed(size, size - 1, 0, Between::Flip::DataThere, size - 1);
  }
}

// The lower rank opens the control link. Of two ranks, neither can then say to the other what it has seen: TLS's alert does.
TEST(GroupSecret, AChangedHeartbeatEndsTheGroupAndAllRanksNameItsSender) {
  for (const int size : {2, 3}) {
    expectTheSenderIsNamed(size, size - 2, size - 1, Between::Flip::HeartbeatThere, size - 2);
    expectTheSenderIsNamed(size, size - 2, size - 1, Between::Flip::HeartbeatBack, size - 1);
  }
}

} // namespace
} // namespace pycomm::testing::secret_links
