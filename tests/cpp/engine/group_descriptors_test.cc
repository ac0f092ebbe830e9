// How many descriptors the ranks of a group have open: all ranks are threads of this process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <iterator>
#include <mutex>

#include "ranks.h"
#include "sanitized.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

size_t openDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

/// Threads that wait for each other, again and again; a minute at the most, since one may have failed.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = arrived_++ / threads_;
    all_.notify_all();
    EXPECT_TRUE(all_.wait_for(lock, std::chrono::minutes(1), [&] { return arrived_ >= (round + 1) * threads_; }));
  }

 private:
  const int threads_;
  std::mutex mutex_; ///< guards arrived_
  std::condition_variable all_;
  int arrived_ = 0;
};

// A rank of a ring needs a link to the next rank and one from the previous, whatever the size of the group. To find the rank that has
// not entered an operation, all ranks ask all others; links for these questions would be 126 more for each rank.
TEST(Descriptors, ARankInARingHasFewAlsoAfterItHasFoundALateRank) {
  constexpr int kRanks = kSanitized ? 16 : 64;
  constexpr int kLate = kRanks - 1;
  constexpr size_t kMostMore = 24; // for each rank
  Meeting all(kRanks);
  size_t before = 0;
  size_t in_ring = 0;
  size_t after_asking = 0;
  const auto counted = [&](const Rank& self, size_t& count) {
    all.wait();
    if (self.rank == 0) {
      count = openDescriptors();
    }
    all.wait();
  };
  std::atomic<int> named{0};
  runRanks(
      kRanks,
      [&](Rank& self) {
        counted(self, before);
        std::vector<float> values(4 * kRanks, 1);
        Group::Call ring = allReduceCall(values);
        ring.schedule.algorithm = Algorithm::Ring;
        const auto first = self.group.start(ring);
        EXPECT_TRUE(self.group.wait(*first, Deadline::after(20000)));
        EXPECT_FALSE(first->error());
        EXPECT_EQ(values, std::vector<float>(values.size(), kRanks));
        counted(self, in_ring);
        if (self.rank != kLate) {
          ring.deadline = Deadline::after(6000); // by then all but one have entered
          const auto second = self.group.start(ring);
          EXPECT_TRUE(self.group.wait(*second, Deadline::after(60000)));
          const auto error = second->error();
          const ErrorRecord record = error ? *error : ErrorRecord();
          EXPECT_EQ(record.code, ErrorCode::Timeout) << record.text();
          EXPECT_EQ(record.peer, kLate) << record.text();
          EXPECT_THAT(record.summary, HasSubstr("rank " + std::to_string(kLate) + " on "));
          EXPECT_THAT(record.summary, HasSubstr("has not entered it (its last: all_reduce"));
          named += error ? 1 : 0;
        }
        counted(self, after_asking);
      },
      [](Group::Config& config) {
        config.transport = Transport::Tcp;
        config.rendezvous.deadline = Deadline::after(60000);
      });
  EXPECT_EQ(named, kRanks - 1);
  RecordProperty("more_in_ring", std::to_string(in_ring - before));
  RecordProperty("more_after_asking", std::to_string(after_asking - before));
  EXPECT_GE(in_ring, before + 2 * kRanks) << "an end of each of two links";
  EXPECT_LE(in_ring, before + kMostMore * kRanks);
  EXPECT_LE(after_asking, before + kMostMore * kRanks);
}

} // namespace
} // namespace pycomm::testing
