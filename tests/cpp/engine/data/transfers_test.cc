#include "engine/data/transfers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "base/error.h"
#include "schedule/make_schedule.h"

namespace pycomm {
namespace {

class CountingLoop final : public Loop {
 public:
  void watch(int, uint32_t, Handler&) override {}
  void unwatch(int) noexcept override {}
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int change) noexcept override {
    busy += change;
  }
  int busy = 0;
};

/// Rank 1 of 2, to which rank 0 broadcasts.
struct TransfersTest : ::testing::Test {
  static constexpr int64_t kNumel = 4;
  const GroupIdentity identity = identityOf();
  Protocol protocol{configOf(identity)};
  CountingLoop lane;
  StagingPool staging{lane.stagingMemory()};
  Transfers transfers{identity, protocol, staging, lane, [](int, OutFrame) {}};
  const TimePoint now = Clock::now();
  std::vector<float> output = std::vector<float>(kNumel);
  const std::vector<float> values = {1, 2, 3, 4};

  static GroupIdentity identityOf() {
    GroupIdentity identity;
    identity.rank = 1;
    identity.size = 2;
    identity.name = "test";
    identity.hash = 7;
    identity.hosts = {"alpha", "beta"};
    return identity;
  }
  static Protocol::Config configOf(const GroupIdentity& identity) {
    Protocol::Config config;
    config.rank = identity.rank;
    config.size = identity.size;
    config.group = identity.hash;
    config.hosts = identity.hosts;
    return config;
  }
  std::shared_ptr<Operation> broadcast(int64_t sequence) {
    ScheduleRequest wish;
    wish.kind = Collective::Broadcast;
    wish.dtype = DType::Float32;
    wish.rank = identity.rank;
    wish.size = identity.size;
    wish.root = 0;
    wish.numel = kNumel;
    Operation::Request request;
    request.id = {static_cast<uint64_t>(sequence), sequence};
    request.schedule = prepare(makeSchedule(wish));
    request.descriptor = Descriptor::of(wish, request.schedule->schedule.algorithm);
    request.output = {reinterpret_cast<std::byte*>(output.data()), output.size() * sizeof(float)};
    return std::make_shared<Operation>(std::move(request));
  }
  FrameHeader frameOf(const Operation& operation) const {
    FrameHeader header;
    header.type = FrameType::Data;
    header.group = identity.hash;
    header.op_id = operation.request().id.id;
    header.payload_nbytes = kNumel * sizeof(float);
    header.aux = kEagerFlag;
    operation.request().descriptor.writeTo(header);
    return header;
  }
  /// The frame of the operation arrives before that.
  void arriveUnexpected(const FrameHeader& header) {
    ASSERT_EQ(protocol.arrived(0, header, now), Protocol::Verdict::Hold);
    Sink sink = transfers.placeUnexpected(header);
    EXPECT_TRUE(sink.unexpected);
    ASSERT_EQ(sink.into.nbytes, header.payload_nbytes);
    std::memcpy(sink.into.ptr, values.data(), sink.into.nbytes);
    EXPECT_FALSE(transfers.arrived(0, header, std::move(sink)));
  }
};

TEST_F(TransfersTest, AFrameGoesStraightToItsPlace) {
  const auto operation = broadcast(1);
  const FrameHeader header = frameOf(*operation);
  transfers.add(operation, now).start();
  EXPECT_EQ(lane.busy, 1);
  EXPECT_EQ(transfers.awaiting(0), operation.get());
  EXPECT_EQ(transfers.owing(0), nullptr);
  EXPECT_EQ(transfers.first(), operation.get());
  ASSERT_EQ(protocol.arrived(0, header, now), Protocol::Verdict::Accept);
  Sink sink = transfers.place(0, header, now);
  EXPECT_EQ(sink.into.ptr, reinterpret_cast<std::byte*>(output.data()));
  EXPECT_EQ(transfers.takeComplete(1), nullptr) << "its payload is on the way";
  std::memcpy(sink.into.ptr, values.data(), sink.into.nbytes);
  EXPECT_TRUE(transfers.arrived(0, header, std::move(sink)));
  EXPECT_EQ(transfers.awaiting(0), nullptr);
  const auto complete = transfers.takeComplete(1);
  ASSERT_NE(complete, nullptr);
  EXPECT_EQ(&complete->operation(), operation.get());
  EXPECT_EQ(transfers.size(), 0U);
  EXPECT_EQ(transfers.takeComplete(1), nullptr) << "once";
  EXPECT_EQ(lane.busy, 0);
  EXPECT_EQ(output, values);
}

TEST_F(TransfersTest, FramesThatCameBeforeTheirOperationAreReplayed) {
  const auto operation = broadcast(1);
  arriveUnexpected(frameOf(*operation));
  EXPECT_EQ(transfers.unexpectedFrames(), 1U);
  EXPECT_EQ(staging.takenNbytes(), kNumel * sizeof(float));
  Transfer& transfer = transfers.add(operation, now);
  transfer.start();
  EXPECT_EQ(transfers.takeComplete(1), nullptr);
  transfers.replayUnexpected(transfer);
  EXPECT_EQ(transfers.unexpectedFrames(), 0U);
  EXPECT_EQ(transfers.takeComplete(1), nullptr) << "many may be copied, so that is work";
  ASSERT_TRUE(transfers.hasWork());
  EXPECT_EQ(transfers.work(1).nbytes, 2 * output.size() * sizeof(float));
  EXPECT_FALSE(transfers.hasWork());
  EXPECT_NE(transfers.takeComplete(1), nullptr);
  EXPECT_EQ(output, values);
  EXPECT_EQ(staging.takenNbytes(), 0U);
}

TEST_F(TransfersTest, AFrameWhoseOperationIsPostedBeforeItsLastByteIsNotHeld) {
  const auto operation = broadcast(1);
  const FrameHeader header = frameOf(*operation);
  ASSERT_EQ(protocol.arrived(0, header, now), Protocol::Verdict::Hold);
  Sink sink = transfers.placeUnexpected(header);
  std::memcpy(sink.into.ptr, values.data(), sink.into.nbytes);
  transfers.add(operation, now).start();
  EXPECT_TRUE(transfers.arrived(0, header, std::move(sink)));
  EXPECT_EQ(transfers.unexpectedFrames(), 0U);
  static_cast<void>(transfers.work(1));
  EXPECT_NE(transfers.takeComplete(1), nullptr);
  EXPECT_EQ(output, values);
}

TEST_F(TransfersTest, AllEndOnceAndNoFrameStaysHeld) {
  const auto one = broadcast(1);
  const auto other = broadcast(2);
  arriveUnexpected(frameOf(*broadcast(3)));
  transfers.add(other, now).start();
  transfers.add(one, now).start();
  EXPECT_EQ(transfers.first(), one.get()) << "the lowest id";
  ASSERT_NE(transfers.oldest(), nullptr);
  EXPECT_EQ(&transfers.oldest()->operation(), one.get()) << "it was issued first";
  std::vector<int64_t> ended;
  transfers.endAll([&](const Transfer& transfer) {
    EXPECT_EQ(transfers.size(), 0U) << "none is found while they end";
    ended.push_back(transfer.operation().request().id.sequence);
  });
  EXPECT_EQ(ended, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(transfers.unexpectedFrames(), 0U);
  EXPECT_EQ(staging.takenNbytes(), 0U);
  EXPECT_EQ(lane.busy, 0);
  EXPECT_EQ(transfers.oldest(), nullptr);
  EXPECT_EQ(transfers.first(), nullptr);
}

TEST_F(TransfersTest, AnOperationThatGetsNoMemoryIsNotUnderWay) {
  int refused = 0;
  for (int64_t nth = 1;; ++nth) {
    ASSERT_LT(nth, 1000);
    const auto operation = broadcast(nth);
    testing::failAllocation(nth);
    bool threw = false;
    try {
      static_cast<void>(transfers.add(operation, now));
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    const bool failed = testing::allocationFailed();
    testing::failAllocation(0);
    ASSERT_EQ(threw, failed);
    EXPECT_EQ(transfers.has(*operation), !threw) << nth;
    if (!threw) {
      break;
    }
    ++refused;
    EXPECT_EQ(lane.busy, 0);
    EXPECT_EQ(protocol.usage().operations, 0U) << nth;
  }
  EXPECT_GT(refused, 3);
}

// To ask the kernel about all connections is cheaper than to try so many of them.
TEST_F(TransfersTest, AFewOperationsSayFromWhomFramesAreDue) {
  std::vector<int> peers;
  for (int64_t sequence = 1; sequence <= 64; ++sequence) {
    transfers.add(broadcast(sequence), now).start();
  }
  EXPECT_TRUE(transfers.addDuePeers(peers));
  EXPECT_EQ(peers, std::vector<int>(64, 0));
  transfers.add(broadcast(65), now).start();
  EXPECT_FALSE(transfers.addDuePeers(peers));
}

} // namespace
} // namespace pycomm
