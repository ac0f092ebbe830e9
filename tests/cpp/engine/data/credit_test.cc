#include "engine/data/credit.h"

#include <gtest/gtest.h>

#include "engine/data/rank_tables.h"

namespace pycomm::testing {
namespace {

using CreditKind = CreditAction::Kind;
using Permission = credit::Permission;

constexpr int64_t kFrameCost = sizeof(FrameHeader);

Edge edgeOf(int peer, int64_t nbytes, size_t frames) {
  Edge edge;
  edge.peer = peer;
  edge.nbytes = nbytes;
  edge.steps.resize(frames);
  return edge;
}

/// What this rank does in an operation that sends so much to rank 1, in one frame for each 64 KiB.
PreparedSchedule sending(int64_t nbytes) {
  PreparedSchedule schedule;
  schedule.outgoing.push_back(edgeOf(1, nbytes, static_cast<size_t>(nbytes >> 16) + 1));
  return schedule;
}

PreparedSchedule receiving(int64_t nbytes) {
  PreparedSchedule schedule;
  schedule.incoming.push_back(edgeOf(1, nbytes, static_cast<size_t>(nbytes >> 16) + 1));
  return schedule;
}

RankTables::Config smallLimits(int size = 2) {
  RankTables::Config config;
  config.size = size;
  config.hosts.resize(static_cast<size_t>(size));
  config.eager_nbytes = 1000;
  config.eager_pool_nbytes = 4 * (1000 + kFrameCost);
  config.window_nbytes = 8000;
  config.max_ahead = 2;
  return config;
}

void postTo(RankTables& credits, uint64_t op_id, const PreparedSchedule& schedule) {
  credits.posted(OperationId{op_id, static_cast<int64_t>(op_id)}, Descriptor(), schedule, TimePoint());
}

TEST(Credit, AnEagerFrameTakesRoomForItsPayloadAndItsHeader) {
  RankTables credits(smallLimits(2));
  for (uint64_t op_id = 1; op_id <= 5; ++op_id) {
    postTo(credits, op_id, sending(1000));
  }
  for (uint64_t op_id = 1; op_id <= 4; ++op_id) {
    ASSERT_EQ(credits.maySend(op_id, 1, 1000), Permission::Eager) << op_id;
    credits.sent(op_id, 1, 1000, Permission::Eager);
  }
  EXPECT_EQ(credits.maySend(5, 1, 1), Permission::No) << "the pool is full";
  EXPECT_EQ(credits.granted(0, 1, 1000 + kFrameCost), nullptr);
  EXPECT_EQ(credits.maySend(5, 1, 1000), Permission::Eager);
  EXPECT_EQ(credits.maySend(5, 1, 1001), Permission::No) << "more than may go eagerly";
  EXPECT_EQ(credits.maySend(5, 0, 1), Permission::No) << "there is no such edge";
  EXPECT_EQ(credits.maySend(6, 1, 1), Permission::No) << "it is not posted";
}

TEST(Credit, RoomThatComesBackIsForTheOldestOperation) {
  RankTables credits(smallLimits(2));
  for (const uint64_t op_id : std::vector<uint64_t>{30, 10, 20}) {
    postTo(credits, op_id, sending(10));
  }
  ASSERT_EQ(credits.granted(0, 1, 100), nullptr);
  std::vector<uint64_t> may_send;
  for (const CreditAction& action : credits.takeCreditActions()) {
    EXPECT_EQ(action.kind, CreditKind::MaySend);
    EXPECT_EQ(action.peer, 1);
    may_send.push_back(action.op_id);
  }
  EXPECT_EQ(may_send, (std::vector<uint64_t>{10, 20, 30}));
}

TEST(Credit, AReceiverGrantsAWindowAtOnceAndRaisesItByQuarters) {
  RankTables credits(smallLimits(2));
  postTo(credits, 1, receiving(100000));
  std::vector<CreditAction> actions = credits.takeCreditActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].kind, CreditKind::Grant);
  EXPECT_EQ(actions[0].op_id, 1U);
  EXPECT_EQ(actions[0].nbytes, 8000);
  credits.consumed(1, 1, 1999, false);
  EXPECT_TRUE(credits.takeCreditActions().empty()) << "not worth a frame";
  credits.consumed(1, 1, 1, false);
  actions = credits.takeCreditActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].nbytes, 10000);
}

TEST(Credit, CreditIsTheNumberOfBytesInAll) {
  RankTables credits(smallLimits(2));
  EXPECT_EQ(credits.granted(1, 1, 5000), nullptr) << "before the operation is posted here";
  postTo(credits, 1, sending(100000));
  EXPECT_FALSE(credit::lacksCredit(*credits.tables.find(1), 1));
  EXPECT_EQ(credits.maySend(1, 1, 5000), Permission::Credit);
  credits.sent(1, 1, 5000, Permission::Credit);
  EXPECT_EQ(credits.maySend(1, 1, 1), Permission::No);
  EXPECT_EQ(credits.granted(1, 1, 4000), nullptr) << "an older one that comes late takes nothing back";
  EXPECT_EQ(credits.granted(1, 1, 6000), nullptr);
  EXPECT_EQ(credits.maySend(1, 1, 1000), Permission::Credit);
  EXPECT_EQ(credits.maySend(1, 1, 1001), Permission::No);
}

TEST(Credit, ACrowdedPoolGivesCreditToPostedOperationsThatCouldGoEagerly) {
  RankTables credits(smallLimits(2));
  postTo(credits, 9, receiving(500));
  EXPECT_TRUE(credits.takeCreditActions().empty());
  EXPECT_EQ(credits.bytesArrived(1, 1, 1000, true), nullptr);
  EXPECT_TRUE(credits.takeCreditActions().empty());
  EXPECT_EQ(credits.bytesArrived(2, 1, 1000, true), nullptr);
  EXPECT_EQ(credits.bytesArrived(3, 1, 1000, true), nullptr);
  const std::vector<CreditAction> actions = credits.takeCreditActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].op_id, 9U);
  EXPECT_EQ(actions[0].nbytes, 500);
  EXPECT_EQ(credits.usage().eager_in, 3 * (1000 + kFrameCost));
}

TEST(Credit, RoomIsGivenBackAQuarterOfThePoolAtATime) {
  RankTables credits(smallLimits(2));
  postTo(credits, 1, receiving(500));
  postTo(credits, 2, receiving(500));
  ASSERT_EQ(credits.bytesArrived(1, 1, 500, true), nullptr);
  ASSERT_EQ(credits.bytesArrived(2, 1, 500, true), nullptr);
  credits.consumed(1, 1, 500, true);
  EXPECT_TRUE(credits.takeCreditActions().empty());
  credits.consumed(2, 1, 500, true);
  const std::vector<CreditAction> actions = credits.takeCreditActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].op_id, 0U);
  EXPECT_EQ(actions[0].nbytes, 2 * (500 + kFrameCost));
  EXPECT_EQ(credits.usage().eager_in, 0);
}

// It would not arrive; and leaving.cc counts what is missing.
TEST(Credit, RoomIsNotGivenBackOnALinkThatBroke) {
  RankTables credits(smallLimits(2));
  credits.tables.peer(1).trouble = std::make_unique<PeerRow::Trouble>();
  for (uint64_t op_id = 1; op_id <= 4; ++op_id) {
    postTo(credits, op_id, receiving(1000));
    ASSERT_EQ(credits.bytesArrived(op_id, 1, 1000, true), nullptr);
    credits.consumed(op_id, 1, 1000, true);
  }
  EXPECT_TRUE(credits.takeCreditActions().empty());
  EXPECT_EQ(credits.tables.peer(1).eager_used, 4 * (1000 + kFrameCost));
}

TEST(Credit, NoMoreOperationsHaveCreditThanThePeerMayRemember) {
  RankTables credits(smallLimits(2));
  for (uint64_t op_id = 1; op_id <= 3; ++op_id) {
    postTo(credits, op_id, receiving(100000));
  }
  EXPECT_EQ(credits.takeCreditActions().size(), 2U);
  EXPECT_EQ(credits.usage().granted_early, 2U);
  credit::shown(credits.tables, *credits.tables.find(3), 1);
  const std::vector<CreditAction> actions = credits.takeCreditActions();
  ASSERT_EQ(actions.size(), 1U) << "the peer has posted it, so it keeps no note of it";
  EXPECT_EQ(actions[0].op_id, 3U);
  credits.ended(1);
  EXPECT_EQ(credits.usage().granted_early, 1U);
}

TEST(Credit, CreditForOperationsThatAreNotPostedHereIsBounded) {
  RankTables credits(smallLimits(2));
  EXPECT_EQ(credits.granted(1, 1, 10), nullptr);
  EXPECT_EQ(credits.granted(1, 1, 20), nullptr) << "the same again";
  EXPECT_EQ(credits.granted(2, 1, 10), nullptr);
  credits.passed(OperationId{1, 1}, Descriptor()); // it went another way, and takes no more place
  EXPECT_EQ(credits.granted(3, 1, 10), nullptr);
  EXPECT_STREQ(credits.granted(4, 1, 10), "credit for too many operations that are not posted here");
}

TEST(Credit, CreditForAnOperationThatHasEndedIsPastUntilAPoolMoreHasBeenSent) {
  RankTables credits(smallLimits(2));
  postTo(credits, 1, sending(1000));
  credits.sent(1, 1, 1000, Permission::Eager);
  credits.ended(1);
  EXPECT_TRUE(credit::isPast(credits.tables, 1, 1));
  for (uint64_t op_id = 2; op_id <= 7; ++op_id) {
    postTo(credits, op_id, sending(1000));
    credits.sent(op_id, 1, 1000, Permission::Eager);
    ASSERT_EQ(credits.granted(0, 1, 1000 + kFrameCost), nullptr);
    credits.ended(op_id);
  }
  EXPECT_FALSE(credit::isPast(credits.tables, 1, 1));
  EXPECT_TRUE(credit::isPast(credits.tables, 1, 7));
}

// A root waits for another receiver, and all of its operations end together, long after this peer has read them.
TEST(Credit, PastOperationsAreNoMoreThanThereAreFramesInAPoolHoweverManyEndTogether) {
  RankTables credits(smallLimits(2));
  constexpr uint64_t kLast = 500;
  for (uint64_t op_id = 1; op_id <= kLast; ++op_id) {
    postTo(credits, op_id, sending(1000));
    ASSERT_EQ(credits.maySend(op_id, 1, 1000), Permission::Eager);
    credits.sent(op_id, 1, 1000, Permission::Eager);
    ASSERT_EQ(credits.granted(0, 1, 1000 + kFrameCost), nullptr);
  }
  for (uint64_t op_id = kLast; op_id > 0; --op_id) { // in any order
    credits.ended(op_id);
  }
  const auto in_pool = static_cast<uint64_t>(smallLimits().eager_pool_nbytes / (1000 + kFrameCost));
  EXPECT_LE(credits.usage().past, in_pool + 1);
  EXPECT_LE(credits.usage().past, credits.usage().most_past);
  EXPECT_TRUE(credit::isPast(credits.tables, 1, kLast));
  EXPECT_TRUE(credit::isPast(credits.tables, 1, kLast - in_pool));
  EXPECT_FALSE(credit::isPast(credits.tables, 1, 1));
}

TEST(Credit, WhatNoPeerSends) {
  RankTables credits(smallLimits(2));
  postTo(credits, 1, sending(10));
  EXPECT_STREQ(credits.granted(1, 1, -1), "credit of less than nothing");
  EXPECT_STREQ(credits.granted(1, 0, 1), "credit on an edge that this operation does not have");
  EXPECT_STREQ(credits.bytesArrived(1, 1, 10, true), "data on an edge that this operation does not have");
  EXPECT_STREQ(credits.bytesArrived(2, 1, 10, false), "data without credit for an operation that is not posted here");
  const char* refused = nullptr;
  for (int i = 0; i < 5 && refused == nullptr; ++i) {
    refused = credits.bytesArrived(3, 1, 1000, true);
  }
  EXPECT_STREQ(refused, "more eager bytes than the pool holds");
}

TEST(Credit, SaysWhatAnOperationStillWaitsFor) {
  RankTables credits(smallLimits(3));
  PreparedSchedule schedule;
  schedule.incoming.push_back(edgeOf(2, 5000, 1));
  schedule.outgoing.push_back(edgeOf(1, 5000, 1));
  postTo(credits, 1, schedule);
  EXPECT_EQ(credit::unfinished(*credits.tables.find(1)), (std::vector<int>{2, 1}));
  EXPECT_EQ(credit::withoutRoom(credits.tables, *credits.tables.find(1)), std::vector<int>{1});
  EXPECT_TRUE(credit::lacksCredit(*credits.tables.find(1), 1));
  EXPECT_EQ(credits.tables.find(1)->from(2)->total, 5000);
  EXPECT_EQ(credits.tables.find(1)->to(2), nullptr);
  ASSERT_EQ(credits.granted(1, 1, 5000), nullptr);
  credits.sent(1, 1, 5000, Permission::Credit);
  EXPECT_EQ(credit::unfinished(*credits.tables.find(1)), std::vector<int>{2});
  credits.consumed(1, 2, 5000, false);
  EXPECT_EQ(credit::unfinished(*credits.tables.find(1)), std::vector<int>());
}

} // namespace
} // namespace pycomm::testing
