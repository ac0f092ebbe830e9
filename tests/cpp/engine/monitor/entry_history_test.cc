#include "engine/monitor/entry_history.h"

#include <gtest/gtest.h>

namespace pycomm {
namespace {

Descriptor descriptorOf(int64_t numel) {
  Descriptor descriptor;
  descriptor.numel = numel;
  return descriptor;
}

OperationId counted(int64_t sequence) {
  return OperationId{static_cast<uint64_t>(sequence), sequence};
}

/// The id that an answer names.
uint64_t lastOf(const EntryHistory& history) {
  FrameHeader header;
  history.writeLast(header);
  return header.aux;
}

TEST(EntryHistory, NamesTheOperationThatWasEnteredLast) {
  EntryHistory history;
  EXPECT_EQ(lastOf(history), 0U);
  history.entered(counted(1), descriptorOf(10));
  history.entered(OperationId{kDerivedIdBit | 5, -1}, descriptorOf(20));
  FrameHeader header;
  history.writeLast(header);
  EXPECT_EQ(header.aux, kDerivedIdBit | 5);
  EXPECT_EQ(Descriptor::readFrom(header), descriptorOf(20));
}

TEST(EntryHistory, AnIdIsBehindOnceALaterOneWasEntered) {
  EntryHistory history;
  history.entered(counted(3), descriptorOf(1));
  history.entered(OperationId{kDerivedIdBit | 5, -1}, descriptorOf(1));
  EXPECT_TRUE(history.isBehind(2));
  EXPECT_TRUE(history.isBehind(3));
  EXPECT_FALSE(history.isBehind(4));
  EXPECT_FALSE(history.isBehind(kDerivedIdBit | 5)) << "these have no order";
}

TEST(EntryHistory, RemembersThatOlderOnesHaveEndedToo) {
  EntryHistory history;
  const size_t ended = EntryHistory::kRecent + EntryHistory::kForgotten + 1;
  for (uint64_t i = 0; i < ended; ++i) {
    history.ended(kDerivedIdBit | i, descriptorOf(1));
  }
  EXPECT_FALSE(history.isBehind(kDerivedIdBit | 0)) << "the bound";
  EXPECT_TRUE(history.isBehind(kDerivedIdBit | 1));
  EXPECT_FALSE(history.isBehind(kDerivedIdBit | ended));
  EXPECT_EQ(history.size(), EntryHistory::kRecent);
  EXPECT_EQ(history.forgotten(), EntryHistory::kForgotten);
}

TEST(EntryHistory, OneThatIsReportedLateIsTheLastOnlyIfNoneIsLater) {
  EntryHistory history;
  history.entered(counted(5), descriptorOf(1));
  history.passed(counted(4), descriptorOf(2));
  EXPECT_EQ(lastOf(history), 5U);
  EXPECT_EQ(*history.find(4), descriptorOf(2));
  history.passed(counted(6), descriptorOf(3));
  EXPECT_EQ(lastOf(history), 6U);
  EXPECT_TRUE(history.isBehind(6));
}

TEST(EntryHistory, RemembersTheLast256ThatHaveEnded) {
  EntryHistory history;
  for (uint64_t op_id = 1; op_id <= 257; ++op_id) {
    history.ended(op_id, descriptorOf(static_cast<int64_t>(op_id)));
  }
  EXPECT_EQ(history.find(1), nullptr);
  ASSERT_NE(history.find(2), nullptr);
  EXPECT_EQ(*history.find(257), descriptorOf(257));
}

} // namespace
} // namespace pycomm
