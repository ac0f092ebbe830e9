#include "engine/loop/staging_pool.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace pycomm {
namespace {

TEST(StagingPool, PoolsOfOneMemoryKeepNoMoreThanItDoes) {
  constexpr size_t kPiece = 1 << 20;
  StagingMemory memory(4 * kPiece);
  StagingPool one(memory);
  StagingPool other(memory);
  std::vector<StagingBuffer> buffers;
  for (int i = 0; i < 4; ++i) {
    buffers.push_back(one.take(kPiece));
    buffers.push_back(other.take(kPiece));
  }
  EXPECT_EQ(one.takenNbytes(), 4 * kPiece);
  EXPECT_EQ(memory.keptNbytes(), 0U);
  buffers.clear();
  EXPECT_EQ(one.takenNbytes(), 0U);
  EXPECT_EQ(memory.keptNbytes(), 4 * kPiece);
  const StagingBuffer again = other.take(kPiece);
  EXPECT_EQ(memory.keptNbytes(), 3 * kPiece) << "what one has given back the other takes";
}

// Frames of about one size follow each other: their memory is warm, and nothing is allocated.
TEST(StagingPool, MemoryOfOneClassIsUsedAgainAndOfAnotherIsNot) {
  StagingMemory memory(1 << 20);
  StagingPool pool(memory);
  StagingBuffer first = pool.take(1000);
  EXPECT_EQ(first.view().nbytes, 1000U);
  const std::byte* const at = first.view().ptr;
  std::memset(first.view().ptr, 1, 1024); // AddressSanitizer: the class has all 1024
  first.release();
  EXPECT_FALSE(first);
  EXPECT_EQ(memory.keptNbytes(), 1024U);
  const StagingBuffer larger = pool.take(1025);
  EXPECT_EQ(memory.keptNbytes(), 1024U) << "2048 bytes come from elsewhere";
  const StagingBuffer again = pool.take(513);
  EXPECT_EQ(again.view().ptr, at);
  EXPECT_EQ(again.view().nbytes, 513U);
  EXPECT_EQ(memory.keptNbytes(), 0U);
  EXPECT_EQ(pool.takenNbytes(), 1025U + 513U);
}

// To round what is never kept up to a power of two would take address space, and memory, for nothing.
TEST(StagingPool, WhatIsTooLargeToBeKeptIsNotRoundedUp) {
  StagingMemory memory(1 << 20);
  StagingPool pool(memory);
  constexpr size_t kNbytes = (9 << 20) + 1;
  StagingBuffer buffer = pool.take(kNbytes);
  EXPECT_EQ(buffer.view().nbytes, kNbytes);
  EXPECT_LT(::malloc_usable_size(buffer.view().ptr), kNbytes + (64 << 10));
  std::memset(buffer.view().ptr, 1, kNbytes);
  EXPECT_EQ(pool.takenNbytes(), kNbytes);
  buffer.release();
  EXPECT_EQ(pool.takenNbytes(), 0U);
  EXPECT_EQ(memory.keptNbytes(), 0U);
}

// The thread of a loop must not wait until the kernel has taken it back.
TEST(StagingPool, LargeMemoryThatIsNotKeptIsDiscardedAndSmallIsNot) {
  std::vector<std::shared_ptr<const void>> discarded;
  StagingMemory memory(8 << 20, [&](std::shared_ptr<const void> large) { discarded.push_back(std::move(large)); });
  StagingPool pool(memory);
  const std::byte* large = nullptr;
  {
    StagingBuffer kept = pool.take(8 << 20);
    StagingBuffer small = pool.take(StagingMemory::kDiscardNbytes - 1);
    StagingBuffer not_kept = pool.take(StagingMemory::kDiscardNbytes + 1);
    large = not_kept.view().ptr;
    std::memset(not_kept.view().ptr, 1, not_kept.view().nbytes);
    kept.release();
  }
  EXPECT_EQ(memory.keptNbytes(), 8U << 20);
  EXPECT_EQ(pool.takenNbytes(), 0U);
  ASSERT_EQ(discarded.size(), 1U);
  EXPECT_EQ(discarded[0].get(), large);
}

TEST(StagingPool, SmallBuffersAreOf64BytesAndEmptyOnesToo) {
  StagingMemory memory(1 << 10);
  StagingPool pool(memory);
  for (const size_t nbytes : {size_t{0}, size_t{1}, size_t{64}}) {
    StagingBuffer buffer = pool.take(nbytes);
    EXPECT_TRUE(buffer);
    EXPECT_EQ(buffer.view().nbytes, nbytes);
    EXPECT_EQ(pool.takenNbytes(), nbytes);
    buffer.release();
    EXPECT_EQ(memory.keptNbytes(), 64U) << "all three were the same 64 bytes";
  }
}

TEST(StagingPool, AMovedBufferIsGivenBackOnce) {
  StagingMemory memory(1 << 20);
  StagingPool pool(memory);
  {
    StagingBuffer one = pool.take(100);
    StagingBuffer other = pool.take(200);
    const std::byte* const at = one.view().ptr;
    other = std::move(one); // its own 200 bytes go back now
    EXPECT_EQ(pool.takenNbytes(), 100U);
    EXPECT_EQ(memory.keptNbytes(), 256U);
    StagingBuffer third(std::move(other));
    EXPECT_EQ(third.view().ptr, at);
    EXPECT_EQ(pool.takenNbytes(), 100U);
  }
  EXPECT_EQ(pool.takenNbytes(), 0U);
  EXPECT_EQ(memory.keptNbytes(), 256U + 128U);
}

} // namespace
} // namespace pycomm
