#include "transport/death_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"
#include "sanitized.h"
#include "transport/error_matchers.h"
#include "transport/process.h"

namespace pycomm {
namespace {

using testing::elapsedMs;
using testing::errorOf;
using testing::kSanitized;
using testing::Process;
using testing::SharedFlag;

/// What a watch has told, by its numbers.
struct Told {
  std::mutex mutex;
  std::set<uint64_t> dead;

  DeathWatch::Died listener() {
    return [this](uint64_t watch) {
      const std::lock_guard<std::mutex> lock(mutex);
      dead.insert(watch);
    };
  }
  bool has(uint64_t watch) {
    const std::lock_guard<std::mutex> lock(mutex);
    return dead.count(watch) != 0;
  }
  bool waitFor(uint64_t watch, int timeout_ms = 10000) {
    for (const Deadline deadline = Deadline::after(timeout_ms); !has(watch);) {
      if (deadline.expired()) {
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }
};

const DeathWatch::Died kNobody = [](uint64_t) {};

/// docs/errors.md promises about a millisecond. To free 512 MiB takes the kernel 50.
constexpr int kToldMs = kSanitized ? 200 : 20;

UniqueFd copyOf(int fd) {
  return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

/// A process that lends words until it is killed. Its descriptor is reached through /proc, as a socket would pass it.
class Lender {
 public:
  explicit Lender(int words, size_t resident_nbytes = 0)
      : process_([&, words, resident_nbytes] {
          DeathWatch watch(kNobody);
          for (int i = 0; i < words; ++i) {
            (void)watch.lend();
          }
          if (resident_nbytes > 0) {
            void* memory = ::mmap(nullptr, resident_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            std::memset(memory, 1, resident_nbytes);
          }
          fd_.raise(watch.wordsFd() + 1);
          (void)leave_.wait(60000);
          watch.stop();
          left_.raise();
          return SharedFlag().wait(60000); // until it is killed
        }) {
    EXPECT_TRUE(fd_.wait());
  }
  [[nodiscard]] UniqueFd words() const {
    const std::string path = "/proc/" + std::to_string(process_.pid()) + "/fd/" + std::to_string(fd_.value() - 1);
    return UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  }
  void leave() {
    leave_.raise();
    EXPECT_TRUE(left_.wait());
  }
  void kill() const {
    process_.kill();
  }
  void waitUntilGone() {
    (void)process_.join();
  }

 private:
  SharedFlag fd_;
  SharedFlag leave_;
  SharedFlag left_;
  Process process_;
};

TEST(DeathWatch, TellsOfAKilledProcess) {
  const Lender lender(2); // first: forked while there is one thread
  Told told;
  DeathWatch watch(told.listener());
  const uint64_t first = watch.watch(lender.words(), 0);
  const uint64_t second = watch.watch(lender.words(), 1);
  EXPECT_FALSE(told.waitFor(first, 50));
  const TimePoint begin = Clock::now();
  lender.kill();
  EXPECT_TRUE(told.waitFor(first));
  EXPECT_TRUE(told.waitFor(second));
  EXPECT_WITHIN_MS(elapsedMs(begin), kToldMs);
}

TEST(DeathWatch, TellsBeforeALargeProcessHasGivenItsMemoryBack) {
  Lender lender(1, 512 << 20); // first: forked while there is one thread
  Told told;
  DeathWatch watch(told.listener());
  const uint64_t number = watch.watch(lender.words(), 0);
  const TimePoint begin = Clock::now();
  lender.kill();
  ASSERT_TRUE(told.waitFor(number));
  const int64_t told_ms = elapsedMs(begin);
  lender.waitUntilGone();
  RecordProperty("told_ms", static_cast<int>(told_ms));
  RecordProperty("gone_ms", static_cast<int>(elapsedMs(begin)));
  EXPECT_WITHIN_MS(told_ms, kToldMs); // 1 on a machine with nothing else to do
}

TEST(DeathWatch, TellsAllWatchersOfOneProcess) {
  constexpr int kWatchers = 5;
  std::array<Told, kWatchers> told;
  std::vector<std::unique_ptr<DeathWatch>> watches;
  const Lender lender(kWatchers);
  std::vector<uint64_t> numbers;
  for (uint32_t i = 0; i < kWatchers; ++i) {
    watches.push_back(std::make_unique<DeathWatch>(told[i].listener()));
    numbers.push_back(watches.back()->watch(lender.words(), i));
  }
  lender.kill();
  for (uint32_t i = 0; i < kWatchers; ++i) {
    EXPECT_TRUE(told[i].waitFor(numbers[i])) << i;
  }
}

TEST(DeathWatch, SaysNothingOfAProcessThatLeavesInOrder) {
  Lender lender(1); // first: forked while there is one thread
  Told told;
  DeathWatch watch(told.listener());
  const uint64_t number = watch.watch(lender.words(), 0);
  lender.leave();
  lender.kill();
  EXPECT_FALSE(told.waitFor(number, 100));
}

TEST(DeathWatch, SaysNothingOnceItLooksAway) {
  const Lender lender(2); // first: forked while there is one thread
  Told told;
  DeathWatch watch(told.listener());
  const uint64_t first = watch.watch(lender.words(), 0);
  const uint64_t second = watch.watch(lender.words(), 1);
  watch.unwatch(first);
  lender.kill();
  EXPECT_TRUE(told.waitFor(second));
  EXPECT_FALSE(told.has(first));
}

TEST(DeathWatch, TellsAtOnceOfAProcessThatIsDeadAlready) {
  const Lender lender(1); // first: forked while there is one thread
  Told told;
  DeathWatch watch(told.listener());
  const UniqueFd words = lender.words();
  lender.kill();
  EXPECT_TRUE(told.waitFor(watch.watch(words, 0)));
}

TEST(DeathWatch, WatchesMoreThanOneCallTakes) {
  const Lender lender(200); // first: forked while there is one thread
  Told told;
  DeathWatch watch(told.listener());
  std::vector<uint64_t> numbers;
  for (uint32_t i = 0; i < 200; ++i) {
    numbers.push_back(watch.watch(lender.words(), i));
  }
  lender.kill();
  for (const uint64_t number : numbers) {
    EXPECT_TRUE(told.waitFor(number)) << number;
  }
}

TEST(DeathWatch, LendsEachWordOnce) {
  DeathWatch watch(kNobody);
  std::set<uint32_t> lent;
  for (uint32_t i = 0; i < DeathWatch::kWords; ++i) {
    const auto word = watch.lend();
    ASSERT_TRUE(word);
    lent.insert(*word);
  }
  EXPECT_EQ(lent.size(), DeathWatch::kWords);
  EXPECT_FALSE(watch.lend());
  watch.takeBack(7);
  EXPECT_EQ(watch.lend(), 7U);
}

TEST(DeathWatch, IsNotInheritedByAChild) {
  // A child that lives on must not make its dead parent look alive, nor its own end look like the parent's.
  Told told;
  DeathWatch watch(told.listener());
  DeathWatch parent(kNobody);
  const auto word = parent.lend();
  const uint64_t number = watch.watch(copyOf(parent.wordsFd()), *word);
  EXPECT_TRUE(Process([] { return true; }).join());
  EXPECT_FALSE(told.waitFor(number, 50));
}

TEST(DeathWatch, GivesOthersWordsThatTheyCannotWrite) {
  DeathWatch watch(kNobody);
  EXPECT_EQ(::mmap(nullptr, DeathWatch::kNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, watch.wordsFd(), 0), MAP_FAILED);
  EXPECT_NE(::ftruncate(watch.wordsFd(), 0), 0);
}

TEST(DeathWatch, RefusesWhatCouldVanishUnderIt) {
  DeathWatch watch(kNobody);
  const UniqueFd plain(::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(plain.get(), DeathWatch::kNbytes), 0);
  EXPECT_EQ(errorOf([&] { (void)watch.watch(plain, 0); }).code, ErrorCode::ProtocolViolation);
  ASSERT_EQ(::ftruncate(plain.get(), 8), 0);
  ASSERT_EQ(::fcntl(plain.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(errorOf([&] { (void)watch.watch(plain, 0); }).code, ErrorCode::ProtocolViolation);
  EXPECT_EQ(errorOf([&] { (void)watch.watch(UniqueFd(), 0); }).code, ErrorCode::ProtocolViolation);
  const UniqueFd good = copyOf(DeathWatch(kNobody).wordsFd());
  EXPECT_EQ(errorOf([&] { (void)watch.watch(good, DeathWatch::kWords); }).code, ErrorCode::ProtocolViolation);
}

TEST(DeathWatch, SurvivesManyThatComeAndGo) {
  // Watching, looking away and ending from several threads while the watch sleeps on the words: for ThreadSanitizer.
  Told told;
  DeathWatch watch(told.listener());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 30; ++round) {
        DeathWatch other(kNobody);
        const auto word = other.lend();
        const uint64_t number = watch.watch(copyOf(other.wordsFd()), *word);
        if (round % 2 == 0) {
          watch.unwatch(number);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(told.dead.empty());
}

} // namespace
} // namespace pycomm
