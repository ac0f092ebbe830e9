#include "transport/shared_arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "base/error.h"

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

} // namespace
} // namespace pycomm::testing
