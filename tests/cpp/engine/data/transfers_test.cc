#include "engine/data/transfers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "base/error.h"
#include "engine/data/matching.h"
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
  CountingLoop data_loop;
  StagingPool staging{data_loop.stagingMemory()};
  Tables tables{identity, Limits()}; // its rows hold staging buffers
  Transfers transfers{tables, staging, data_loop, [](int, OutFrame) {}};
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
  [[nodiscard]] matching::Verdict arrived(const FrameHeader& header) {
    return matching::headerArrived(tables, tables.find(header.op_id), 0, header, now);
  }
  [[nodiscard]] size_t unexpectedFrames(uint64_t op_id) const {
    const UnexpectedRow* const unexpected = tables.findUnexpected(op_id);
    return unexpected == nullptr ? 0 : unexpected->frames.size();
  }
  /// The frame of the operation arrives before that.
  void arriveUnexpected(const FrameHeader& header) {
    ASSERT_EQ(arrived(header), matching::Verdict::Keep);
    Sink sink = transfers.placeUnexpected(header);
    EXPECT_TRUE(sink.unexpected);
    ASSERT_EQ(sink.into.nbytes, header.payload_nbytes);
    std::memcpy(sink.into.ptr, values.data(), sink.into.nbytes);
    EXPECT_FALSE(transfers.arrived(nullptr, 0, header, std::move(sink)));
  }
};

TEST_F(TransfersTest, AFrameGoesStraightToItsPlace) {
  const auto operation = broadcast(1);
  const FrameHeader header = frameOf(*operation);
  OperationRow& row = transfers.add(operation, now);
  row.transfer->start();
  EXPECT_EQ(data_loop.busy, 1);
  EXPECT_EQ(row.from(0)->done, 0U);
  EXPECT_EQ(row.from(0)->frames, 1U);
  EXPECT_TRUE(row.outgoing.empty());
  ASSERT_EQ(arrived(header), matching::Verdict::Accept);
  Sink sink = transfers.place(row, 0, header, now);
  EXPECT_EQ(sink.into.ptr, reinterpret_cast<std::byte*>(output.data()));
  EXPECT_FALSE(Transfers::isComplete(row)) << "its payload is on the way";
  std::memcpy(sink.into.ptr, values.data(), sink.into.nbytes);
  EXPECT_TRUE(transfers.arrived(&row, 0, header, std::move(sink)));
  EXPECT_EQ(row.from(0)->done, 1U);
  EXPECT_TRUE(Transfers::isComplete(row));
  EXPECT_EQ(output, values);
}

TEST_F(TransfersTest, FramesThatCameBeforeTheirOperationAreReplayed) {
  const auto operation = broadcast(1);
  arriveUnexpected(frameOf(*operation));
  EXPECT_EQ(unexpectedFrames(1), 1U);
  EXPECT_EQ(staging.takenNbytes(), kNumel * sizeof(float));
  OperationRow& row = transfers.add(operation, now);
  EXPECT_EQ(unexpectedFrames(1), 0U);
  row.transfer->start();
  EXPECT_FALSE(Transfers::isComplete(row));
  transfers.replayUnexpected(row);
  EXPECT_TRUE(row.unexpected.empty());
  EXPECT_FALSE(Transfers::isComplete(row)) << "many may be copied, so that is work";
  ASSERT_TRUE(transfers.hasWork());
  const Transfers::Worked worked = transfers.work(1);
  EXPECT_EQ(worked.nbytes, 2 * output.size() * sizeof(float));
  EXPECT_EQ(worked.row, &row);
  EXPECT_FALSE(transfers.hasWork());
  EXPECT_TRUE(Transfers::isComplete(row));
  EXPECT_EQ(output, values);
  EXPECT_EQ(staging.takenNbytes(), 0U);
}

TEST_F(TransfersTest, AFrameWhoseOperationIsPostedBeforeItsLastByteIsNotHeld) {
  const auto operation = broadcast(1);
  const FrameHeader header = frameOf(*operation);
  ASSERT_EQ(arrived(header), matching::Verdict::Keep);
  Sink sink = transfers.placeUnexpected(header);
  std::memcpy(sink.into.ptr, values.data(), sink.into.nbytes);
  OperationRow& row = transfers.add(operation, now);
  row.transfer->start();
  EXPECT_TRUE(transfers.arrived(&row, 0, header, std::move(sink)));
  EXPECT_EQ(unexpectedFrames(1), 0U);
  static_cast<void>(transfers.work(1));
  EXPECT_TRUE(Transfers::isComplete(row));
  EXPECT_EQ(output, values);
}

TEST_F(TransfersTest, ASecondOperationOfOneNameIsNotTaken) {
  OperationRow& row = transfers.add(broadcast(1), now);
  EXPECT_THROW(static_cast<void>(transfers.add(broadcast(1), now)), Error);
  EXPECT_EQ(tables.find(1), &row);
  EXPECT_EQ(data_loop.busy, 1);
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
    EXPECT_EQ(tables.find(operation->request().id.id) != nullptr, !threw) << nth;
    if (!threw) {
      break;
    }
    ++refused;
    EXPECT_EQ(data_loop.busy, 0);
    EXPECT_EQ(tables.usage().operations, 0U) << nth;
  }
  EXPECT_GT(refused, 3);
}

TEST_F(TransfersTest, WithoutMemoryForAnOperationTheTablesAreAsBefore) {
  ASSERT_EQ(tables.last_entered.id, 0U);
  const auto operation = broadcast(1);
  FrameHeader question = frameOf(*operation);
  question.type = FrameType::Waiting;
  question.payload_nbytes = 0;
  question.aux = 0;
  ASSERT_EQ(arrived(question), matching::Verdict::Ignore);
  arriveUnexpected(frameOf(*operation));
  ASSERT_EQ(tables.takeActions().size(), 1U) << "it is not entered here";
  int refused = 0;
  bool threw = true;
  for (int64_t nth = 1; threw; ++nth) {
    ASSERT_LT(nth, 1000);
    threw = testing::throwsWithoutMemory(nth, [&] { static_cast<void>(transfers.add(operation, now)); });
    if (threw) {
      ++refused;
      EXPECT_EQ(tables.last_entered.id, 0U) << nth;
      EXPECT_EQ(tables.highest_sequence, 0) << nth;
      EXPECT_TRUE(tables.actions.empty()) << nth;
      EXPECT_TRUE(tables.credit_actions.empty()) << nth;
      EXPECT_EQ(tables.usage().operations, 0U) << nth;
      EXPECT_EQ(tables.usage().places_taken, 1U) << nth;
      ASSERT_EQ(unexpectedFrames(1), 1U) << nth;
    }
  }
  EXPECT_GT(refused, 3);
  EXPECT_EQ(tables.last_entered.id, 1U);
  EXPECT_EQ(tables.find(1)->unexpected.size(), 1U);
  EXPECT_EQ(tables.takeActions().size(), 1U) << "the rank that asked learns that it has come";
  EXPECT_EQ(tables.usage().places_taken, 0U);
}

// To ask the kernel about all connections is cheaper than to try so many of them.
TEST_F(TransfersTest, AFewOperationsSayFromWhomFramesAreDue) {
  std::vector<int> peers;
  for (int64_t sequence = 1; sequence <= 64; ++sequence) {
    transfers.add(broadcast(sequence), now).transfer->start();
  }
  EXPECT_TRUE(transfers.addDuePeers(peers));
  EXPECT_EQ(peers, std::vector<int>(64, 0));
  transfers.add(broadcast(65), now).transfer->start();
  EXPECT_FALSE(transfers.addDuePeers(peers));
}

} // namespace
} // namespace pycomm
