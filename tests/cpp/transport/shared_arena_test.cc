#include "transport/shared_arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <new>

#include "base/error.h"
#include "transport/futex.h"
#include "transport/unix_passing.h"

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

std::array<UniqueFd, 2> socketPair() {
  std::array<int, 2> fds{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds.data()), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
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

// A process that shares the memory, and rings; then a child of fork() that was not given it, and has it not.
TEST(SharedArena, IsPassedToAnotherProcessAndNotInherited) {
  const auto sockets = socketPair();
  const SharedArena arena = SharedArena::create(kNbytes);
  arena.commit(0, kNbytes);
  auto& word = *reinterpret_cast<std::atomic<uint32_t>*>(arena.at(128));
  const pid_t other = ::fork();
  if (other == 0) {
    char letter = 0;
    UniqueFd memory;
    if (!sameUser(sockets[1].get()) || takeMessage(sockets[1].get(), &letter, 1, memory) < 0) {
      while (takeMessage(sockets[1].get(), &letter, 1, memory) < 0) {
        ::usleep(1000); // it never waits
      }
    }
    const SharedArena theirs = SharedArena::attach(std::move(memory), kNbytes);
    auto& bell = *reinterpret_cast<std::atomic<uint32_t>*>(theirs.at(128));
    bell.store(letter == 'x' ? 7 : 9, std::memory_order_seq_cst);
    futexWake(bell);
    ::_exit(0);
  }
  ASSERT_TRUE(passMessage(sockets[0].get(), "x", 1, arena.fd()));
  for (int tries = 0; tries < 200 && word.load() == 0; ++tries) {
    futexWait(word, 0, 100000);
  }
  EXPECT_EQ(word.load(), 7U);
  int status = 0;
  ASSERT_EQ(::waitpid(other, &status, 0), other);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);

  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL); // a sanitizer would report it
    word.store(1);
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

TEST(UnixPassing, TooLongAMessageIsNoMessage) {
  const auto sockets = socketPair();
  ASSERT_TRUE(passMessage(sockets[0].get(), "12345678", 8, -1));
  char four[4];
  UniqueFd none;
  EXPECT_EQ(takeMessage(sockets[1].get(), four, sizeof four, none), -1);
  EXPECT_EQ(errno, EMSGSIZE);
  EXPECT_EQ(takeMessage(sockets[1].get(), four, sizeof four, none), -1);
  EXPECT_EQ(errno, EAGAIN);
}

} // namespace
} // namespace pycomm::testing
