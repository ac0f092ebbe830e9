#include "base/fork_guard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"
#include "transport/process.h"

namespace pycomm {
namespace {

bool isOpen(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

bool inChild(const std::function<bool()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::_exit(body() ? 0 : 1);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::pair<UniqueFd, UniqueFd> pipeOfOurs() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

TEST(ForkGuard, AChildHoldsNothingOpen) {
  installForkGuard();
  installForkGuard(); // once is enough, twice no harm
  auto [read_end, write_end] = pipeOfOurs();
  std::array<int, 2> foreign{};
  ASSERT_EQ(::pipe2(foreign.data(), O_CLOEXEC), 0);
  const int ours = read_end.get();
  EXPECT_TRUE(inChild([&] { return !isOpen(ours) && isOpen(foreign[0]) && forkCount() == 1; }));
  EXPECT_TRUE(isOpen(ours));
  EXPECT_EQ(forkCount(), 0U);
  ::close(foreign[0]);
  ::close(foreign[1]);
}

TEST(ForkGuard, AParentsObjectClosesNothingInTheChild) {
  installForkGuard();
  auto [read_end, write_end] = pipeOfOurs();
  const int number = read_end.get();
  EXPECT_TRUE(inChild([&, read = &read_end] {
    // The lowest free number is given out again: to somebody else, whose descriptor it now is.
    const UniqueFd other(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (other.get() > number) {
      return false;
    }
    const int theirs = ::fcntl(other.get(), F_DUPFD, number);
    read->reset();
    UniqueFd moved = std::move(*read);
    moved.reset();
    return theirs == number ? isOpen(theirs) : other.get() == number && isOpen(number);
  }));
}

TEST(ForkGuard, AChildsOwnDescriptorsAreItsOwn) {
  installForkGuard();
  EXPECT_TRUE(inChild([] {
    auto [read_end, write_end] = pipeOfOurs();
    const int number = read_end.get();
    const bool hidden = inChild([&] { return !isOpen(number) && forkCount() == 2; });
    read_end.reset();
    return hidden && !isOpen(number);
  }));
}

TEST(ForkGuard, ReleasedDescriptorsAreNoLongerGuarded) {
  installForkGuard();
  auto [read_end, write_end] = pipeOfOurs();
  const int released = read_end.release();
  EXPECT_TRUE(inChild([&] { return isOpen(released); }));
  ::close(released);
}

// A fork between the call that makes a descriptor and the one that guards it would leave it open in the child.
TEST(ForkGuard, AForkWaitsUntilANewDescriptorIsGuarded) {
  installForkGuard();
  std::atomic<int> number{-1};
  std::atomic<bool> forked{false};
  std::thread other([&] {
    const UniqueFd made = UniqueFd::from([&] {
      const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
      number = fd;
      for (int ms = 0; ms < 500 && !forked; ++ms) { // as if it were preempted here
        (void)::poll(nullptr, 0, 1);
      }
      return fd;
    });
    while (!forked) {
      (void)::poll(nullptr, 0, 1);
    }
  });
  while (number < 0) {
    std::this_thread::yield();
  }
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::_exit(isOpen(number) ? 1 : 0);
  }
  forked = true;
  int status = -1;
  ::waitpid(pid, &status, 0);
  other.join();
  EXPECT_EQ(status, 0) << "the child holds a descriptor of its parent's";
}

// Its own hold is no reason to wait, in the parent or in the child.
TEST(ForkGuard, AThreadThatHoldsForksOffMayForkItself) {
  EXPECT_TRUE(
      testing::Process([] { // which is killed if it waits for ever
        installForkGuard();
        const auto forks = [] {
          const ForksHeldOff held_off;
          const ForksHeldOff twice;
          return inChild([] { return true; });
        };
        return forks() && inChild([&] { return forks() && inChild([] { return true; }); }) && forks();
      })
          .join());
}

// Neither may wait for the other for ever.
TEST(ForkGuard, ThreadsThatHoldForksOffMayForkAtTheSameTime) {
#if __GLIBC__ < 2 || (__GLIBC__ == 2 && __GLIBC_MINOR__ < 36)
  GTEST_SKIP() << "an older glibc holds its own lock while handlers of fork() run";
#endif
  EXPECT_TRUE(testing::Process([] {
                installForkGuard();
                std::atomic<int> holding{0};
                std::atomic<int> good{0};
                std::vector<std::thread> threads;
                for (int i = 0; i < 2; ++i) {
                  threads.emplace_back([&] {
                    const ForksHeldOff held_off;
                    for (++holding; holding < 2;) {
                      std::this_thread::yield();
                    }
                    good += inChild([] { return true; }) ? 1 : 0;
                  });
                }
                for (std::thread& thread : threads) {
                  thread.join();
                }
                return good == 2;
              }).join());
}

} // namespace
} // namespace pycomm
