#include "engine/monitor/local_peers.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "allocations.h"
#include "base/error.h"
#include "base/log.h"
#include "engine/monitor/host_greeting.h"
#include "sanitized.h"
#include "transport/error_matchers.h"
#include "transport/memory/shared_arena.h"
#include "transport/net/address.h"
#include "transport/net/unix_peer.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

using ::testing::HasSubstr;

constexpr MemoryKey kKey{0x0123456789abcdef, 7};

// A process that asks for the memory under `key`, and returns whether it got some.
bool asks(const std::string& name, const MemoryKey& key, int timeout_ms) {
  const AbortToken none;
  return static_cast<bool>(LocalPeers::ask(name, key, Deadline::after(timeout_ms), none));
}

// The length of the next message: 0 at the end, -1 if none comes.
ssize_t takeWithin10s(int socket, char* room, size_t nbytes, UniqueFd& fd) {
  ssize_t got = -1;
  for (int i = 0; i < 2000 && (got = takeMessage(socket, room, nbytes, fd)) < 0 && errno == EAGAIN; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return got;
}

/// What the process of that name answers to who asks for a report; "none" if it has none.
std::string reportOf(const std::string& name) {
  const UniqueFd socket = connectToLocalPeer(name);
  std::array<char, 64> room{};
  UniqueFd memory;
  const auto take = [&] { return takeWithin10s(socket.get(), room.data(), room.size(), memory); };
  EXPECT_EQ(take(), static_cast<ssize_t>(sizeof(Greeting)));
  AskReport ask;
  EXPECT_TRUE(passMessage(socket.get(), &ask, sizeof ask, -1));
  memory.reset();
  EXPECT_EQ(take(), static_cast<ssize_t>(sizeof ask));
  std::memcpy(&ask, room.data(), sizeof ask);
  EXPECT_EQ(ask.magic, AskReport::kMagic);
  if (ask.there == 0) {
    return "none";
  }
  std::string text(ask.nbytes, '?');
  EXPECT_EQ(::pread(memory.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  return text;
}

TEST(LocalPeers, TellsAProcessThatAsksWhatThisOneIsDoing) {
  EventLoop loop("test");
  std::string said = "all is well";
  LocalPeers local_peers(loop, [&] {
    if (said == "throw") {
      throw std::bad_alloc();
    }
    return said;
  });
  const std::string name = local_peers.name();
  EXPECT_EQ(reportOf(name), "all is well");
  loop.run([&] { said.assign(100000, 'x'); });
  EXPECT_EQ(reportOf(name), std::string(100000, 'x'));
  loop.run([&] { said = "throw"; });
  EXPECT_EQ(reportOf(name), "none");
  loop.run([&] { said.clear(); });
  EXPECT_EQ(reportOf(name), "none");
  local_peers.close();
  loop.stop();
}

std::shared_ptr<const SharedArena> someMemory() {
  return std::make_shared<const SharedArena>(SharedArena::create(4096));
}

// A group that finds no memory to withdraw an offer: the number of its descriptor is that of another file before long.
// The next one gets the descriptor of one that could not open: the loop must have forgotten that.
TEST(LocalPeers, OneThatCannotOpenForWantOfMemoryLeavesNothing) {
  bool struck = true;
  for (int64_t nth = 1; struck; ++nth) {
    ASSERT_LT(nth, 1000);
    EventLoop loop("test");
    for (const bool again : {false, true}) {
      loop.run([&] { failAllocation(again ? 0 : nth); });
      LocalPeers local_peers(loop);
      EXPECT_TRUE(!local_peers.name().empty() || !again) << "allocation " << nth;
      loop.run([&] {
        struck = again ? struck : allocationFailed();
        failAllocation(0);
      });
    }
    loop.stop();
  }
}

TEST(LocalPeers, WhatIsOfferedStaysWhatItIs) {
  EventLoop loop("test");
  LocalPeers local_peers(loop);
  const std::string name = local_peers.name();
  auto memory = someMemory();
  const int number = memory->fd();
  loop.run([&] { local_peers.offer(kKey, memory); });
  memory.reset();
  const UniqueFd other(::memfd_create("other", MFD_CLOEXEC));
  EXPECT_NE(other.get(), number);
  const AbortToken none;
  const UniqueFd got = LocalPeers::ask(name, kKey, Deadline::after(10000), none);
  EXPECT_NO_THROW((void)SharedArena::attach(UniqueFd(::dup(got.get())), 4096));
  local_peers.close();
  loop.stop();
}

TEST(LocalPeers, GivesMemoryForItsKeyOnly) {
  EventLoop loop("test");
  LocalPeers local_peers(loop);
  const std::string name = local_peers.name();
  loop.run([&] { local_peers.offer(kKey, someMemory()); });
  for (const MemoryKey& wrong :
       {MemoryKey{}, MemoryKey{kKey.high, kKey.low + 1}, MemoryKey{kKey.high ^ 1, kKey.low}, MemoryKey{0, kKey.low}}) {
    const ErrorRecord record = errorOf([&] { (void)asks(name, wrong, 200); });
    EXPECT_EQ(record.code, ErrorCode::Unsupported) << "it got memory";
    EXPECT_THAT(record.summary, HasSubstr("did not answer in time"));
  }
  EXPECT_TRUE(asks(name, kKey, 10000));
  loop.run([&] { local_peers.withdraw({0, kKey.low}); });
  EXPECT_TRUE(asks(name, kKey, 10000));
  loop.run([&] { local_peers.withdraw(kKey); });
  EXPECT_EQ(errorOf([&] { (void)asks(name, kKey, 200); }).code, ErrorCode::Unsupported);
  local_peers.close();
  loop.stop();
}

// A pcsa question as 0.2.0 sent it, with half of the key, and a longer one.
TEST(LocalPeers, HangsUpOnAQuestionOfAnotherLength) {
  EventLoop loop("test");
  LocalPeers local_peers(loop);
  const std::string name = local_peers.name();
  loop.run([&] { local_peers.offer({0, 0}, someMemory()); });
  for (const size_t nbytes : {sizeof(Greeting), sizeof(AskReport), sizeof(Ask) + 8}) {
    const UniqueFd socket = connectToLocalPeer(name);
    std::array<char, 64> question{};
    const Ask ask;
    std::memcpy(question.data(), &ask, sizeof ask);
    ASSERT_TRUE(passMessage(socket.get(), question.data(), nbytes, -1));
    UniqueFd words;
    EXPECT_EQ(takeWithin10s(socket.get(), question.data(), sizeof(Greeting), words), sizeof(Greeting));
    EXPECT_EQ(takeWithin10s(socket.get(), question.data(), question.size(), words), 0) << nbytes;
  }
  local_peers.close();
  loop.stop();
}

// It reaches the socket, as any process of the host does: it is sent nothing at all, so it needs no key to fail.
TEST(LocalPeers, AnotherUserIsSentNothing) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  // In a process of its own: it forks before it has threads.
  EXPECT_TRUE(Process([] {
                SharedFlag named;
                std::array<char, 17>* const name =
                    new (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                        std::array<char, 17>();
                const auto getsNothing = [&](uid_t uid) {
                  if (!named.wait() || ::setresuid(uid, uid, uid) != 0) {
                    return false;
                  }
                  const UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
                  const SocketAddress address = SocketAddress::unixSocket(name->data());
                  std::array<char, 64> room{};
                  UniqueFd words;
                  return ::connect(socket.get(), address.raw(), address.rawLength()) == 0 &&
                      takeWithin10s(socket.get(), room.data(), room.size(), words) == 0 && !words;
                };
                Process other([&] { return getsNothing(4321); });
                Process same([&] { return getsNothing(0); });
                EventLoop loop("test");
                LocalPeers local_peers(loop);
                const std::string own = local_peers.name();
                std::copy(own.begin(), own.end(), name->begin());
                named.raise();
                const bool refused = other.join(20000);
                const bool greeted = !same.join(20000);
                local_peers.close();
                loop.stop();
                return refused && greeted;
              }).join(60000));
}

// A lack of files passes: processes that asked meanwhile are served when it is over, and so are later ones.
TEST(LocalPeers, ServesProcessesThatCameWhileItHadNoFiles) {
  if (kSanitized) {
    GTEST_SKIP() << "the sanitizers' own runtimes need descriptors";
  }
  // In a process of its own: the limit hits all of it.
  EXPECT_TRUE(Process([] {
                SharedFlag named;
                SharedFlag asking;
                std::array<char, 17>* const name =
                    new (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                        std::array<char, 17>();
                Process early([&] { // before this process has threads
                  if (!named.wait()) {
                    return false;
                  }
                  asking.raise();
                  return asks(name->data(), kKey, 60000);
                });
                SharedFlag over;
                Process late([&] { return over.wait() && asks(name->data(), kKey, 60000); });
                EventLoop loop("test");
                LocalPeers local_peers(loop);
                const std::string own = local_peers.name();
                std::copy(own.begin(), own.end(), name->begin());
                const auto memory = someMemory();
                loop.run([&] { local_peers.offer(kKey, memory); });
                std::vector<UniqueFd> hoard;
                const rlimit limit{64, 64};
                ::setrlimit(RLIMIT_NOFILE, &limit);
                while (hoard.empty() || hoard.back()) {
                  hoard.emplace_back(::fcntl(memory->fd(), F_DUPFD_CLOEXEC, 0));
                }
                named.raise();
                const bool asked = asking.wait();
                const TimePoint begin = Clock::now();
                const bool waits = early.runsOn(400); // it has found the name, and is not served
                hoard.clear();
                over.raise();
                const bool served = early.join();
                const bool soon = Clock::now() - begin < std::chrono::seconds(20); // of the 60 in which it asks
                const bool later = late.join();
                local_peers.close();
                loop.stop();
                return own.size() == 16 && asked && waits && served && soon && later;
              }).join(120000));
}

// The greeting of a process brings a descriptor, which the kernel drops if there is no room for it.
TEST(LocalPeers, WatchesAProcessOnceThereIsADescriptorForIt) {
  if (kSanitized) {
    GTEST_SKIP() << "the sanitizers' own runtimes need descriptors";
  }
  // In a process of its own: the limit hits all of it.
  EXPECT_TRUE(Process([] {
                SharedFlag named;
                std::array<char, 17>* const name =
                    new (::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                        std::array<char, 17>();
                Process other([&] {
                  EventLoop loop("other");
                  LocalPeers local_peers(loop);
                  const std::string own = local_peers.name();
                  std::copy(own.begin(), own.end(), name->begin());
                  named.raise();
                  for (;;) {
                    ::pause();
                  }
                  return false;
                });
                if (!named.wait()) {
                  return false;
                }
                EventLoop loop("test");
                LocalPeers local_peers(loop);
                static std::atomic<int> told{0};
                setLogSink(
                    [](LogLevel, const char* line) {
                      told += std::strstr(line, "no descriptor was free for it") != nullptr &&
                              std::strstr(line, "the next group tries again") != nullptr
                          ? 1
                          : 0;
                    },
                    LogLevel::Info);
                std::atomic<int> deaths{0};
                const auto watch = [&] {
                  loop.run([&] { static_cast<void>(local_peers.watch(name->data(), [&] { ++deaths; })); });
                };
                const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
                const auto another = [&] { return UniqueFd(::fcntl(memory.get(), F_DUPFD_CLOEXEC, 0)); };
                std::vector<UniqueFd> hoard;
                const rlimit limit{64, 64};
                ::setrlimit(RLIMIT_NOFILE, &limit);
                while (hoard.empty() || hoard.back()) {
                  hoard.push_back(another());
                }
                hoard.pop_back();
                hoard.pop_back(); // for the connection
                watch();
                const Deadline most = Deadline::after(60000);
                while (!another() && !most.expired()) { // until the connection is given up
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
                const bool said = told == 1;
                hoard.clear();
                watch();
                const bool lived = other.runsOn(300); // it is greeted meanwhile
                other.kill();
                while (deaths < 2 && !most.expired()) {
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
                local_peers.close();
                loop.stop();
                return said && told == 1 && lived && deaths == 2;
              }).join(120000));
}

} // namespace
} // namespace pycomm::testing
