#include "engine/monitor/host_mates.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/monitor/host_greeting.h"
#include "sanitized.h"
#include "transport/memory/unix_passing.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

// A process that asks for the memory under `key`, and returns whether it got some.
bool asks(const std::string& name, uint64_t key, int timeout_ms) {
  const AbortToken none;
  return static_cast<bool>(HostMates::ask(name, key, Deadline::after(timeout_ms), none));
}

/// What the process of that name answers to who asks for a report; "none" if it has none.
std::string reportOf(const std::string& name) {
  const UniqueFd socket = connectToMate(name);
  std::array<char, 64> room{};
  UniqueFd memory;
  const auto take = [&] {
    ssize_t got = -1;
    for (int i = 0; i < 1000 && (got = takeMessage(socket.get(), room.data(), room.size(), memory)) < 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return got;
  };
  EXPECT_EQ(take(), static_cast<ssize_t>(sizeof(Greeting)));
  Ask ask;
  ask.magic = Ask::kReport;
  EXPECT_TRUE(passMessage(socket.get(), &ask, sizeof ask, -1));
  memory.reset();
  EXPECT_EQ(take(), static_cast<ssize_t>(sizeof ask));
  std::memcpy(&ask, room.data(), sizeof ask);
  EXPECT_EQ(ask.magic, Ask::kReport);
  if (ask.there == 0) {
    return "none";
  }
  std::string text(ask.key, '?');
  EXPECT_EQ(::pread(memory.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  return text;
}

TEST(HostMates, TellsAProcessThatAsksWhatThisOneIsDoing) {
  EventLoop loop("test");
  std::string said = "all is well";
  HostMates mates(loop, [&] {
    if (said == "throw") {
      throw std::bad_alloc();
    }
    return said;
  });
  const std::string name = mates.name();
  EXPECT_EQ(reportOf(name), "all is well");
  loop.run([&] { said.assign(100000, 'x'); });
  EXPECT_EQ(reportOf(name), std::string(100000, 'x'));
  loop.run([&] { said = "throw"; });
  EXPECT_EQ(reportOf(name), "none");
  loop.run([&] { said.clear(); });
  EXPECT_EQ(reportOf(name), "none");
  mates.close();
  loop.stop();
}

// A lack of files passes: processes that asked meanwhile are served when it is over, and so are later ones.
TEST(HostMates, ServesProcessesThatCameWhileItHadNoFiles) {
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
                  return asks(name->data(), 7, 10000);
                });
                SharedFlag over;
                Process late([&] { return over.wait() && asks(name->data(), 7, 10000); });
                EventLoop loop("test");
                HostMates mates(loop);
                const std::string own = mates.name();
                std::copy(own.begin(), own.end(), name->begin());
                const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
                loop.run([&] { mates.offer(7, memory.get()); });
                std::vector<UniqueFd> hoard;
                const rlimit limit{64, 64};
                ::setrlimit(RLIMIT_NOFILE, &limit);
                while (hoard.empty() || hoard.back()) {
                  hoard.emplace_back(::fcntl(memory.get(), F_DUPFD_CLOEXEC, 0));
                }
                named.raise();
                const bool asked = asking.wait();
                const TimePoint begin = Clock::now();
                const bool waits = early.runsOn(400); // it has found the name, and is not served
                hoard.clear();
                over.raise();
                const bool served = early.join(5000);
                const bool soon = Clock::now() - begin < std::chrono::seconds(3);
                const bool later = late.join(5000);
                mates.close();
                loop.stop();
                return own.size() == 16 && asked && waits && served && soon && later;
              }).join(30000));
}

} // namespace
} // namespace pycomm::testing
