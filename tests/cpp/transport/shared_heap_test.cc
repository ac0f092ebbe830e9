#include "transport/memory/shared_heap.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <set>
#include <thread>

#include "allocations.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/fault_point.h"
#include "within.h"

namespace pycomm::testing {
namespace {

constexpr size_t kPage = 4096;

class SharedHeapTest : public ::testing::Test {
 protected:
  SharedHeap heap_{SharedArena::create(16 * kPage)};
  SharedArena peer_ = SharedArena::attach(UniqueFd(::dup(heap_.arena().fd())), std::nullopt);

  std::byte* allocate(size_t nbytes) {
    return static_cast<std::byte*>(heap_.allocate(nbytes));
  }
  std::byte* asPeersSeeIt(const void* buffer, size_t nbytes) {
    return peer_.at(heap_.placeOf(buffer, nbytes).value());
  }
  int64_t committed() {
    struct stat status{};
    EXPECT_EQ(::fstat(heap_.arena().fd(), &status), 0);
    return status.st_blocks * 512;
  }
};

TEST_F(SharedHeapTest, PeersFindABufferByItsPlace) {
  (void)allocate(100);
  std::byte* second = allocate(3 * kPage);
  std::memcpy(second, "here", 5);
  EXPECT_STREQ(reinterpret_cast<char*>(asPeersSeeIt(second, 3 * kPage)), "here");
}

TEST_F(SharedHeapTest, OnlyWholePagesOfOneAllocationHaveAPlace) {
  std::byte* block = allocate(3 * kPage + 8);
  EXPECT_TRUE(heap_.placeOf(block, 3 * kPage + 8)); // nothing else is on the last page
  EXPECT_TRUE(heap_.placeOf(block + kPage, kPage));
  EXPECT_FALSE(heap_.placeOf(block + 8, 3 * kPage)); // shares its first page
  EXPECT_FALSE(heap_.placeOf(block, kPage + 8)); // shares its last one
  EXPECT_FALSE(heap_.placeOf(block, 3 * kPage + 9)); // reaches beyond
  const int elsewhere = 0;
  EXPECT_FALSE(heap_.placeOf(&elsewhere, sizeof elsewhere));
}

TEST_F(SharedHeapTest, WhatIsReleasedGoesBackAndIsFoundAgain) {
  std::byte* a = allocate(5 * kPage);
  std::byte* b = allocate(5 * kPage);
  std::byte* c = allocate(6 * kPage);
  EXPECT_EQ(committed(), 16 * static_cast<int64_t>(kPage));
  try {
    (void)allocate(1);
    FAIL() << "there is no room";
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::NoSharedMemory);
  }
  heap_.release(a); // in an order that joins ranges on both sides
  heap_.release(c);
  heap_.release(b);
  EXPECT_EQ(committed(), 0);
  EXPECT_EQ(allocate(16 * kPage), a); // one range again
  EXPECT_EQ(*a, std::byte{0});
}

TEST_F(SharedHeapTest, WhatIsDetachedKeepsItsBytesAndIsNobodyElses) {
  std::byte* block = allocate(4 * kPage);
  std::memset(block, 1, 4 * kPage);
  std::byte* seen = asPeersSeeIt(block, 4 * kPage);
  ASSERT_TRUE(heap_.detach(block + kPage + 8, kPage)); // which lies on two pages
  std::memset(seen + kPage, 2, 2 * kPage); // a peer that was stopped, later
  for (size_t i = 0; i < 4 * kPage; ++i) {
    ASSERT_EQ(block[i], std::byte{1});
  }
  EXPECT_FALSE(heap_.placeOf(block, 4 * kPage));
  EXPECT_FALSE(heap_.placeOf(block + 2 * kPage, 2 * kPage));
  EXPECT_TRUE(heap_.placeOf(block, kPage));
  EXPECT_TRUE(heap_.placeOf(block + 3 * kPage, kPage));
  ASSERT_TRUE(heap_.detach(block + 2 * kPage, 8)); // again, by a second peer
  heap_.release(block);
  std::set<const void*> pages;
  for (int i = 0; i < 14; ++i) { // all that is left: never the pages that the peer may write
    pages.insert(allocate(kPage));
  }
  EXPECT_EQ(pages.size(), 14U);
  EXPECT_EQ(pages.count(block), 1U);
  EXPECT_EQ(pages.count(block + kPage), 0U);
  EXPECT_EQ(pages.count(block + 2 * kPage), 0U);
}

TEST_F(SharedHeapTest, WithoutMemoryToNoteItNoRoomIsLost) {
  bool threw = true;
  int refused = 0;
  for (int64_t nth = 1; threw; ++nth) {
    ASSERT_LT(nth, 100);
    std::byte* block = nullptr;
    threw = throwsWithoutMemory(nth, [&] { block = allocate(kPage); });
    refused += threw ? 1 : 0;
    heap_.release(block);
    std::byte* const all = allocate(16 * kPage); // throws if a range is lost
    heap_.release(all);
  }
  EXPECT_GE(refused, 1);
}

// Every large collective asks for a place; to make the pages of a large tensor takes the kernel long.
TEST_F(SharedHeapTest, PlacesAreFoundWhilePagesAreMade) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  std::byte* block = allocate(kPage);
  armFaultPoints("arena.commit:1:delay=1000");
  std::atomic<bool> made{false};
  std::thread other([&] {
    EXPECT_NE(allocate(2 * kPage), nullptr);
    made = true;
  });
  auto longest = Clock::duration::zero();
  int found = 0;
  while (!made) {
    const TimePoint began = Clock::now();
    found += heap_.placeOf(block, kPage).has_value() ? 1 : 0;
    longest = std::max(longest, Clock::now() - began);
  }
  other.join();
  armFaultPoints("");
  EXPECT_GT(found, 100);
  EXPECT_WITHIN_MS(std::chrono::duration_cast<std::chrono::milliseconds>(longest).count(), 500);
}

TEST_F(SharedHeapTest, AChildFreesNothingOfItsParents) {
  std::byte* block = allocate(kPage);
  std::memset(block, 7, kPage);
  const pid_t child = ::fork();
  if (child == 0) {
    const bool sees = *block == std::byte{7};
    heap_.release(block);
    ::_exit(sees ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(*block, std::byte{7});
  EXPECT_TRUE(heap_.placeOf(block, kPage));
}

} // namespace
} // namespace pycomm::testing
