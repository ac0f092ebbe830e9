#include "transport/memory/shared_arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <functional>
#include <string>

#include "base/error.h"
#include "base/fault_point.h"
#include "core_file.h"
#include "memory_limit.h"
#include "sanitized.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

constexpr size_t kNbytes = 64 << 10;

template <typename Body>
ErrorCode codeOf(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.record().code;
  }
  return ErrorCode::Ok;
}

TEST(SharedArena, IsOneMemoryUnderTwoAddresses) {
  const SharedArena mine = SharedArena::create(kNbytes);
  mine.commit(0, kNbytes);
  const SharedArena theirs = SharedArena::attach(UniqueFd(::dup(mine.fd())), kNbytes);
  ASSERT_NE(mine.at(0), theirs.at(0));
  std::memcpy(mine.at(5000), "seen", 5);
  EXPECT_STREQ(reinterpret_cast<const char*>(theirs.at(5000)), "seen");
}

TEST(SharedArena, NobodyCanMakeItShorter) {
  const SharedArena arena = SharedArena::create(kNbytes);
  EXPECT_EQ(::ftruncate(arena.fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST(SharedArena, AnythingElseIsRefused) {
  const SharedArena arena = SharedArena::create(kNbytes);
  const auto attach = [&](int fd, size_t nbytes) {
    return codeOf([&] { (void)SharedArena::attach(UniqueFd(::dup(fd)), nbytes); });
  };
  EXPECT_EQ(attach(arena.fd(), kNbytes * 2), ErrorCode::ProtocolViolation); // touching the rest would raise SIGBUS
  UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), kNbytes), 0);
  EXPECT_EQ(attach(unsealed.get(), kNbytes), ErrorCode::ProtocolViolation);
  EXPECT_EQ(attach(0, kNbytes), ErrorCode::ProtocolViolation);
}

// The kernel refuses what lies behind the end. (To ask for more than the host has would take all of it first.)
TEST(SharedArena, NoRoomIsAnError) {
  const SharedArena arena = SharedArena::create(kNbytes);
  EXPECT_EQ(codeOf([&] { arena.commit(kNbytes, kNbytes); }), ErrorCode::NoSharedMemory);
}

// A child, which is at a limit of 64 MiB from join() on, returns true.
void expectAtALimit(const std::function<bool(const MemoryLimit&)>& body) {
  if (kSanitized) {
    GTEST_SKIP() << "the sanitizer itself takes memory below the limit, at any time";
  }
  const MemoryLimit limit(64 << 20);
  if (!limit.made()) {
    GTEST_SKIP() << "no control group with a memory limit can be made here";
  }
  int status = 0;
  const pid_t child = ::fork();
  if (child == 0) {
    ::_exit(body(limit) ? 0 : 1);
  }
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_FALSE(WIFSIGNALED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(status, 0);
}

// At a limit the kernel would end a process of the group.
TEST(SharedArena, NoRoomBelowAMemoryLimitIsAnErrorAndNoSignal) {
  expectAtALimit([](const MemoryLimit& limit) {
    constexpr size_t kLarge = size_t{256} << 20;
    const SharedArena arena = SharedArena::create(kLarge);
    std::string summary;
    try {
      arena.commit(0, limit.join() ? kLarge : 0);
    } catch (const Error& error) {
      summary = error.record().code == ErrorCode::NoSharedMemory ? error.record().summary : "";
    }
    const bool both =
        summary.find("262144 KiB of shared memory: the memory limit in /sys/fs/cgroup") != std::string::npos;
    arena.commit(0, 16 << 20); // for which there is room
    return both && summary.find(" KiB.") != std::string::npos;
  });
}

// How many pieces of 1 MiB fit below a limit before a commit is refused; 0 if all 64 do, or if it ends in another way.
size_t smallCommits(const MemoryLimit& limit, size_t at_once) {
  constexpr size_t kSmall = size_t{1} << 20;
  const SharedArena arena = SharedArena::create(64 * kSmall);
  size_t taken = 0;
  try {
    for (bool joined = limit.join(); joined && taken < 64; ++taken) {
      arena.commit(taken * kSmall, kSmall, at_once);
    }
  } catch (const Error& error) {
    return error.record().code == ErrorCode::NoSharedMemory ? taken : 0;
  }
  return 0;
}

// Of 64 ranks each may have looked before the others took their piece.
TEST(SharedArena, ASmallCommitLeavesRoomForAPieceOfEveryOtherRank) {
  expectAtALimit([](const MemoryLimit& limit) {
    const size_t taken = smallCommits(limit, SharedArena::kMostAtOnce);
    return taken > 16 && taken <= 32;
  });
}

// Two ranks leave room for two pieces, 1 MiB, and not for as many as a host may have: of these at most 32 fit. The process itself takes some
// MiB, and more under a sanitizer.
TEST(SharedArena, ASmallCommitOfFewRanksNeedsLittleMoreRoomThanItsOwn) {
  expectAtALimit([](const MemoryLimit& limit) { return smallCommits(limit, 2) > 36; });
}

// Kernels before 6.9 take back what an interrupted call has allocated. So a call that takes longer than the time between two signals (of
// a profiler) would never end.
TEST(SharedArena, ASignalCostsAPieceAndNotTheWhole) {
  if (!faultPointsBuiltIn()) {
    GTEST_SKIP() << "needs fault points";
  }
  constexpr size_t kLarge = size_t{16} << 20;
  const SharedArena arena = SharedArena::create(kLarge);
  armFaultPoints("arena.commit:3:errno=EINTR");
  arena.commit(0, kLarge);
  const int64_t calls = faultPointTallies().front().visits;
  armFaultPoints("");
  struct stat status{};
  ASSERT_EQ(::fstat(arena.fd(), &status), 0);
  EXPECT_EQ(status.st_blocks * 512, static_cast<int64_t>(kLarge));
  EXPECT_EQ(calls, 33) << "32 pieces, one of them twice";
}

TEST(SharedArena, AChildOfForkDoesNotInheritIt) {
  const SharedArena arena = SharedArena::create(kNbytes);
  arena.commit(0, kNbytes);
  int status = 0;
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL); // a sanitizer would report it
    *static_cast<volatile char*>(static_cast<void*>(arena.at(128))) = 1;
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

// The kernel would make every page of a sparse mapping exist in order to write it down, and the bytes in it are mostly those of others.
TEST(SharedArena, NoneOfItIsInACoreFile) {
  constexpr size_t kLarge = size_t{64} << 20;
  const SharedArena arena = SharedArena::create(kLarge);
  arena.commit(0, kNbytes);
  const Process peer([&] {
    const SharedArena theirs = SharedArena::attach(UniqueFd(::dup(arena.fd())), kLarge);
    const std::string pattern = patternOf(::getpid());
    std::memcpy(theirs.at(8000), pattern.data(), pattern.size());
    return SharedFlag().wait(60000); // until it is killed
  });
  for (const Deadline deadline = Deadline::after(20000); *arena.at(8000) == std::byte{0} && !deadline.expired();) {
    (void)::poll(nullptr, 0, 1);
  }
  ASSERT_NE(*arena.at(8000), std::byte{0});
  const CoreFile core([&] {
    const SharedArena mapped = SharedArena::attach(UniqueFd(::dup(arena.fd())), kLarge);
    std::abort();
  });
  if (!core.unavailable().empty()) {
    GTEST_SKIP() << core.unavailable();
  }
  EXPECT_LE(core.nbytes(), core.residentNbytes() + CoreFile::kAllowedNbytes);
  EXPECT_TRUE(core.contains(CoreFile::kMark)); // it is that process's memory
  EXPECT_FALSE(core.contains(patternOf(peer.pid())));
}

} // namespace
} // namespace pycomm::testing
